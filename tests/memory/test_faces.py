"""Every method of both faces, side by side with mem0's own: same arguments, same results, same errors."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mem0
import pytest
from mem0.exceptions import ValidationError as Mem0ValidationError

import inferscale_memory
from inferscale_memory.errors import PromptError
from inferscale_memory.memory import AsyncChatSession, ChatSession, Prepared, Reply
from tests.memory.conftest import OpenFace
from tests.memory.faces import MEM0S, OURS, Settled
from tests.memory.saying import ADA, BEN, MAY, injected, texts
from tests.memory.watched import WatchedEngine

METHODS = ("add", "search", "get", "get_all", "update", "delete", "delete_all", "history", "reset", "close")

# What differs from one run to the next, or from one memory to another.
_OWN = {"id", "created_at", "updated_at", "memory_id", "score"}


def shape(value: Any) -> Any:
    """`value` without what no two memories have in common."""
    if isinstance(value, dict):
        return {key: None if key in _OWN else shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return value


def outcome(work: Callable[[], Any]) -> Any:
    """The shape of a result, or the type and the words of an error."""
    try:
        return shape(work())
    except Exception as error:
        return type(error), str(error)


def fill(memory: Settled) -> dict[str, str]:
    """Text -> id."""
    said = [
        ("I like tea", ADA, {}),
        ("I like coffee", ADA, {"metadata": {"topic": "drink", "stars": 4}}),
        ("My cat is grey", {**ADA, "agent_id": "vet"}, {"expiration_date": "2999-01-01"}),
        ("Ben likes milk", BEN, {}),
        ("Stale news", ADA, {"expiration_date": "2001-01-01"}),
    ]
    ids = {}
    for text, who, more in said:
        [result] = memory.add(text, **who, infer=False, **more)["results"]
        ids[text] = result["id"]
    return ids


class TestIdentity:
    def test_it_is_one_of_mem0s(self, either: Settled, face: str) -> None:
        assert isinstance(either.itself, MEM0S[face])

    def test_both_faces_come_from_the_package(self) -> None:
        assert inferscale_memory.Memory is OURS["sync"]
        assert inferscale_memory.AsyncMemory is OURS["async"]

    @pytest.mark.parametrize("method", METHODS)
    def test_signatures_are_mem0s(self, face: str, method: str) -> None:
        ours, mem0s = (inspect.signature(getattr(kind[face], method)) for kind in (OURS, MEM0S))
        assert [(p.name, p.kind) for p in ours.parameters.values()] == [
            (p.name, p.kind) for p in mem0s.parameters.values()
        ]
        assert [p.default for p in ours.parameters.values()] == [p.default for p in mem0s.parameters.values()]

    @pytest.mark.parametrize("method", METHODS)
    def test_what_mem0_awaits_is_awaited(self, face: str, method: str) -> None:
        ours, mem0s = (getattr(kind[face], method) for kind in (OURS, MEM0S))
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(mem0s)

    @pytest.mark.parametrize("name", ["chat", "prepare", "flush", "expire", "audit"])
    def test_our_own_methods_have_the_same_arguments_on_both(self, name: str) -> None:
        ours, other = (inspect.signature(getattr(OURS[kind], name)) for kind in ("sync", "async"))
        assert list(ours.parameters) == list(other.parameters)
        assert inspect.iscoroutinefunction(getattr(OURS["async"], name))

    def test_no_method_of_mem0s_is_missing(self, face: str) -> None:
        mem0s = {name for name in dir(MEM0S[face]) if not name.startswith("__")}
        assert mem0s <= set(dir(OURS[face]))


class TestResults:
    def test_add_without_inference(self, either: Settled, mem0s_own: Settled) -> None:
        for messages in (
            "I like tea",
            {"role": "user", "content": "I like tea"},
            [{"role": "user", "content": "Hi", "name": "Ada"}, {"role": "assistant", "content": "Hello"}],
            [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
            [{"role": "user"}, {"content": "nobody"}],
            [],
        ):
            calls = (lambda memory, m=messages: memory.add(m, **ADA, infer=False),)
            for call in calls:
                assert outcome(lambda c=call: c(either)) == outcome(lambda c=call: c(mem0s_own))

    @pytest.mark.parametrize(
        "options",
        [
            {"user_id": "ada", "agent_id": "vet", "run_id": "r1"},
            {"agent_id": "vet"},
            {"run_id": "r1"},
            {"user_id": 7},
            {"user_id": " ada "},
            {"user_id": "ada", "metadata": {"topic": "drink", "user_id": "eve"}},
            {"user_id": "ada", "expiration_date": "2999-12-31"},
            {"user_id": "ada", "prompt": "Only tea."},
        ],
    )
    def test_what_add_writes(self, either: Settled, mem0s_own: Settled, options: dict[str, Any]) -> None:
        def written(memory: Settled) -> Any:
            [added] = memory.add("I like tea", infer=False, **options)["results"]
            return memory.get(added["id"])

        assert outcome(lambda: written(either)) == outcome(lambda: written(mem0s_own))

    @pytest.mark.parametrize(
        "call",
        [
            lambda m: m.search("tea", filters=ADA),
            lambda m: m.search("tea", filters=ADA, top_k=1),
            lambda m: m.search("tea", filters=ADA, top_k=0),
            lambda m: m.search("tea", filters=ADA, threshold=0.99),
            lambda m: m.search("tea", filters=ADA, threshold=None),
            lambda m: m.search("likes", filters={**ADA, "topic": "drink"}),
            lambda m: m.search("coffee", filters={**ADA, "stars": {"gte": 4}}),
            lambda m: m.search("cat", filters={"agent_id": "vet"}),
            lambda m: m.search("news", filters=ADA, show_expired=True),
            lambda m: m.search("tea", filters=ADA, rerank=True),
            lambda m: m.search(query="tea", filters=ADA, unknown="ignored"),
            lambda m: m.search("tea", filters={"user_id": "nobody"}),
            lambda m: m.get_all(filters=ADA, show_expired=True),
            lambda m: m.get_all(filters={"user_id": "nobody"}),
            lambda m: m.get_all(filters={"user_id": " ben "}),
            lambda m: m.get("00000000-0000-0000-0000-000000000000"),
            lambda m: m.history("00000000-0000-0000-0000-000000000000"),
        ],
    )
    def test_what_is_found(self, either: Settled, mem0s_own: Settled, call: Callable[[Settled], Any]) -> None:
        fill(either)
        fill(mem0s_own)

        def sorted_by_text(memory: Settled) -> Any:
            found = call(memory)
            if isinstance(found, dict) and "results" in found:
                found["results"].sort(key=lambda item: item["memory"])
            return found

        assert outcome(lambda: sorted_by_text(either)) == outcome(lambda: sorted_by_text(mem0s_own))

    def test_explained_scores(self, either: Settled, mem0s_own: Settled) -> None:
        details = []
        for memory in (either, mem0s_own):
            fill(memory)
            [found] = memory.search("tea", filters=ADA, top_k=1, explain=True)["results"]
            details.append((found["memory"], found["score_details"].keys()))
        assert details[0] == details[1]

    def test_the_life_of_a_memory(self, either: Settled, mem0s_own: Settled) -> None:
        def life(memory: Settled) -> Any:
            tea = fill(memory)["I like tea"]
            seen = [memory.get(tea)]
            seen.append(memory.update(tea, "I like green tea"))
            seen.append(memory.update(tea, text="I like black tea", metadata={"cups": 2}))
            seen.append(memory.update(tea, metadata={"cups": 3}))
            seen.append(memory.update(memory_id=tea, expiration_date="2999-01-01"))
            seen.append(memory.update(tea, expiration_date=None))
            seen.append(memory.update(tea, data="I like tea again"))
            seen.append(memory.get(tea))
            seen.append(memory.delete(memory_id=tea))
            seen.append(memory.get(tea))
            texts = {"old_memory": None, "new_memory": None}  # which ours has forgotten
            seen.append([{**event, "id": None, **texts} for event in memory.history(tea)])
            seen.append(memory.delete_all(**ADA))
            seen.append(memory.get_all(filters=ADA))
            seen.append(memory.get_all(filters=BEN))
            seen.append(memory.reset())
            seen.append(memory.get_all(filters=BEN))
            return seen

        assert outcome(lambda: life(either)) == outcome(lambda: life(mem0s_own))

    def test_subsets_of_ids_match(self, either: Settled) -> None:
        either.add("Seen by the vet", user_id="ada", agent_id="vet", run_id="r1", infer=False)
        for some in ({"user_id": "ada"}, {"agent_id": "vet"}, {"run_id": "r1"}, {**ADA, "run_id": "r1"}):
            assert [m["memory"] for m in either.get_all(filters=some)["results"]] == ["Seen by the vet"]
            assert len(either.search("vet", filters=some)["results"]) == 1
        assert either.get_all(filters={**ADA, "run_id": "r2"})["results"] == []

    def test_inference_extracts_with_mem0s_pipeline(self, either: Settled, mem0s_own: Settled) -> None:
        for memory in (either, mem0s_own):
            memory.itself.llm = Extractor("Ada likes tea", "Ada likes tea", "Ada has a cat")
        add: Callable[[Settled], Any] = lambda m: m.add("I like tea, and my cat too", **ADA)  # noqa: E731
        assert outcome(lambda: add(either)) == outcome(lambda: add(mem0s_own))
        stored = {memory["memory"] for memory in either.get_all(filters=ADA)["results"]}
        assert stored == {"Ada likes tea", "Ada has a cat"}, "duplicates within one add are removed"

    def test_procedural_memories(self, either: Settled, mem0s_own: Settled) -> None:
        for memory in (either, mem0s_own):
            memory.itself.llm = Extractor(says="1. Boil water. 2. Wait.")
        add: Callable[[Settled], Any] = lambda m: m.add(  # noqa: E731
            "How I make tea", agent_id="cook", memory_type="procedural_memory"
        )
        assert outcome(lambda: add(either)) == outcome(lambda: add(mem0s_own))


class Extractor:
    """An LLM that extracts what it was made with."""

    def __init__(self, *facts: str, says: str | None = None) -> None:
        self.facts = facts
        self.says = says

    def generate_response(self, messages: Any, **options: Any) -> str:
        import json

        return self.says or json.dumps({"memory": [{"text": fact} for fact in self.facts]})


class Failing:
    def generate_response(self, messages: Any, **options: Any) -> str:
        raise RuntimeError("the model is away")


NOBODY = "00000000-0000-0000-0000-000000000000"


class TestErrors:
    @pytest.mark.parametrize(
        "call",
        [
            lambda m: m.add("hello"),
            lambda m: m.add("hello", user_id=""),
            lambda m: m.add("hello", user_id="two words"),
            lambda m: m.add("hello", agent_id="\t"),
            lambda m: m.add(123, user_id="ada"),
            lambda m: m.add(None, user_id="ada"),
            lambda m: m.add(("hello",), user_id="ada"),
            lambda m: m.add("hello", user_id="ada", memory_type="semantic"),
            lambda m: m.add("hello", user_id="ada", expiration_date="tomorrow"),
            lambda m: m.add("hello", user_id="ada", expiration_date=12),
            lambda m: m.add(),
            lambda m: m.add("hello", user_id="ada", nonsense=1),
            lambda m: m.search("hello"),
            lambda m: m.search("hello", filters={}),
            lambda m: m.search("hello", filters={"topic": "drink"}),
            lambda m: m.search("", filters=ADA),
            lambda m: m.search("  \n", filters=ADA),
            lambda m: m.search(7, filters=ADA),
            lambda m: m.search("hello", filters={"user_id": " "}),
            lambda m: m.search("hello", filters={"user_id": "two words"}),
            lambda m: m.search("hello", filters=ADA, threshold=1.5),
            lambda m: m.search("hello", filters=ADA, threshold=-0.1),
            lambda m: m.search("hello", filters=ADA, threshold="high"),
            lambda m: m.search("hello", filters=ADA, top_k=-1),
            lambda m: m.search("hello", filters=ADA, top_k=True),
            lambda m: m.search("hello", filters=ADA, top_k=2.5),
            lambda m: m.search("hello", filters=ADA, reference_date="2025-01-01"),
            lambda m: m.search(),
            lambda m: m.get_all(),
            lambda m: m.get_all(filters={"topic": "drink"}),
            lambda m: m.get_all(filters={"run_id": ""}),
            lambda m: m.get_all(filters=ADA, top_k=-1),
            lambda m: m.get_all(filters=ADA, top_k="all"),
            lambda m: m.get(),
            lambda m: m.update(NOBODY, "text"),
            lambda m: m.update(NOBODY),
            lambda m: m.update(NOBODY, "text", expiration_date="soon"),
            lambda m: m.delete(NOBODY),
            lambda m: m.delete_all(),
            lambda m: m.delete_all(user_id=" "),
            lambda m: m.delete_all(user_id="two words"),
            lambda m: m.history(),
        ],
    )
    def test_errors_are_mem0s(
        self, either: Settled, mem0s_own: Settled, call: Callable[[Settled], Any]
    ) -> None:
        ours, mem0s = outcome(lambda: call(either)), outcome(lambda: call(mem0s_own))
        assert ours == mem0s

    def test_a_filter_operator_that_does_not_exist_is_a_value_error(self, either: Settled) -> None:
        with pytest.raises(ValueError, match="about"):
            either.search("hello", filters={**ADA, "stars": {"about": 4}})

    def test_the_error_of_a_missing_scope_carries_mem0s_code(self, either: Settled) -> None:
        with pytest.raises(Mem0ValidationError) as raised:
            either.add("hello")
        assert raised.value.error_code == "VALIDATION_001"

    def test_what_mem0_refuses_is_not_in_the_turn_log(self, either: Settled) -> None:
        with pytest.raises(ValueError, match="expiration_date"):
            either.add("refused", **ADA, expiration_date="tomorrow")
        assert either.itself._core.journal.database.read("SELECT text FROM turns WHERE text IS NOT NULL") == []

    def test_an_llm_that_fails_is_mem0s_error(self, either: Settled, mem0s_own: Settled) -> None:
        for memory in (either, mem0s_own):
            memory.itself.llm = Failing()
        ours, mem0s = (outcome(lambda m=memory: m.add("hello", **ADA)) for memory in (either, mem0s_own))
        assert ours == mem0s
        assert ours[0].__name__ == "LLMError"

    def test_a_timestamp_is_taken_where_mem0_has_none(self, either: Settled) -> None:
        [added] = either.add("I like tea", **ADA, infer=False, timestamp=MAY)["results"]
        assert either.get(added["id"])["created_at"] == MAY
        with pytest.raises(ValueError, match="timestamp must be a moment"):
            either.add("I like tea", **ADA, timestamp="whenever")


class TestLifetime:
    def test_closing_twice_is_harmless_and_a_closed_memory_says_so(self, either: Settled) -> None:
        either.close()
        either.close()
        with pytest.raises(RuntimeError, match="is closed"):
            either.chat("?", **ADA)
        with pytest.raises(RuntimeError, match="is closed"):
            either.flush()

    def test_a_closed_memory_can_be_opened_again(self, open_face: OpenFace) -> None:
        for number in range(2):
            memory = open_face()
            assert len(memory.get_all(filters=ADA)["results"]) == number
            memory.add(f"opened {number}", **ADA, infer=False)
            memory.close()

    def test_a_context_manager_closes(
        self, face: str, loop: Any, tmp_path: Path, hashing_embedder: Any, engine: WatchedEngine
    ) -> None:
        config = {"embedder": hashing_embedder, "engine": engine, "folder": tmp_path / "m"}

        async def within() -> Any:
            async with OURS["async"].from_config(config) as memory:
                await memory.add("I like tea", **ADA, infer=False)
            return memory

        if face == "async":
            memory = loop.run(within())
        else:
            with OURS["sync"].from_config(config) as memory:
                memory.add("I like tea", **ADA, infer=False)
        assert vars(memory)["db"] is None
        assert memory._core is None

    def test_a_reset_memory_serves_on(self, either: Settled, engine: WatchedEngine) -> None:
        fill(either)
        either.flush()
        either.reset()
        assert engine.forgotten, "the engine forgets too"
        either.add("A new life", **ADA, infer=False)
        either.flush()
        assert injected(either.chat("What now?", **ADA, max_tokens=1)) == ["A new life"]

    def test_a_reset_leaves_no_entities(self, either: Settled) -> None:
        either.entity_store.insert(vectors=[[0.1] * 64], payloads=[{"data": "Miso", **ADA}], ids=[NOBODY])
        assert either.entity_store.list(filters=ADA)[0]
        either.reset()
        assert either.entity_store.list(filters=ADA)[0] == []

    def test_properties_are_mem0s(self, either: Settled, mem0s_own: Settled) -> None:
        for name in ("collection_name", "api_version", "custom_instructions", "reranker"):
            assert getattr(either, name) == getattr(mem0s_own, name)
        assert set(vars(mem0s_own.itself)) <= set(vars(either.itself))


class TestOurOwn:
    def test_chat_prepare_flush_and_engine(self, either: Settled, engine: WatchedEngine) -> None:
        fill(either)
        either.flush()
        assert either.engine is engine
        prepared = either.prepare("What do I like?", **ADA)
        assert isinstance(prepared, Prepared)
        reply = either.chat("What do I like?", **ADA, max_tokens=2)
        assert isinstance(reply, Reply)
        assert set(texts(reply)) == {"I like tea", "I like coffee", "My cat is grey"}
        assert set(injected(reply)) == set(texts(reply)), "ids of one owner, in whatever subset"

    def test_chat_streams(self, either: Settled) -> None:
        fill(either)
        either.flush()
        whole = either.chat("What do I like?", **ADA, max_tokens=4)
        pieces = list(either.chat("What do I like?", **ADA, max_tokens=4, stream=True))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert injected(pieces[-1].reply) == injected(whole) != []
        assert [piece.reply for piece in pieces[:-1]] == [None] * (len(pieces) - 1)

    def test_without_injection_the_answer_is_the_same(self, either: Settled) -> None:
        fill(either)
        either.flush()
        answers = [either.chat("Tea?", **ADA, max_tokens=4, inject=inject) for inject in (True, False)]
        assert answers[1].completion.injected_tokens == 0 < answers[0].completion.injected_tokens

    def test_a_session_goes_on(self, either: Settled, face: str, loop: Any) -> None:
        fill(either)
        either.flush()
        session = either.session(**ADA, k=2)
        assert type(session) is {"sync": ChatSession, "async": AsyncChatSession}[face]
        talk = Settled(session, loop.run)
        first = talk.chat("What do I drink?")
        pieces = list(talk.stream("And what else?"))
        third = either.chat("Anything more?", session=session, max_tokens=2)
        streamed = list(either.chat("Really?", session=session, max_tokens=2, stream=True))
        assert [message["role"] for message in session.messages] == ["user", "assistant"] * 4
        assert session.messages[1]["content"] == first.text
        assert session.messages[3]["content"] == "".join(piece.text for piece in pieces)
        assert session.messages[5]["content"] == third.text
        assert streamed[-1].reply is not None

    @pytest.mark.parametrize("question", ["", "  ", [], [{"role": "assistant", "content": "Hi"}]])
    def test_an_empty_question_is_refused(self, either: Settled, question: Any) -> None:
        for ask in (either.chat, either.prepare):
            with pytest.raises(PromptError, match="question is empty"):
                ask(question, **ADA)

    def test_a_question_needs_a_scope(self, either: Settled) -> None:
        with pytest.raises(ValueError, match="filters must contain"):
            either.chat("What do I like?")

    def test_flush_tells_how_far_it_is_and_gives_up_in_time(
        self, either: Settled, engine: WatchedEngine
    ) -> None:
        engine.gate.clear()
        fill(either)
        with pytest.raises(TimeoutError, match="still waiting"):
            either.flush(timeout=0.05)
        engine.gate.set()
        seen: list[tuple[int, int]] = []
        either.flush(lambda done, of: seen.append((done, of)))
        assert seen[-1][0] == seen[-1][1]

    def test_every_option_of_the_constructor(
        self, face: str, loop: Any, tmp_path: Path, hashing_embedder: Any, engine: WatchedEngine
    ) -> None:
        memory = OURS[face](
            {"embedder": hashing_embedder}, engine=engine, injection={"top_k": 1}, folder=tmp_path / "m"
        )
        settled = Settled(memory, loop.run)
        fill(settled)
        assert len(settled.prepare("What do I like?", **ADA).memories) == 1
        assert (tmp_path / "m" / "journal.sqlite").exists()
        settled.close()


def test_mem0s_warning_of_missing_keyword_search_is_still_given(
    open_face: OpenFace, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mem0.memory.main"):
        open_face(vector_store={"provider": "faiss"})
    assert any("does not support keyword search" in record.message for record in caplog.records)


def test_mem0s_names_are_mem0s_own_until_somebody_replaces_them() -> None:
    assert mem0.Memory not in OURS.values()
