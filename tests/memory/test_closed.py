"""After `close()` every call of everything that stands on a memory raises one error, ClosedError."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import isawaitable, isfunction
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from inferscale_memory import ClosedError
from inferscale_memory.engine.base import DEFAULT_OPTIONS, EncodeRequest, SamplingOptions, Span
from inferscale_memory.engine.remote import RemoteEngine
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.engine.vllm import VLLMEngine
from inferscale_memory.memory import AsyncMemory, Chat, Memory
from inferscale_memory.memory.session import AsyncChatSession, ChatSession
from inferscale_memory.prompt import Prompt, Segment
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, say
from tests.memory.watched import WatchedEngine

PROMPT = Prompt("user:ada", (Segment((5, 6, 7)),))
HARMLESS = {"close", "from_config"}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "add": ("I like tea",),
    "chat": ("What do I like?",),
    "delete": ("1",),
    "get": ("1",),
    "get_all": (),
    "history": ("1",),
    "prepare": ("What do I like?",),
    "search": ("tea",),
    "update": ("1", "I like coffee"),
    "audit": ("tea",),
    "stream": ("What do I like?",),
    "astream": ("What do I like?",),
}
FILTERED = {"search", "get_all"}
SCOPED = {"add", "chat", "prepare", "delete_all", "session"}
CHAT: dict[str, tuple[Any, ...]] = {
    "recall": ("tea?", ADA),
    "is_current": ([{"id": "1", "memory": "I like tea"}],),
    "prepare": ("tea?", ADA),
    "remember": ("I like tea", ADA),
    "forget": (["1"],),
    "fingerprint": (ADA,),
}
ENGINE: dict[str, tuple[Any, ...]] = {
    "encode": ([EncodeRequest("user:ada", (5, 6, 7), (Span(1, 3),))],),
    "generate": (PROMPT, DEFAULT_OPTIONS),
    "stream": (PROMPT, DEFAULT_OPTIONS),
    "at_hand": ("user:ada", ["key"]),
    "forget": ("user:ada", ["key"]),
    "start": (),
}


def methods(kind: type) -> list[str]:
    """The public methods of a class, inherited ones too."""
    return [name for name in dir(kind) if not name.startswith("_") and isfunction(getattr(kind, name))]


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives in the end: pieces are read, coroutines awaited."""
    result = call()

    async def awaited() -> Any:
        found = await result if isawaitable(result) else result
        return [piece async for piece in found] if hasattr(found, "__aiter__") else found

    if isawaitable(result) or hasattr(result, "__aiter__"):
        return asyncio.run(awaited())
    return list(result) if hasattr(result, "__next__") else result


@pytest.mark.parametrize("name", sorted({*methods(Memory), *methods(AsyncMemory)} - HARMLESS))
def test_a_call_of_a_closed_memory(either: Settled, name: str) -> None:
    either.close()
    options: dict[str, Any] = ADA if name in SCOPED else {"filters": ADA} if name in FILTERED else {}
    with pytest.raises(ClosedError, match="is closed: open another one"):
        outcome(lambda: getattr(either, name)(*ARGUMENTS.get(name, ()), **options))


@pytest.mark.parametrize("name", ["engine", "entity_store"])
def test_what_a_closed_memory_would_open(either: Settled, name: str) -> None:
    either.close()
    with pytest.raises(ClosedError, match="is closed"):
        getattr(either, name)


@pytest.mark.parametrize("name", sorted({*methods(ChatSession), *methods(AsyncChatSession)}))
def test_a_call_of_a_session_whose_memory_is_closed(either: Settled, name: str) -> None:
    talk = either.session(**ADA)
    core = either._core
    either.close()
    arguments = (core,) if name == "is_of" else ARGUMENTS.get(name, ())
    with pytest.raises(ClosedError, match="is closed"):
        outcome(lambda: getattr(talk, name)(*arguments))


@pytest.mark.parametrize("name", sorted(set(methods(Chat)) - HARMLESS))
@pytest.mark.parametrize("closed", ["chat", "memory"])
def test_a_call_of_a_chat_that_is_closed_or_whose_memory_is(memory: Memory, name: str, closed: str) -> None:
    chat = Chat(memory=memory)
    prepared = chat.prepare("tea?", ADA)
    (chat if closed == "chat" else memory).close()
    of = name[1:] if name[1:] in {*CHAT, "answer", "stream"} else name
    with pytest.raises(ClosedError, match="is closed"):
        outcome(lambda: getattr(chat, name)(*CHAT.get(of, (prepared,))))


@pytest.mark.parametrize("kind", [TransformersEngine, VLLMEngine, RemoteEngine])
@pytest.mark.parametrize("name", sorted(ENGINE))
@pytest.mark.parametrize("way", ["", "a"])
def test_a_call_of_a_closed_engine(model: Path, tmp_path: Path, kind: Any, name: str, way: str) -> None:
    if name == "start" and way:
        return
    engine = kind("http://127.0.0.1:1") if kind is RemoteEngine else kind(model)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError, match="closed"):
        outcome(lambda: getattr(engine, way + name)(*ENGINE[name]))


def test_a_question_that_is_answered_when_its_memory_is_closed_ends_with_the_same_error(
    open_memory: OpenMemory, model: Path
) -> None:
    memory = open_memory(engine={"provider": "transformers", "model": model, "device": "cpu"})
    say(memory, "I like tea")
    pieces = memory.chat("What do I like?", **ADA, stream=True, options=SamplingOptions(ignore_eos=True))
    next(pieces)  # type: ignore[call-overload]
    memory.close()
    with pytest.raises(ClosedError):
        list(pieces)


def test_calls_of_other_threads_end_with_the_same_error(open_face: OpenFace) -> None:
    memory = open_face()
    raised: list[BaseException] = []

    def remember() -> None:
        try:
            while True:
                outcome(lambda: memory.itself.add("I like tea", **ADA, infer=False))
                outcome(lambda: memory.itself.search("tea", filters=ADA))
        except BaseException as error:
            raised.append(error)

    workers = [Thread(target=remember) for _ in range(3)]
    for worker in workers:
        worker.start()
    while memory._core.journal.facts.count() < 6:
        pass
    memory.itself.close()
    for worker in workers:
        worker.join(60)
    assert [type(error) for error in raised] == [ClosedError] * 3
    acknowledged = {fact["id"] for fact in open_face().get_all(filters=ADA, top_k=1000)["results"]}
    assert len(acknowledged) >= 6


def test_waiting_for_encodes_ends_when_the_memory_is_closed(memory: Memory, engine: WatchedEngine) -> None:
    engine.gate.clear()
    say(memory, "I like tea")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            memory.flush()
        except BaseException as error:
            raised.append(error)

    waiter = Thread(target=wait)
    waiter.start()
    closer = Thread(target=memory.close)
    closer.start()
    engine.gate.set()
    waiter.join(60)
    closer.join(60)
    assert [type(error) for error in raised] in ([ClosedError], [])
