"""`Chat`: one engine for a framework, sync and async, over either face of a memory or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import mem0
import pytest

from inferscale_memory import AsyncMemory, Chat, Memory, SamplingOptions
from inferscale_memory.errors import ConfigurationError, ContextOverflowError, PromptError
from inferscale_memory.recall.results import Prepared, Reply, ReplyChunk
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, BEN, say
from tests.memory.watched import WatchedEngine

FACTS = ("My cat is called Miso", "I moved to Porto", "My sister is a nurse")
QUESTION = "What is my cat called?"
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Porto", "Oslo"]}},
        "required": ["city"],
    },
}


class Either:
    """The methods of a `Chat`, or their async twins, by one name."""

    def __init__(self, chat: Chat, way: str) -> None:
        self._chat = chat
        self._way = way

    def __getattr__(self, name: str) -> Any:
        if self._way == "sync":
            return getattr(self._chat, name)

        def call(*args: Any, **options: Any) -> Any:
            async def settled() -> Any:
                result = getattr(self._chat, f"a{name}")(*args, **options)
                if isinstance(result, AsyncIterator):
                    return [piece async for piece in result]
                assert isinstance(result, Awaitable)
                return await result

            return asyncio.run(settled())

        return call


@pytest.fixture(params=["sync", "async"])
def way(request: pytest.FixtureRequest) -> str:
    """How a framework calls; every test that asks for it and for `face` runs for all four pairs."""
    return str(request.param)


@pytest.fixture
def filled(open_face: OpenFace) -> Settled:
    memory = open_face()
    for fact in FACTS:
        memory.add([{"role": "user", "content": fact}], **ADA, infer=False)
    memory.add([{"role": "user", "content": "My dog is called Rex"}], **BEN, infer=False)
    memory.flush()
    return memory


@pytest.fixture
def chat(filled: Settled, way: str) -> Either:
    return Either(Chat(memory=filled.itself), way)


def test_a_turn_recalls_injects_and_answers(chat: Either) -> None:
    found = chat.recall(QUESTION, ADA, k=2)
    assert found[0]["memory"] == FACTS[0]
    assert len(found) == 2
    assert found[0]["score"] >= found[1]["score"]
    prepared: Prepared = chat.prepare(QUESTION, ADA, found)
    reply: Reply = chat.answer(prepared, SamplingOptions(max_tokens=4))
    assert {memory.text for memory in reply.memories if memory.injected} == {item["memory"] for item in found}
    assert reply.completion.injected_tokens > 0
    as_text: Reply = chat.answer(prepared, SamplingOptions(max_tokens=4), inject=False)
    assert as_text.completion.injected_tokens == 0
    assert as_text.completion.prompt_tokens == reply.completion.prompt_tokens


def test_pieces_make_up_the_answer(chat: Either) -> None:
    prepared = chat.prepare(QUESTION, ADA, chat.recall(QUESTION, ADA))
    pieces: list[ReplyChunk] = list(chat.stream(prepared, SamplingOptions(max_tokens=6)))
    reply = pieces[-1].reply
    assert reply is not None
    assert "".join(piece.text for piece in pieces) == reply.text
    assert reply.text == chat.answer(prepared, SamplingOptions(max_tokens=6)).text


def test_what_is_remembered_is_recalled(chat: Either, filled: Settled) -> None:
    chat.remember([{"role": "user", "content": "I play the oboe"}], ADA, infer=False)
    assert chat.recall("What do I play?", ADA, k=1)[0]["memory"] == "I play the oboe"
    assert len(filled.get_all(filters=ADA)["results"]) == len(FACTS) + 1


def test_the_version_changes_with_every_change_of_the_scope_and_no_other(
    chat: Either, filled: Settled
) -> None:
    seen = [chat.fingerprint(ADA)]
    assert chat.fingerprint(ADA) == seen[0]
    assert chat.fingerprint(BEN) != seen[0]
    filled.add([{"role": "user", "content": "My dog is old"}], **BEN, infer=False)
    assert chat.fingerprint(ADA) == seen[0]
    fact = filled.add([{"role": "user", "content": "I play the oboe"}], **ADA, infer=False)["results"][0][
        "id"
    ]
    seen.append(chat.fingerprint(ADA))
    filled.update(fact, "I play the horn")
    seen.append(chat.fingerprint(ADA))
    filled.update(fact, "I play the horn", expiration_date="2020-01-01")
    seen.append(chat.fingerprint(ADA))
    assert len(set(seen[:3])) == 3
    assert seen[3] not in seen[1:3]


def test_k_0_recalls_nothing_and_asks_for_a_scope_all_the_same(chat: Either) -> None:
    assert chat.recall(QUESTION, ADA, k=0) == []
    for k in (0, 3):
        with pytest.raises(ValueError, match="user_id"):
            chat.recall(QUESTION, {}, k=k)
    reply = chat.answer(chat.prepare(QUESTION, ADA), SamplingOptions(max_tokens=2))
    assert reply.memories == ()


def test_a_memory_of_somebody_else_is_refused(chat: Either) -> None:
    """An app that hands on the wrong results must not show them."""
    theirs = chat.recall("What is my dog called?", BEN)
    with pytest.raises(ValueError, match="not of user_id=ada"):
        chat.prepare(QUESTION, ADA, theirs)
    with pytest.raises(ValueError, match="user_id"):
        chat.prepare(QUESTION, {}, theirs)
    with pytest.raises(ValueError, match="not of"):
        chat.prepare(QUESTION, {**BEN, "run_id": "another"}, theirs)


def test_without_a_memory_it_is_a_chat_model(engine: WatchedEngine, way: str) -> None:
    chat = Either(Chat(engine), way)
    prepared = chat.prepare([{"role": "user", "content": "Hello"}], {})
    reply = chat.answer(prepared, SamplingOptions(max_tokens=4))
    assert reply.completion.prefilled_tokens == len(prepared.prompt.ids)
    assert reply.memories == ()
    assert prepared.prompt.owner != chat.prepare("Hello", ADA).prompt.owner, "scopes share no cached block"
    for need in (
        lambda: chat.recall("Hello", ADA),
        lambda: chat.remember("Hello", ADA),
        lambda: chat.fingerprint(ADA),
    ):
        with pytest.raises(ConfigurationError, match="pass one as `memory`"):
            need()
    with pytest.raises(ConfigurationError, match="no memory to take"):
        chat.prepare("Hello", ADA, [{"id": "1", "memory": "x"}])
    with pytest.raises(PromptError, match="send fewer or shorter messages"):
        chat.prepare("Hello " * 10_000, {})


def test_what_cannot_stand_behind_it(memory: Memory, engine: WatchedEngine) -> None:
    with pytest.raises(ConfigurationError, match="leave `engine` out"):
        Chat(engine, memory)
    with pytest.raises(ConfigurationError, match=r"pass a Memory or AsyncMemory of inferscale_memory"):
        Chat(memory=object.__new__(mem0.Memory))


def test_a_sync_call_over_an_async_memory_within_a_running_loop(open_face: OpenFace, filled: Settled) -> None:
    """As in a notebook. It blocks that loop, as any sync call does, and must not fail."""
    if not isinstance(filled.itself, AsyncMemory):
        return

    async def cell() -> Any:
        return Chat(memory=filled.itself).recall(QUESTION, ADA, k=1)

    assert asyncio.run(cell())[0]["memory"] == FACTS[0]


def test_a_forced_call_is_made_with_memories_injected(chat: Either) -> None:
    found = chat.recall(QUESTION, ADA)
    prepared = chat.prepare(QUESTION, ADA, found, tools=[WEATHER], tool_choice="weather")
    reply: Reply = chat.answer(prepared, SamplingOptions(max_tokens=64))
    [call] = reply.tool_calls
    assert call.name == "weather"
    assert call.error is None
    assert call.arguments["city"] in ("Porto", "Oslo")
    assert reply.text == ""
    assert reply.completion.injected_tokens > 0
    pieces = list(chat.stream(prepared, SamplingOptions(max_tokens=64)))
    assert "".join(piece.text for piece in pieces) == ""
    assert pieces[-1].reply.tool_calls[0].arguments == call.arguments


def test_the_result_of_a_tool_is_asked_about(chat: Either) -> None:
    messages = [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "Porto"}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Rain."},
    ]
    found = chat.recall(messages, ADA, k=1)
    assert found[0]["memory"] == FACTS[0], "the user's words are searched for"
    reply = chat.answer(chat.prepare(messages, ADA, found, tools=[WEATHER]), SamplingOptions(max_tokens=3))
    assert reply.completion.injected_tokens > 0


@pytest.mark.parametrize("choice", ["sing", "any"])
def test_a_choice_that_does_not_exist(chat: Either, choice: str) -> None:
    tools = [WEATHER] if choice == "sing" else []
    with pytest.raises(PromptError, match="the tools are"):
        chat.prepare(QUESTION, ADA, tools=tools, tool_choice=choice)


def test_memory_chat_takes_tools_and_memories_too(memory: Memory, open_memory: OpenMemory) -> None:
    say(memory, *FACTS)
    memory.flush()
    found = memory.search(QUESTION, filters=ADA, top_k=1, threshold=0.0)["results"]
    reply = memory.chat(QUESTION, **ADA, memories=found, tools=[WEATHER], tool_choice="any", max_tokens=64)
    assert [recalled.text for recalled in reply.memories] == [found[0]["memory"]]
    assert reply.tool_calls[0].name == "weather"
    assert memory.chat(QUESTION, **ADA, memories=[], max_tokens=2).memories == ()


def test_what_is_forgotten_is_gone_and_forgetting_twice_does_no_harm(chat: Either, filled: Settled) -> None:
    found = chat.recall(QUESTION, ADA)
    gone = [memory["id"] for memory in found[:2]]
    chat.forget([*gone, gone[0], "00000000-0000-0000-0000-000000000000"])
    assert [memory["id"] for memory in chat.recall(QUESTION, ADA)] == [found[2]["id"]]
    assert not any(filled.audit(memory["memory"]).found for memory in found[:2])


def test_a_conversation_without_memories_needs_no_scope(chat: Either, engine: WatchedEngine) -> None:
    prepared = chat.prepare(QUESTION, {}, max_tokens=2)
    assert prepared.memories == ()
    assert QUESTION in engine.tokenizer.decode(prepared.prompt.ids)
    assert chat.answer(prepared, SamplingOptions(max_tokens=2)).completion.token_ids


def test_the_models_name_is_known_before_anything_starts(memory: Memory, model: Path) -> None:
    assert Chat({"provider": "transformers", "model": str(model)}).model_name == model.name
    assert Chat().model_name == "SmolLM2-135M-Instruct"
    nobody = {"provider": "remote", "base_url": "http://127.0.0.1:9", "model": "org/served"}
    assert Chat(nobody).model_name == "served"
    assert Chat(memory=memory).model_name == model.name


def test_a_conversation_that_overflows_has_an_error_of_its_own(chat: Either, engine: WatchedEngine) -> None:
    with pytest.raises(ContextOverflowError, match="room for"):
        chat.prepare("word " * engine.max_model_len, ADA)


def test_what_was_recalled_stands_until_some_of_it_is_forgotten_or_changed(
    chat: Either, filled: Settled
) -> None:
    found = chat.recall(QUESTION, ADA)
    assert chat.is_current(found)
    assert chat.is_current([])
    filled.update(found[0]["id"], "My cat is called Momo")
    assert not chat.is_current(found)
    found = chat.recall(QUESTION, ADA)
    assert chat.is_current(found)
    filled.delete(found[-1]["id"])
    assert not chat.is_current(found)
    assert chat.is_current(found[:-1])
