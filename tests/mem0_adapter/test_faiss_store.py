"""mem0's FAISS store behind a memory: none of the faults that its users report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mem0.vector_stores.faiss import FAISS

from inferscale_memory.errors import StoreError
from inferscale_memory.mem0_adapter.faiss_store import mended
from inferscale_memory.memory import Memory
from inferscale_memory.write.observer import StoreLock
from tests.memory.conftest import OpenMemory
from tests.memory.hashing import DIMENSIONS
from tests.memory.saying import ADA, BEN, say

IDS = [f"00000000-0000-0000-0000-{number:012d}" for number in range(20)]
HERE = [1.0, 0, 0, 0]


def raw(path: Path, mend: bool = True, **options: Any) -> Any:
    store = FAISS("c", path=str(path / "store"), embedding_model_dims=4, **options)
    return mended(store) if mend else store


@pytest.fixture
def memory(open_memory: OpenMemory) -> Memory:
    return open_memory(vector_store={"provider": "faiss", "config": {"embedding_model_dims": DIMENSIONS}})


def test_a_user_with_few_memories_finds_them_among_many_of_others(memory: Memory) -> None:
    say(memory, *(f"My cat number {number} is called Miso {number}" for number in range(60)), **BEN)
    say(memory, "A memory of something else entirely")
    found = memory.search("What is my cat called?", filters=ADA, top_k=3, threshold=0.0)["results"]
    assert [fact["memory"] for fact in found] == ["A memory of something else entirely"]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({"n": {"gte": 18}}, [18, 19]),
        ({"n": {"ne": 0}, "word": "w0"}, [5, 10, 15]),
        ({"OR": [{"n": 3}, {"n": {"in": [4, 7]}}]}, [3, 4, 7]),
        ({"NOT": [{"n": {"gt": 1}}]}, [0, 1]),
        ({"AND": [{"n": {"lt": 6}}, {"word": {"contains": "w4"}}]}, [4]),
        ({"n": [2, 5]}, [2, 5]),
        ({"n": "*"}, list(range(20))),
        ({"missing": 1}, []),
    ],
)
def test_filters_mean_what_they_mean_elsewhere(
    tmp_path: Path, filters: dict[str, Any], found: list[int]
) -> None:
    store = raw(tmp_path)
    payloads = [{"n": number, "word": f"w{number % 5}"} for number in range(20)]
    store.insert([[1.0, number / 10, 0, 0] for number in range(20)], payloads, IDS)
    hits = store.search("?", HERE, top_k=20, filters=filters)
    assert sorted(hit.payload["n"] for hit in hits) == found
    assert [hit.payload["n"] for hit in hits] == found, "the nearest first"
    [listed] = store.list(filters=filters, top_k=20)
    assert [row.payload["n"] for row in listed] == found
    assert len(store.search("?", HERE, top_k=2, filters=filters)) == min(2, len(found))


def test_scores_are_mem0s(tmp_path: Path) -> None:
    for strategy in ("euclidean", "cosine", "inner_product"):
        theirs = raw(tmp_path / strategy, mend=False, distance_strategy=strategy)
        theirs.insert([[1.0, 1, 0, 0], [0, 1.0, 0, 0]], [{"u": 1}, {"u": 1}], IDS[:2])
        before = [(hit.id, hit.score) for hit in theirs.search("?", HERE, top_k=2, filters={"u": 1})]
        ours = mended(theirs)
        assert ours is theirs
        assert [(hit.id, hit.score) for hit in ours.search("?", HERE, top_k=2, filters={"u": 1})] == before


def test_an_operator_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    store = raw(tmp_path)
    store.insert([HERE], [{"n": 1}], IDS[:1])
    with pytest.raises(StoreError, match="like"):
        store.search("?", HERE, filters={"n": {"like": 1}})


def test_an_update_that_fails_changes_nothing(tmp_path: Path) -> None:
    store = raw(tmp_path)
    store.insert([HERE, [0, 1.0, 0, 0]], [{"data": "one"}, {"data": "two"}], IDS[:2])
    with pytest.raises(Exception):  # noqa: B017  # whatever faiss raises on a vector of another length
        store.update(IDS[0], vector=[1.0, 0], payload={"data": "new"})
    for seen in (store, raw(tmp_path)):
        assert seen.get(IDS[0]).payload == {"data": "one"}
        [nearest] = seen.search("?", HERE, top_k=1)
        assert (nearest.id, nearest.payload) == (IDS[0], {"data": "one"})
    store.update(IDS[0], vector=[0, 0, 1.0, 0], payload={"data": "new"})
    assert raw(tmp_path).search("?", [0, 0, 1.0, 0], top_k=1)[0].payload == {"data": "new"}


def test_a_change_that_does_not_reach_the_disk_is_an_error_and_did_not_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import faiss

    store = raw(tmp_path)
    store.insert([HERE], [{"data": "one"}], IDS[:1])
    own, failed = faiss.write_index, []

    def full(index: Any, name: str) -> None:
        if not failed:
            failed.append(name)
            raise OSError("no space left")
        own(index, name)

    monkeypatch.setattr(faiss, "write_index", full)
    with pytest.raises(OSError, match="no space"):
        store.insert([[0, 1.0, 0, 0]], [{"data": "two"}], IDS[1:2])
    for seen in (store, raw(tmp_path)):
        assert [row.id for row in seen.list()[0]] == IDS[:1]
        assert seen.index.ntotal == 1


def test_only_mem0s_own_is_mended(tmp_path: Path) -> None:
    class Mine(FAISS):
        pass

    mine = Mine("c", path=str(tmp_path / "store"), embedding_model_dims=4)
    assert type(mended(mine)) is Mine
    assert mended(mended(store := raw(tmp_path))) is store
    assert isinstance(store, FAISS)


def test_entities_are_kept_in_a_mended_store_too(memory: Memory) -> None:
    say(memory, "My cat is called Miso")
    assert (
        type(memory.entity_store._inner).__name__
        == type(memory.vector_store._inner).__name__
        == "MendedFAISS"
    )


def test_one_thread_at_a_time_calls_it_and_whatever_is_made_of_it(memory: Memory, tmp_path: Path) -> None:
    class Mine(FAISS):
        pass

    for store in (raw(tmp_path / "mended"), Mine("c", path=str(tmp_path / "mine"), embedding_model_dims=4)):
        lock = StoreLock()
        lock.settle(store)
        assert hasattr(lock.held, "acquire")
