"""The store against LangGraph's own in-memory store: the same operations on both, at random, and the same answers.

Where they differ on purpose the oracle is put right first: it keeps namespaces without items (a `get` makes one) and
the place of one whose first item is gone, and goes on finding an item by words it had before it was put again. And
`put(..., index=["$"])`, which indexes nothing there and the whole value here, is not among the operations.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import langgraph.store.memory as oracle_module
import pytest
from langchain_inferscale import InferScaleStore
from langgraph.store.base import (
    GetOp,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    SearchItem,
    SearchOp,
)
from langgraph.store.memory import InMemoryStore

from inferscale_memory import AsyncMemory
from tests.memory.hashing import DIMENSIONS, HashingEmbedder

NAMESPACES: list[tuple[str, ...]] = [
    ("memories", "ada"),
    ("memories", "ada", "profile"),
    ("memories", "ben"),
    ("memories",),
    ("memories/ada",),
    ("memories", "ada/profile"),
    ("*", "ada"),
    ("memories", "%2F ada"),
    ("ünder", "日本", "*"),
]
KEYS = ["1", "2", "2024-05-12", "*", "a key", "=1"]
WORDS = ["cat", "dog", "Porto", "tea", "nurse", "oboe", "safe", "rain"]


@pytest.fixture(autouse=True)
def _ties_are_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last digits of a float decide nothing: neither store's are better."""
    exact = oracle_module._cosine_similarity
    monkeypatch.setattr(
        oracle_module, "_cosine_similarity", lambda x, y: [round(score, 6) for score in exact(x, y)]
    )


class Oracle(InMemoryStore):
    """LangGraph's store without its quirks."""

    def __init__(self, fields: Sequence[str]) -> None:
        embedder = HashingEmbedder()
        self._age: dict[tuple[tuple[str, ...], str], int] = {}
        self._count = itertools.count()
        super().__init__(
            index={
                "dims": DIMENSIONS,
                "embed": lambda texts: [embedder.embed(text) for text in texts],
                "fields": list(fields),
            }
        )

    def batch(self, ops: Any) -> list[Any]:
        asked = list(ops)
        results: list[Any] = []
        for op in asked:
            results += [None] if isinstance(op, PutOp) else super().batch([op])
            self._put_right()
        puts = {(op.namespace, op.key): op for op in asked if isinstance(op, PutOp)}
        for op in puts.values():
            self._vectors[op.namespace].pop(op.key, None)
            super().batch([op])
            self._put_right()
        return results

    def _put_right(self) -> None:
        """Namespaces with items only, in the order of the oldest of them."""
        kept = {namespace: items for namespace, items in self._data.items() if items}
        self._age = {
            (namespace, key): self._age.get((namespace, key), next(self._count))
            for namespace, items in kept.items()
            for key in items
        }
        oldest = {ns: min(self._age[ns, key] for key in items) for ns, items in kept.items()}
        self._data.clear()
        self._data.update({ns: kept[ns] for ns in sorted(kept, key=oldest.__getitem__)})


class Dice:
    """Operations at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def value(self) -> dict[str, Any]:
        pick = self._random.choice
        value: dict[str, Any] = {
            "text": " ".join(self._random.choices(WORDS, k=3)),
            "size": pick([1, 2, 3.5]),
        }
        if pick([True, False]):
            value["tags"] = self._random.sample(WORDS, k=pick([0, 1, 2]))
        if pick([True, False, False]):
            value["meta"] = {"kind": pick(["a", "b"]), "deep": {"n": pick([1, None])}}
        if pick([True, False, False, False]):
            del value["text"]
        return value

    def put(self) -> PutOp:
        pick = self._random.choice
        value = self.value() if pick([True, True, True, False]) else None
        index = pick([None, None, None, False, ["text"], ["tags[*]", "meta.kind"], ["*"]])
        return PutOp(pick(NAMESPACES), pick(KEYS), value, index=index)

    def search(self) -> SearchOp:
        pick = self._random.choice
        filters = pick(
            [
                None,
                None,
                {"size": 1},
                {"size": {"$gte": 2, "$lt": 3.5}},
                {"size": {"$ne": 2}},
                {"meta": {"kind": "a"}},
                {"meta": {"deep": {"n": {"$eq": None}}}},
                {"tags": ["cat"]},
                {"missing": None},
            ]
        )
        namespace = pick(NAMESPACES)
        prefix = namespace[: self._random.randint(0, len(namespace))]
        query = pick([None, "cat", "tea in Porto", "what about the oboe"])
        return SearchOp(prefix, filters, pick([1, 3, 10, 50]), pick([0, 0, 1, 4]), query)

    def namespaces(self) -> ListNamespacesOp:
        pick = self._random.choice
        conditions = []
        for kind in ("prefix", "suffix"):
            if pick([True, False]):
                namespace = pick(NAMESPACES)
                path = namespace[: self._random.randint(1, len(namespace))]
                conditions.append(MatchCondition(kind, tuple(pick([label, label, "*"]) for label in path)))  # type: ignore[arg-type]
        return ListNamespacesOp(tuple(conditions), pick([None, 1, 2]), pick([1, 3, 100]), pick([0, 0, 1]))

    def ops(self) -> list[Op]:
        pick = self._random.choice
        make = [self.put, self.put, self.put, self.search, self.namespaces]
        ops: list[Op] = [pick(make)() for _ in range(pick([1, 1, 2, 4]))]
        if pick([True, False]):
            ops.insert(0, GetOp(pick(NAMESPACES), pick(KEYS)))
        return ops


def plain(result: Any) -> Any:
    """What can be compared: all but times, and scores to five digits."""
    if isinstance(result, list):
        return [plain(one) for one in result]
    if isinstance(result, SearchItem):
        score = None if result.score is None else round(result.score, 5) + 0.0
        return (result.namespace, result.key, result.value, score)
    if isinstance(result, Item):
        return (result.namespace, result.key, result.value)
    return result


@pytest.mark.parametrize("fields", [["$"], ["text"], ["text", "tags[*]"]], ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_operations_have_the_same_answers(memory: Any, fields: list[str], seed: int) -> None:
    oracle, store, dice = Oracle(fields), InferScaleStore(memory, index={"fields": fields}), Dice(seed)
    for step in range(50):
        ops = dice.ops()
        assert plain(store.batch(ops)) == plain(oracle.batch(ops)), (step, ops)


@pytest.mark.parametrize("seed", [11])
def test_so_do_its_async_twin_and_the_other_face(open_memory: Any, seed: int) -> None:
    oracle, store, dice = (
        Oracle(["text"]),
        InferScaleStore(open_memory(AsyncMemory), index={"fields": ["text"]}),
        Dice(seed),
    )

    async def both(ops: list[Op]) -> tuple[Any, Any]:
        return plain(await store.abatch(ops)), plain(await oracle.abatch(ops))

    oracle.abatch = lambda ops: asyncio.to_thread(oracle.batch, ops)  # type: ignore[method-assign]
    for step in range(40):
        ops = dice.ops()
        ours, theirs = asyncio.run(both(ops))
        assert ours == theirs, (step, ops)


def test_without_an_index_a_query_ranks_nothing(memory: Any) -> None:
    oracle, store, dice = InMemoryStore(), InferScaleStore(memory, index=False), Dice(21)
    for step in range(40):
        ops = [op for op in dice.ops() if isinstance(op, PutOp | SearchOp)]
        ours, theirs = store.batch(ops), oracle.batch(ops)
        for namespace in [namespace for namespace, items in oracle._data.items() if not items]:
            del oracle._data[namespace]
        assert plain(ours) == plain(theirs), (step, ops)
