"""What `add` logs, what it dates, and what context its facts are encoded in."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, WINDOWS, injected, say, texts
from tests.memory.watched import WatchedEngine


def turns(tmp_path: Path) -> list[tuple[Any, ...]]:
    db = sqlite3.connect(tmp_path / "memory" / "journal.sqlite")
    rows = db.execute(
        "SELECT scope, ordinal, session, role, speaker, text FROM turns ORDER BY number"
    ).fetchall()
    db.close()
    return rows


def kept(engine: WatchedEngine) -> list[list[str]]:
    """What each encode of facts so far kept, without date and speaker."""
    return [
        [text.split(": ")[-1].strip() for text in engine.texts(request)] for request in engine.encoded_facts
    ]


class TestTheLog:
    def test_every_message_is_logged_in_order_with_its_role(self, memory: Memory, tmp_path: Path) -> None:
        messages = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello", "name": "Ada"},
            {"role": "assistant", "content": "Good morning"},
        ]
        memory.add(messages, **ADA, infer=False)
        assert turns(tmp_path) == [
            ("user_id=ada", 0, 1, "user", "Ada", "Hello"),
            ("user_id=ada", 1, 1, "assistant", "Assistant", "Good morning"),
        ]

    @pytest.mark.parametrize(
        "bad",
        [{"user_id": "  "}, {"user_id": "two words"}, {}, {"user_id": "ada", "memory_type": "nonsense"}],
    )
    def test_what_mem0_refuses_is_not_logged(
        self, memory: Memory, tmp_path: Path, bad: dict[str, str]
    ) -> None:
        with pytest.raises(Exception, match=r"Invalid|At least one"):
            memory.add("Hello", infer=False, **bad)
        assert [text for *_, text in turns(tmp_path) if text] == []

    def test_a_message_that_came_in_parts_is_one_turn_and_one_fact(
        self, memory: Memory, tmp_path: Path, engine: WatchedEngine
    ) -> None:
        parts = [{"type": "text", "text": "I like"}, {"type": "text", "text": "green tea"}]
        memory.add([{"role": "user", "content": parts}], **ADA, infer=False)
        memory.flush()
        assert [row[-1] for row in turns(tmp_path)] == ["I like green tea"]
        assert kept(engine) == [["I like green tea"]]

    def test_the_same_words_twice_are_two_turns_and_two_facts(self, memory: Memory, tmp_path: Path) -> None:
        first, _ = say(memory, "yes", "yes")
        assert [row[-1] for row in turns(tmp_path)] == ["yes", "yes"]
        memory.delete(first)
        assert [row[-1] for row in turns(tmp_path)] == ["yes"]


class TestDates:
    def lines(self, memory: Memory, engine: WatchedEngine) -> str:
        return str(engine.tokenizer.decode(memory.prepare("?", **ADA).prompt.ids))

    @pytest.mark.parametrize(
        "when",
        [
            "2024-05-12",
            "2024-05-12T23:30:00+00:00",
            "12 May 2024",
            "May 12, 2024",
            "1:56 pm on 12 May, 2024",
            datetime(2024, 5, 12, 8, tzinfo=UTC),
            date(2024, 5, 12),
            1715500800,
        ],
    )
    def test_a_fact_is_dated_by_its_timestamp(self, memory: Memory, engine: WatchedEngine, when: Any) -> None:
        memory.add("I moved", **ADA, infer=False, timestamp=when)
        assert "- [2024-05-12] User: I moved\n" in self.lines(memory, engine)

    def test_the_apps_own_date_wins(self, memory: Memory, engine: WatchedEngine) -> None:
        memory.add("I moved", **ADA, infer=False, timestamp="2024-05-12", metadata={"date": "8 May, 2023"})
        assert "- [2023-05-08] User: I moved\n" in self.lines(memory, engine)

    def test_a_date_nobody_can_read_is_left_out(self, memory: Memory, engine: WatchedEngine) -> None:
        memory.add("I moved", **ADA, infer=False, metadata={"date": "some time in spring"})
        assert "- User: I moved\n" in self.lines(memory, engine)

    def test_without_any_it_is_dated_today(self, memory: Memory, engine: WatchedEngine) -> None:
        memory.add("I moved", **ADA, infer=False)
        assert f"- [{datetime.now(UTC).date()}] User: I moved\n" in self.lines(memory, engine)

    def test_the_timestamp_is_mem0s_created_at(self, memory: Memory) -> None:
        [fact] = say(memory, "I moved", at="2024-05-12T10:00:00")
        assert memory.get(fact)["created_at"] == "2024-05-12T10:00:00"

    def test_a_timestamp_that_is_none_is_refused(self, memory: Memory, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="timestamp must be a moment"):
            memory.add("I moved", **ADA, infer=False, timestamp="the other day")
        assert turns(tmp_path) == []

    def test_a_speaker_is_the_messages_name_or_the_apps_or_the_role(
        self, memory: Memory, engine: WatchedEngine
    ) -> None:
        memory.add([{"role": "user", "content": "one", "name": "Ada"}], **ADA, infer=False)
        memory.add("two", **ADA, infer=False, metadata={"speaker": "Grandma"})
        memory.add([{"role": "assistant", "content": "three"}], **ADA, infer=False)
        lines = self.lines(memory, engine)
        assert all(line in lines for line in ("Ada: one\n", "Grandma: two\n", "Assistant: three\n"))


class TestContext:
    """Windows of turns, as facts have them without neighbours."""

    @pytest.fixture
    def memory(self, open_memory: OpenMemory) -> Memory:
        return open_memory(injection=WINDOWS)

    def test_facts_of_one_call_share_one_encode(self, memory: Memory, engine: WatchedEngine) -> None:
        say(memory, "one", "two", "three")
        memory.flush()
        assert kept(engine) == [["one", "two", "three"]]

    def test_a_fact_is_encoded_behind_its_session_so_far(self, memory: Memory, engine: WatchedEngine) -> None:
        say(memory, "one", at="2024-05-12T10:00:00")
        memory.flush()
        say(memory, "two", at="2024-05-12T10:30:00")
        memory.flush()
        first, second = engine.encoded_facts
        assert kept(engine) == [["one"], ["two"]]
        assert second.ids[: len(first.ids)] == first.ids

    def test_not_behind_an_earlier_session(self, memory: Memory, engine: WatchedEngine) -> None:
        say(memory, "one", at="2024-05-12T10:00:00")
        say(memory, "two", at="2024-05-12T11:00:00")
        memory.flush()
        assert all(
            "one" not in engine.text(request)
            for request in engine.encoded_facts
            if "two" in engine.text(request)
        )

    def test_a_run_is_one_session_however_long(self, memory: Memory, engine: WatchedEngine) -> None:
        run = {**ADA, "run_id": "r1"}
        say(memory, "one", at="2024-05-12T10:00:00", **run)
        memory.flush()
        say(memory, "two", at="2024-05-14T11:00:00", **run)
        memory.flush()
        assert "one" in engine.text(engine.encoded_facts[-1])

    def test_a_window_holds_w_turns_or_a_few_more(
        self, open_memory: OpenMemory, engine: WatchedEngine
    ) -> None:
        memory = open_memory(injection={**WINDOWS, "context_turns": 2})
        say(memory, *(f"turn{number}" for number in range(9)))
        memory.flush()
        for request in engine.encoded_facts:
            shown = [number for number in range(9) if f"turn{number}" in engine.text(request)]
            first_kept = len(shown) - len(request.spans)
            assert 2 <= first_kept <= 3 or shown[0] == 0

    def test_what_another_user_said_is_in_no_window(self, memory: Memory, engine: WatchedEngine) -> None:
        say(memory, "Ada's words", user_id="ada", agent_id="butler")
        say(memory, "Ben's words", user_id="ben", agent_id="butler")
        memory.flush()
        assert not any(
            "Ada's words" in engine.text(request) and "Ben's words" in engine.text(request)
            for request in engine.encoded_facts
        )

    def test_every_fact_in_an_encode_is_mentioned_where_it_begins(
        self, memory: Memory, engine: WatchedEngine
    ) -> None:
        say(memory, "one")
        memory.flush()
        say(memory, "two")
        memory.flush()
        request = engine.encoded_facts[-1]
        assert [
            engine.tokenizer.decode(request.ids[at:]).split("\n")[0][-3:] for _, at in request.mentions
        ] == [
            "one",
            "two",
        ]
        tags = {part.tag for part in memory.prepare("?", **ADA).prompt.segments} - {None}
        assert {tag for tag, _ in request.mentions} == tags


class TestExtractedFacts:
    """mem0's default path, with an LLM that says what the test wants."""

    @pytest.fixture
    def extracting(self, open_memory: OpenMemory) -> Memory:
        memory = open_memory(injection=WINDOWS)
        memory.llm = _Extractor(["Ada owns a cat", "The cat is grey"])
        return memory

    def test_they_are_encoded_behind_the_turns_they_came_from(
        self, extracting: Memory, engine: WatchedEngine
    ) -> None:
        extracting.add(
            [{"role": "user", "content": "I have a cat"}, {"role": "user", "content": "Grey"}], **ADA
        )
        extracting.flush()
        [request] = engine.encoded_facts
        assert kept(engine) == [["Ada owns a cat", "The cat is grey"]] or "Ada owns a cat" in engine.text(
            request
        )
        text = engine.text(request)
        assert text.index("I have a cat") < text.index("Grey") < text.index("Ada owns a cat")
        assert len(request.spans) == 2

    def test_they_are_injected(self, extracting: Memory) -> None:
        extracting.add("I have a grey cat", **ADA)
        extracting.flush()
        reply = extracting.chat("What cat?", **ADA, max_tokens=2)
        assert set(injected(reply)) == {"Ada owns a cat", "The cat is grey"}

    def test_deleting_one_takes_their_turn_and_keeps_the_other(
        self, extracting: Memory, tmp_path: Path, engine: WatchedEngine
    ) -> None:
        added = extracting.add("I have a grey cat", **ADA)["results"]
        extracting.flush()
        extracting.delete(added[0]["id"])
        extracting.flush()
        assert [row[-1] for row in turns(tmp_path)] == [None]
        last = engine.text(engine.encoded_facts[-1])
        assert "The cat is grey" in last
        assert "Ada owns a cat" not in last
        assert "I have a grey cat" not in last

    def test_deleting_the_only_fact_of_a_turn_takes_the_turn_out_of_later_windows(
        self, extracting: Memory, engine: WatchedEngine
    ) -> None:
        for fact, turn in (("Ada owns a cat", "I have a cat"), ("Ada lives in Porto", "Porto is my home")):
            extracting.llm = _Extractor([fact])
            [added] = extracting.add(turn, **ADA)["results"]
            extracting.flush()
            if fact == "Ada owns a cat":
                first = added["id"]
        assert "I have a cat" in engine.text(engine.encoded_facts[-1])
        extracting.delete(first)
        extracting.flush()
        assert engine.texts(engine.encoded_facts[-1])[0].endswith("Ada lives in Porto\n")
        assert "I have a cat" not in engine.text(engine.encoded_facts[-1])
        assert "Porto is my home" in engine.text(engine.encoded_facts[-1])

    def test_an_extraction_that_fails_keeps_the_turn(self, extracting: Memory, tmp_path: Path) -> None:
        extracting.llm = _Extractor([], fails=True)
        with pytest.raises(Exception, match="extraction failed"):
            extracting.add("I have a grey cat", **ADA)
        assert [row[-1] for row in turns(tmp_path)] == ["I have a grey cat"]

    def test_what_mem0_asks_the_engine_is_asked_for_the_owner(
        self, memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owners: list[str] = []
        generate = engine.generate

        def watched(prompt: Any, options: Any) -> Any:
            owners.append(prompt.owner)
            return generate(prompt, options)

        monkeypatch.setattr(engine, "generate", watched)
        memory.llm.config.max_tokens = 1
        memory._add_to_vector_store = lambda *a, **o: memory.llm.generate_response(  # type: ignore[method-assign]
            [{"role": "user", "content": "What is new?"}]
        )
        memory.add("I have a cat", **ADA)
        memory.llm.generate_response([{"role": "user", "content": "Hello"}])
        assert owners == ["user:ada", "inferscale"]

    def test_the_engine_itself_is_mem0s_llm(self, memory: Memory) -> None:
        memory.llm.config.max_tokens = 4
        answer = memory.llm.generate_response([{"role": "user", "content": "Hello"}])
        assert isinstance(answer, str)
        assert memory.config.llm.provider == "inferscale"


class _Extractor:
    def __init__(self, facts: list[str], fails: bool = False) -> None:
        self.facts = facts
        self.fails = fails

    def generate_response(self, messages: Any, **options: Any) -> str:
        import json

        if self.fails:
            raise RuntimeError("the model is away")
        return json.dumps({"memory": [{"text": fact} for fact in self.facts]})


@pytest.mark.parametrize("provider", ["inferscale", "qdrant", "faiss"])
def test_many_threads_may_add_and_ask_at_once(open_memory: OpenMemory, provider: str) -> None:
    """On stores of mem0's that raise, or mix up texts and vectors, when two threads write at once."""
    memory = open_memory(vector_store={"provider": provider})

    def work(number: int) -> list[str]:
        who = {"user_id": f"user{number % 3}"}
        say(memory, f"fact number {number}", at=1_700_000_000 + number, **who)
        return texts(memory.chat(f"number {number}?", **who, k=50, max_tokens=1))

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(work, range(48)))
    assert all(f"fact number {number}" in found for number, found in enumerate(seen))
    memory.flush(timeout=120)
    for user in range(3):
        reply = memory.chat("number?", user_id=f"user{user}", k=50, max_tokens=1)
        assert set(injected(reply)) == {f"fact number {number}" for number in range(48) if number % 3 == user}


def test_many_threads_may_add_update_delete_and_ask_at_once(memory: Memory) -> None:
    """In the end the store, the journal and the prompt hold the same facts in the same words."""

    def work(number: int) -> str | None:
        kept, reworded, deleted = say(
            memory, f"kept {number}", f"reworded {number}", f"deleted {number}", at=1_700_000_000 + number
        )
        memory.update(reworded, f"renewed {number}")
        memory.chat(f"number {number}?", **ADA, k=9, max_tokens=1)
        memory.delete(deleted)
        return kept

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    memory.flush(timeout=120)
    wanted = {f"{what} {number}" for what in ("kept", "renewed") for number in range(16)}
    stored = memory.get_all(filters=ADA, top_k=100)["results"]
    assert {fact["memory"] for fact in stored} == wanted
    assert memory._core is not None
    known = memory._core.journal.facts.get([fact["id"] for fact in stored])
    assert {fact.text for fact in known.values()} == wanted
    reply = memory.chat("Which number?", **ADA, k=100, max_tokens=1)
    assert set(injected(reply)) == wanted
    assert reply.completion.refused is None
