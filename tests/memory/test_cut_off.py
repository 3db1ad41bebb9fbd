"""A coroutine is cancelled while the store is still at work: what happened is carried out, all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from inferscale_memory.memory import AsyncMemory
from tests.memory.conftest import opening
from tests.memory.raw import files_with
from tests.memory.saying import ADA
from tests.memory.stores import STORES
from tests.memory.test_faces import Extractor
from tests.memory.watched import WatchedEngine

SECRET, OTHER = "My safe opens with 4711-Q", "I water the ficus on Mondays"
SAID = f"Between us, {SECRET.lower()}"


@pytest.fixture(params=STORES)
def memory(
    request: pytest.FixtureRequest, tmp_path: Path, engine: WatchedEngine, hashing_embedder: Any
) -> Iterator[AsyncMemory]:
    for open_ in opening(AsyncMemory.from_config, tmp_path, engine, hashing_embedder):
        yield open_(vector_store={"provider": request.param})


class Slow:
    """One method of a store, that has begun when `begun` is set, and goes on when `going` is."""

    def __init__(self, inner: Any, name: str, fails: Exception | None = None) -> None:
        self.begun, self.going = Event(), Event()
        self._method, self._fails = getattr(inner, name), fails
        setattr(inner, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.begun.set()
        assert self.going.wait(20)
        done = self._method(*args, **options)
        if self._fails is not None:
            raise self._fails
        return done


async def told(memory: AsyncMemory) -> str:
    memory.llm = Extractor(SECRET)
    [fact] = (await memory.add(SAID, **ADA))["results"]
    return str(fact["id"])


async def cancelled(call: Any, slow: Slow) -> None:
    task = asyncio.create_task(call)
    await asyncio.to_thread(slow.begun.wait, 20)
    task.cancel()
    await asyncio.sleep(0.1)
    slow.going.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def left(memory: AsyncMemory, folder: Path) -> list[Any]:
    assert memory._core is not None
    return [*files_with(folder, "4711-q"), *memory._core.journal.intents.unfinished().values()]


@pytest.mark.parametrize("method", ["update", "delete"])
@pytest.mark.parametrize("fails", [None, ConnectionError("lost")], ids=["done", "failed"])
def test_the_old_words_are_nowhere_when_the_cancelled_call_has_ended(
    memory: AsyncMemory, tmp_path: Path, method: str, fails: Exception | None
) -> None:
    async def work() -> None:
        fact = await told(memory)
        slow = Slow(memory.vector_store._inner, method, fails)
        call: Callable[..., Any] = getattr(memory, method)
        await cancelled(call(fact, OTHER) if method == "update" else call(fact), slow)
        assert left(memory, tmp_path / "memory") == []
        found = await memory.get(fact)
        assert (found and found["memory"]) == (OTHER if method == "update" else None)
        events = await memory.history(fact)
        assert [event["event"] for event in events] == ["ADD", method.upper()]
        assert [event["new_memory"] for event in events] == [None, OTHER if method == "update" else None]

    asyncio.run(work())


def test_a_fact_that_was_being_added_keeps_its_turn(memory: AsyncMemory) -> None:
    async def work() -> None:
        slow = Slow(memory.vector_store._inner, "insert")
        await cancelled(memory.add(OTHER, **ADA, infer=False), slow)
        [fact] = (await memory.get_all(filters=ADA))["results"]
        assert memory._core is not None
        [known] = memory._core.journal.facts.get([fact["id"]]).values()
        assert (known.text, known.verbatim, len(known.turns)) == (OTHER, True, 1)
        assert [event["event"] for event in await memory.history(fact["id"])] == ["ADD"]

    asyncio.run(work())


def test_what_the_store_refuses_after_all_stays_as_it_was(memory: AsyncMemory, tmp_path: Path) -> None:
    async def work() -> None:
        fact = await told(memory)
        store = memory.vector_store._inner

        def refused(*_: Any, **__: Any) -> None:
            raise ConnectionError("no")

        store.delete = refused
        await cancelled(memory.delete(fact), Slow(store, "delete"))
        assert (await memory.get(fact))["memory"] == SECRET
        assert [event["new_memory"] for event in await memory.history(fact)] == [SECRET]
        assert memory._core is not None
        assert memory._core.journal.intents.unfinished() == {}

    asyncio.run(work())
