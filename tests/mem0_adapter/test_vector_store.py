"""The store under a real mem0: its methods, filters, hybrid search, entities, sync and async."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mem0 import AsyncMemory, Memory
from mem0.utils.factory import EmbedderFactory
from mem0.vector_stores.base import VectorStoreBase

from inferscale_memory.errors import StoreError
from inferscale_memory.index.keywords import Keywords
from inferscale_memory.mem0_adapter.vector_store import Store
from inferscale_memory.memory.config import Settings
from tests.memory.hashing import DIMENSIONS

ADA = {"user_id": "ada"}
Open = Callable[..., Any]


@pytest.fixture
def open_mem0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setitem(
        EmbedderFactory.provider_to_class, "huggingface", "tests.memory.hashing.HashingEmbedder"
    )
    config: dict[str, Any] = {
        "embedder": {"provider": "huggingface", "config": {"model": "hashing", "embedding_dims": DIMENSIONS}},
        "llm": {"provider": "openai", "config": {"api_key": "none"}},
        "vector_store": {"provider": "inferscale"},
    }
    return lambda kind=Memory: kind(Settings.read(config, folder=tmp_path / "home").mem0)


@pytest.fixture
def mem0(open_mem0: Open) -> Iterator[Any]:
    memory = open_mem0()
    yield memory
    memory.vector_store.close()
    memory.close()


def add(mem0: Any, text: str, **options: Any) -> str:
    [made] = mem0.add(text, infer=False, **{**ADA, **options})["results"]
    return str(made["id"])


def texts(answer: Any) -> list[str]:
    return [found["memory"] for found in answer["results"]]


def test_it_is_a_store_of_mem0s_with_a_keyword_search(mem0: Any) -> None:
    assert isinstance(mem0.vector_store, VectorStoreBase)
    assert type(mem0.vector_store).keyword_search is not VectorStoreBase.keyword_search


def test_every_method_of_mem0_works_over_it(mem0: Any) -> None:
    tea, cat = add(mem0, "I like green tea"), add(mem0, "My cat is called Miso")
    add(mem0, "I like green tea too", user_id="ben")
    assert mem0.get(tea)["memory"] == "I like green tea"
    assert texts(mem0.search("what tea do I like?", filters=ADA))[0] == "I like green tea"
    assert set(texts(mem0.get_all(filters=ADA))) == {"I like green tea", "My cat is called Miso"}
    mem0.update(tea, "I like black tea")
    assert texts(mem0.search("tea", filters=ADA, top_k=1)) == ["I like black tea"]
    assert [event["event"] for event in mem0.history(tea)] == ["ADD", "UPDATE"]
    mem0.delete(cat)
    assert mem0.get(cat) is None
    mem0.delete_all(**ADA)
    assert texts(mem0.get_all(filters=ADA)) == []
    assert texts(mem0.get_all(filters={"user_id": "ben"})) == ["I like green tea too"]
    mem0.reset()
    assert texts(mem0.get_all(filters={"user_id": "ben"})) == []
    add(mem0, "again")
    assert texts(mem0.get_all(filters=ADA)) == ["again"]


def test_facts_are_there_when_mem0_is_opened_again(open_mem0: Open, mem0: Any) -> None:
    add(mem0, "I like tea")
    assert texts(open_mem0().search("tea", filters=ADA)) == ["I like tea"]


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ({"n": {"gt": 7}}, {8, 9}),
        ({"n": {"gte": 3, "lt": 5}}, {3, 4}),
        ({"n": {"in": [1, 5]}}, {1, 5}),
        ({"kind": {"ne": "even"}}, {1, 3, 5, 7, 9}),
        ({"kind": {"nin": ["odd", "other"]}}, {0, 2, 4, 6, 8}),
        ({"kind": {"icontains": "EV"}, "n": {"lte": 2}}, {0, 2}),
        ({"kind": {"contains": "ev"}, "n": {"eq": 4}}, {4}),
        ({"kind": "*", "n": 3}, {3}),
        ({"run_id": "r1"}, {1, 4, 7}),
        ({"AND": [{"n": {"gt": 2}}, {"kind": "even"}]}, {4, 6, 8}),
        ({"OR": [{"n": 1}, {"n": 9}]}, {1, 9}),
        ({"NOT": [{"kind": "even"}], "n": {"gt": 4}}, {5, 7, 9}),
    ],
)
def test_mem0s_filters_come_before_top_k(mem0: Any, asked: dict[str, Any], numbers: set[int]) -> None:
    for n in range(10):
        kind = "odd" if n % 2 else "even"
        add(mem0, f"number {n} of ten", run_id=f"r{n % 3}", metadata={"n": n, "kind": kind})
    for n in range(60):
        add(mem0, f"number {n} of ten", user_id="ben", metadata={"n": n, "kind": "even"})
    want = {f"number {n} of ten" for n in numbers}
    found = mem0.search("number of ten", filters={**ADA, **asked}, top_k=len(want), threshold=0)
    assert set(texts(found)) == want
    assert set(texts(mem0.get_all(filters={**ADA, **asked}))) == want


def test_search_is_hybrid(mem0: Any) -> None:
    for n in range(30):
        add(mem0, f"Something about the weather on day {n}")
    add(mem0, "The ferry to Porto leaves at noon")
    best = mem0.search("ferry Porto", filters=ADA, explain=True, threshold=0)["results"][0]
    assert best["memory"] == "The ferry to Porto leaves at noon"
    assert best["score_details"]["bm25_score"] > 0.3


def test_where_sqlite_has_no_fts5_vectors_alone_decide(mem0: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add(mem0, "I like tea")

    def missing(self: Keywords) -> None:
        raise sqlite3.OperationalError("no such module: fts5")

    monkeypatch.setattr(Keywords, "__init__", missing)
    assert mem0.vector_store.keyword_search("tea", filters=ADA) is None
    assert texts(mem0.search("tea", filters=ADA)) == ["I like tea"]


def test_deleting_everything_of_somebody_leaves_nothing_over(mem0: Any) -> None:
    vectors = [mem0.embedding_model.embed("x")] * 1200
    mem0.vector_store.insert(vectors, [{"data": "x", **ADA}] * 1200, [f"id{n}" for n in range(1200)])
    mem0.delete_all(**ADA)
    assert mem0.vector_store.col_info()["count"] == 0


def test_entities_are_linked_and_unlinked(mem0: Any) -> None:
    tea, cat = add(mem0, "I like tea"), add(mem0, "My cat likes tea")
    mem0._upsert_entity("Tea", "noun", tea, ADA)
    mem0._upsert_entity("tea ", "noun", cat, ADA)
    [[entity]] = mem0.entity_store.list(filters=ADA)
    assert entity.payload["linked_memory_ids"] == [tea, cat]
    assert mem0._compute_entity_boosts([("noun", "tea")], ADA).keys() == {tea, cat}
    mem0.delete(tea)
    [[entity]] = mem0.entity_store.list(filters=ADA)
    assert entity.payload["linked_memory_ids"] == [cat]
    mem0.delete(cat)
    assert mem0.entity_store.list(filters=ADA) == [[]]
    assert set(mem0.vector_store.list_cols()) == {"mem0", "mem0_entities"}


def test_a_batch_is_searched_in_one_pass(mem0: Any) -> None:
    add(mem0, "I like tea"), add(mem0, "My cat is called Miso")
    embed = mem0.embedding_model.embed
    hits = mem0.vector_store.search_batch(
        queries=["a", "b"], vectors_list=[embed("tea"), embed("cat called")], top_k=1, filters=ADA
    )
    assert [found.payload["data"] for [found] in hits] == ["I like tea", "My cat is called Miso"]
    assert mem0.vector_store.search_batch([], []) == []


def test_the_async_memory_works_over_it_too(open_mem0: Open) -> None:
    async def use() -> None:
        memory = open_mem0(AsyncMemory)
        many = [memory.add(f"number {n}", infer=False, **ADA) for n in range(20)]
        made = [answer["results"][0]["id"] for answer in await asyncio.gather(*many)]
        assert len(texts(await memory.get_all(filters=ADA))) == 20
        assert texts(await memory.search("number 7", filters=ADA, top_k=1)) == ["number 7"]
        await memory.delete(made[0])
        await memory.reset()
        assert texts(await memory.get_all(filters=ADA)) == []
        await memory.add("again", infer=False, **ADA)
        assert texts(await memory.get_all(filters=ADA)) == ["again"]

    asyncio.run(use())


def test_what_is_left_out_is_made_up(tmp_path: Path) -> None:
    store = Store(path=str(tmp_path / "f"))
    store.insert([[1.0, 0.0]])
    [[hit]] = store.list()
    assert len(hit.id) == 36
    assert hit.payload == {}
    store.delete_many([hit.id, "unknown"])
    assert store.col_info() == {"name": "mem0", "path": str(tmp_path / "f"), "dims": 2, "count": 0}
    store.delete_col()
    store.create_col("mem0", 2)
    assert store.search("", [1.0, 0.0, 0.0]) == []
    store.close()


def test_an_unknown_operator_is_said_by_get_all(mem0: Any) -> None:
    add(mem0, "I like tea")
    with pytest.raises(StoreError, match="no filter operator 'near'"):
        mem0.get_all(filters={**ADA, "n": {"near": 1}})
