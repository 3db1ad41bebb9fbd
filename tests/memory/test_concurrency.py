"""Many threads and many coroutines at once, on the stores of mem0's that raise, or pair texts with the wrong
vectors, when two write at the same time.

INFERSCALE_OPERATIONS says how many operations each run does: 240 by default, 2,000 for a soak.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenMemory
from tests.memory.faces import OURS
from tests.memory.hashing import HashingEmbedder
from tests.memory.test_faces import Extractor
from tests.memory.watched import WatchedEngine

OPERATIONS = int(os.environ.get("INFERSCALE_OPERATIONS", "240"))
STORES = ["qdrant", "faiss"]
OWNERS = 5
NEAR = 0.999


class Expected:
    """What one worker has done, and so what must be there of its own in the end."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.random = random.Random(worker)
        self.who = {"user_id": f"owner{worker % OWNERS}"}
        self.texts: dict[str, str] = {}
        self.said = 0

    def next_text(self) -> str:
        self.said += 1
        return f"worker{self.worker} says number{self.said} {self.random.getrandbits(40):x}"

    def next_operation(self) -> str:
        if not self.texts:
            return "add"
        return self.random.choice(("add", "add", "update", "delete", "search", "get", "get_all", "history"))

    def some(self) -> str:
        return self.random.choice(list(self.texts))


async def work(memory: Any, expected: Expected, operations: int, settle: Callable[[Any], Any]) -> None:
    """Mixed operations, whose answers are checked as they come. `settle` is how the face's calls are awaited."""
    for _ in range(operations):
        operation = expected.next_operation()
        if operation == "add":
            text = expected.next_text()
            [added] = (await settle(memory.add(text, **expected.who, infer=False)))["results"]
            expected.texts[added["id"]] = text
            continue
        fact = expected.some()
        if operation == "update":
            text = expected.next_text()
            await settle(memory.update(fact, text))
            expected.texts[fact] = text
        elif operation == "delete":
            await settle(memory.delete(fact))
            del expected.texts[fact]
        elif operation == "search":
            found = await settle(memory.search(expected.texts[fact], filters=expected.who, top_k=500))
            assert fact in {result["id"] for result in found["results"]}
        elif operation == "get":
            assert (await settle(memory.get(fact)))["memory"] == expected.texts[fact]
        elif operation == "get_all":
            everything = await settle(memory.get_all(filters=expected.who, top_k=10_000))
            assert fact in {result["id"] for result in everything["results"]}
        else:
            events = await settle(memory.history(fact))
            assert expected.texts[fact] in {event["new_memory"] for event in events}


async def at_once(value: Any) -> Any:
    return value


async def awaited(value: Any) -> Any:
    return await value


def check(memory: Memory, all_expected: list[Expected]) -> None:
    """Store, journal and vectors say the same, and it is what was written."""
    embed = HashingEmbedder().embed
    assert memory._core is not None
    for number in range(OWNERS):
        own = [expected for expected in all_expected if expected.worker % OWNERS == number]
        wanted = {fact: text for expected in own for fact, text in expected.texts.items()}
        who = {"user_id": f"owner{number}"}
        stored = memory.get_all(filters=who, top_k=10_000)["results"]
        assert {fact["id"]: fact["memory"] for fact in stored} == wanted
        known = memory._core.journal.facts.get(wanted)
        assert {name: fact.text for name, fact in known.items()} == wanted
        for fact, text in list(wanted.items())[:40]:
            hits = memory.vector_store.search(query=text, vectors=embed(text), top_k=10_000, filters=who)
            [hit] = [hit for hit in hits if str(hit.id) == fact]
            best = max(other.score for other in hits)
            assert hit.score >= best * NEAR, f"{text!r} lies beside its own vector"


@pytest.mark.parametrize("provider", STORES)
def test_sixteen_threads(open_memory: OpenMemory, provider: str) -> None:
    memory = open_memory(vector_store={"provider": provider})
    workers = [Expected(number) for number in range(16)]

    def one(expected: Expected) -> None:
        asyncio.run(work(memory, expected, OPERATIONS // len(workers), at_once))

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(one, workers))
    check(memory, workers)
    memory.flush(timeout=600)


@pytest.mark.parametrize("provider", STORES)
def test_a_hundred_coroutines(
    open_memory: OpenMemory, tmp_path: Any, hashing_embedder: Any, engine: WatchedEngine, provider: str
) -> None:
    config = {
        "embedder": hashing_embedder,
        "engine": engine,
        "folder": tmp_path / "memory",
        "vector_store": {"provider": provider},
    }
    workers = [Expected(number) for number in range(100)]

    async def everybody() -> None:
        async with OURS["async"].from_config(config) as memory:
            each = max(2, OPERATIONS // len(workers))
            await asyncio.gather(*(work(memory, expected, each, awaited) for expected in workers))
            await memory.flush(timeout=600)

    asyncio.run(everybody())
    check(open_memory(vector_store={"provider": provider}), workers)


@pytest.mark.parametrize("provider", STORES)
def test_duplicates_within_one_add_are_removed_however_many_add(
    open_memory: OpenMemory, provider: str
) -> None:
    memory = open_memory(vector_store={"provider": provider})
    memory.llm = Extractor("Tea is fine", "Tea is fine", "Milk is not")

    def one(number: int) -> int:
        return len(memory.add(f"Tea {number}", user_id=f"user{number}")["results"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [2] * 16
    for number in range(16):
        stored = memory.get_all(filters={"user_id": f"user{number}"})["results"]
        assert sorted(fact["memory"] for fact in stored) == ["Milk is not", "Tea is fine"]
