"""The decorator on mem0's vector store changes nothing mem0 can see, and misses nothing it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from mem0.vector_stores.base import VectorStoreBase
from mem0.vector_stores.faiss import FAISS
from mem0.vector_stores.qdrant import Qdrant

from inferscale_memory.mem0_adapter.vector_store import Store
from inferscale_memory.memory import Memory
from inferscale_memory.write.observer import MirroredStore, StoreLock, mirrored
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, say

IDS = [f"{number:08d}-0000-0000-0000-000000000000" for number in range(4)]


class Events:
    """A mirror that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.lost: list[Any] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        yield

    def failed(self, error: Exception) -> None:
        """What the store could not write is the caller's to tell."""

    def losing(self, fact: str, held: Callable[[], Any], becomes: Any) -> None:
        payload = held()
        self.lost.append((fact, payload and payload["data"], becomes and becomes["data"]))

    def losing_many(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.lost += [(name, payload["data"], None) for name, payload in rows]

    def losing_everything(self, ids: Callable[[], Sequence[str]]) -> None:
        self.lost.append("everything")

    def shown(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None: ...

    def expect(self, ids: Sequence[str]) -> None:
        self.told.append(("expect", list(ids)))

    def written(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.told.append(("written", [(name, payload["data"]) for name, payload in rows]))

    def updated(self, fact: str, payload: Mapping[str, Any]) -> None:
        self.told.append(("updated", (fact, payload["data"])))

    def deleted(self, ids: Sequence[str]) -> None:
        self.told.append(("deleted", list(ids)))

    def cleared(self) -> None:
        self.told.append(("cleared", None))


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture(params=[Qdrant, FAISS, Store], ids=["qdrant", "faiss", "inferscale"])
def store(request: pytest.FixtureRequest, tmp_path: Path, events: Events) -> Any:
    inner = request.param(collection_name="c", embedding_model_dims=4, path=str(tmp_path / "store"))
    return mirrored(inner, StoreLock(), events)


def row(text: str) -> dict[str, Any]:
    return {"data": text, "user_id": "ada"}


def test_inserts_are_told_after_the_store_has_them(store: Any, events: Events) -> None:
    store.insert([[1.0, 0, 0, 0], [0, 1.0, 0, 0]], [row("one"), row("two")], IDS[:2])
    assert events.told == [("expect", IDS[:2]), ("written", [(IDS[0], "one"), (IDS[1], "two")])]
    assert store.get(IDS[0]).payload["data"] == "one"


def test_an_insert_the_store_refuses_is_not_told(store: Any, events: Events, monkeypatch: Any) -> None:
    monkeypatch.setattr(store._inner, "insert", MagicMock(side_effect=RuntimeError("disk full")))
    with pytest.raises(RuntimeError, match="disk full"):
        store.insert([[1.0, 0, 0, 0]], [row("one")], IDS[:1])
    assert [what for what, _ in events.told] == ["expect"]


def test_updates_and_deletes_are_told(store: Any, events: Events) -> None:
    store.insert([[1.0, 0, 0, 0]], [row("one")], IDS[:1])
    store.update(vector_id=IDS[0], vector=[0, 1.0, 0, 0], payload=row("new"))
    store.delete(vector_id=IDS[0])
    assert events.told[2:] == [("updated", (IDS[0], "new")), ("deleted", IDS[:1])]
    assert events.lost == [(IDS[0], "one", "new"), (IDS[0], "new", None)]


def test_what_is_to_be_lost_is_told_even_if_the_store_then_fails(
    store: Any, events: Events, monkeypatch: Any
) -> None:
    store.insert([[1.0, 0, 0, 0]], [row("one")], IDS[:1])
    monkeypatch.setattr(store._inner, "delete", MagicMock(side_effect=RuntimeError("disk full")))
    with pytest.raises(RuntimeError, match="disk full"):
        store.delete(vector_id=IDS[0])
    assert events.lost == [(IDS[0], "one", None)]
    assert "deleted" not in [what for what, _ in events.told]


def test_an_update_of_the_vector_alone_changes_no_words(store: Any, events: Events) -> None:
    store.insert([[1.0, 0, 0, 0]], [row("one")], IDS[:1])
    if not isinstance(store._inner, FAISS):  # mem0's cannot
        store.update(IDS[0], vector=[0, 1.0, 0, 0])
    assert len(events.told) == 2


def test_clearing_is_told(store: Any, events: Events) -> None:
    store.reset()
    store.delete_col()
    assert events.told == [("cleared", None)] * 2
    assert events.lost == ["everything"] * 2


def test_everything_else_is_the_stores_own(store: Any) -> None:
    assert store.collection_name == "c"
    assert isinstance(store, VectorStoreBase)
    store.insert([[1.0, 0, 0, 0]], [row("one")], IDS[:1])
    assert [hit.id for hit in store.search(query="one", vectors=[1.0, 0, 0, 0], top_k=3)] == IDS[:1]
    assert len(store.search_batch(["a", "b"], [[1.0, 0, 0, 0]] * 2)) == 2
    with pytest.raises(AttributeError, match="nonsense"):
        _ = store.nonsense


def test_it_has_a_keyword_search_only_where_the_store_has(store: Any) -> None:
    own = type(store).keyword_search is not VectorStoreBase.keyword_search
    assert own is not isinstance(store._inner, FAISS)


def test_only_real_stores_are_wrapped_and_only_once(store: Any, events: Events) -> None:
    mock = MagicMock()
    assert mirrored(mock, StoreLock(), events) is mock
    assert mirrored(store, StoreLock(), events) is store


def test_mem0_sees_the_mirror_and_its_client(memory: Memory) -> None:
    assert isinstance(memory.vector_store, MirroredStore)
    assert memory.vector_store.client is memory.vector_store._inner.client
    memory.reset()
    assert isinstance(memory.vector_store, MirroredStore)


def test_the_entity_store_is_guarded_and_not_mirrored(open_memory: OpenMemory) -> None:
    memory = open_memory(vector_store={"provider": "qdrant"})
    [fact] = say(memory, "I live in Porto")
    entities = memory.entity_store
    assert isinstance(entities, MirroredStore)
    assert entities.client is memory.vector_store.client
    entities.insert([memory.embedding_model.embed("Porto")], [{"data": "Porto", "user_id": "ada"}], IDS[:1])
    assert [found["id"] for found in memory.get_all(filters=ADA)["results"]] == [fact]
    assert memory._core is not None
    assert memory._core.journal.facts.get(IDS) == {}


def test_a_batch_that_fails_and_is_tried_record_by_record_leaves_each_fact_once(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = memory.vector_store, memory.vector_store._inner.insert
    payloads = [row("one"), row("two")]
    vectors = [memory.embedding_model.embed(payload["data"]) for payload in payloads]

    def half(vectors: Any, payloads: Any, ids: Any) -> None:
        real(vectors=vectors[:1], payloads=payloads[:1], ids=ids[:1])
        if len(ids) > 1:
            raise RuntimeError("connection lost")

    monkeypatch.setattr(store._inner, "insert", half)
    with pytest.raises(RuntimeError):
        store.insert(vectors, payloads, IDS[:2])
    for number in range(2):
        store.insert(vectors[number : number + 1], payloads[number : number + 1], IDS[number : number + 1])
    store.insert(vectors[:1], payloads[:1], IDS[:1])
    memory.flush()
    assert memory._core is not None
    assert set(memory._core.journal.facts.get(IDS)) == set(IDS[:2])
    assert len(memory.get_all(filters=ADA)["results"]) == 2


def test_what_an_app_sets_on_its_store_reaches_the_store(store: Any) -> None:
    store.collection_name = "another"
    assert store._inner.collection_name == "another"
    store.mark = 1
    assert (store._inner.mark, "mark" in vars(store)) == (1, False)
    del store.mark
    assert not hasattr(store._inner, "mark")


def test_a_method_that_is_replaced_is_replaced_in_front(store: Any) -> None:
    inner = store._inner.search
    store.search = MagicMock(return_value=[])
    assert store.search("q") == []
    assert store._inner.search == inner
    del store.search
    assert store._inner.search == inner


def test_many_that_are_deleted_at_once_are_told_at_once(store: Any, events: Events) -> None:
    store.insert([[1.0, 0, 0, 0], [0, 1.0, 0, 0]], [row("one"), row("two")], IDS[:2])
    events.told.clear()
    if not hasattr(store._inner, "delete_many"):
        assert not hasattr(store, "delete_many")
        return
    store.delete_many(IDS[:3])
    assert events.lost == [(IDS[0], "one", None), (IDS[1], "two", None)]
    assert events.told == [("deleted", IDS[:3])]
    assert store.get(IDS[0]) is None


def test_a_store_that_does_not_list_so_many_is_cleared_all_the_same(
    store: Any, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._inner, "list", MagicMock(side_effect=ValueError("at most 10,000")))
    monkeypatch.setattr(events, "losing_everything", lambda ids: events.lost.append(ids()))
    store.delete_col()
    assert (events.lost, events.told) == ([()], [("cleared", None)])
