"""What a collection promises: exact search, durable writes, filters first, and nobody's stale view."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np
import pytest

from inferscale_memory.errors import StoreError
from inferscale_memory.index import Collection, searcher
from tests.index.facts import DIMS, fact, vector

ADA = {"user_id": "ada"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "facts.sqlite"


@pytest.fixture
def facts(path: Path) -> Iterator[Collection]:
    collection = Collection(path, "facts", dims=DIMS)
    yield collection
    collection.close()


@pytest.fixture(params=["faiss", "numpy"], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(searcher, "faiss", None)


def ids(hits: list[Any]) -> list[str]:
    return [hit.id for hit in hits]


def put(facts: Collection, *names: str, user: str = "ada") -> None:
    facts.put(
        list(names), [vector(ord(name[-1])) for name in names], [fact(f"text {n}", user) for n in names]
    )


def test_the_nearest_come_first_with_their_cosine(facts: Collection) -> None:
    put(facts, "a", "b", "c")
    hits = facts.search([vector(ord("b")) * 7], 3, ADA)[0]
    assert hits[0].id == "b"
    assert hits[0].score == pytest.approx(1.0)
    assert hits[0].payload == fact("text b")
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_a_batch_answers_each_query_as_if_it_were_alone(facts: Collection) -> None:
    put(facts, "a", "b", "c")
    put(facts, "x", "y", user="ben")
    queries = [vector(seed) for seed in range(5)]
    batch = facts.search(queries, 2)
    assert [ids(hits) for hits in batch] == [ids(facts.search([query], 2)[0]) for query in queries]


def test_a_hit_is_the_receivers_own(facts: Collection) -> None:
    facts.put(["a"], [vector(1)], [fact("text", links=["one"])])
    hit = facts.search([vector(1)], 1)[0][0]
    hit.payload["links"].append("two")
    hit.payload["data"] = "changed"
    assert facts.search([vector(1)], 1)[0][0].payload == fact("text", links=["one"])


def test_facts_outlive_the_process_that_wrote_them(path: Path, facts: Collection) -> None:
    put(facts, "a", "b")
    facts.close()
    again = Collection(path, "facts")
    assert ids(again.first(filters=ADA)) == ["a", "b"]
    assert again.file.dims == DIMS


def test_collections_of_one_file_are_apart(path: Path, facts: Collection) -> None:
    other = Collection(path, "entities", dims=3)
    other.put(["a"], [[1, 0, 0]], [fact("an entity")])
    put(facts, "a")
    assert facts.get("a") is not None
    other.clear()
    assert ids(facts.first()) == ["a"]
    assert facts.file.collections() == ["facts"]


def test_writing_an_id_again_replaces_the_fact(facts: Collection) -> None:
    put(facts, "a", "b")
    facts.search([vector(1)], 2, ADA)
    facts.put(["a"], [vector(99)], [fact("new words")])
    assert ids(facts.first(filters=ADA)) == ["a", "b"]
    assert facts.search([vector(99)], 1)[0][0].payload["data"] == "new words"
    facts.put(["a", "a"], [vector(1), vector(2)], [fact("once"), fact("twice")])
    assert facts.file.count() == 2
    assert facts.search([vector(2)], 1, ADA)[0][0].payload["data"] == "twice"


def test_a_fact_may_move_to_another_owner(facts: Collection) -> None:
    put(facts, "a", "b")
    facts.first()
    facts.put(["a"], [vector(1)], [fact("now ben's", "ben")])
    facts.update("b", payload=fact("ben's too", "ben"))
    assert facts.first(filters=ADA) == []
    assert ids(facts.first(filters={"user_id": "ben"})) == ["a", "b"]


def test_vector_and_payload_can_be_updated_alone(facts: Collection) -> None:
    put(facts, "a", "b")
    facts.search_words("text", 2, ADA)
    facts.update("a", vector=vector(50))
    hit = facts.search([vector(50)], 1, ADA)[0][0]
    assert (hit.id, hit.payload) == ("a", fact("text a"))
    facts.update("a", payload=fact("cellar"))
    hit = facts.search([vector(50)], 1, ADA)[0][0]
    assert (hit.id, hit.payload, hit.score) == ("a", fact("cellar"), pytest.approx(1.0))
    assert ids(facts.search_words("cellar", 2, ADA)) == ["a"]
    assert ids(facts.search_words("text", 2, ADA)) == ["b"]


def test_a_deleted_fact_is_not_updated_back_to_life(facts: Collection) -> None:
    put(facts, "a", "b")
    facts.delete(["a", "unknown"])
    with pytest.raises(StoreError, match="no fact 'a' to update"):
        facts.update("a", vector(1), fact("again"))
    assert ids(facts.first()) == ["b"]
    assert facts.get("a") is None
    facts.delete(["b"])
    assert facts.search([vector(1)], 3, ADA) == [[]]


@pytest.mark.parametrize(
    ("vectors", "says"),
    [
        ([[1.0] * (DIMS + 1)], f"holds vectors of {DIMS} numbers, not {DIMS + 1}: use the embedder"),
        ([[float("nan")] * DIMS], "NaN or infinity"),
        ([[1e300] * DIMS], "NaN or infinity"),
        ([[1.0], [1.0, 2.0]], "2 vectors"),
        ([["x"] * DIMS], "no vectors of one length"),
        ([1.0], "a vector is a list of numbers"),
    ],
)
def test_vectors_that_cannot_be_taken_are_refused(facts: Collection, vectors: Any, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        facts.put(["a"], vectors, [fact("text")])
    assert facts.file.count() == 0


def test_a_query_of_another_length_is_refused(facts: Collection) -> None:
    with pytest.raises(StoreError, match="3 numbers cannot be compared"):
        facts.search([[1, 2, 3]], 1)
    put(facts, "a")
    with pytest.raises(StoreError, match="3 numbers cannot be compared"):
        facts.update("a", [1, 2, 3])


def test_a_collection_is_not_opened_for_vectors_of_another_length(path: Path, facts: Collection) -> None:
    put(facts, "a")
    with pytest.raises(StoreError, match="another collection_name"):
        Collection(path, "facts", dims=3)


def test_the_first_vector_decides_whoever_brings_it(path: Path) -> None:
    one, two = Collection(path, "open"), Collection(path, "open")
    assert one.search([[1.0, 2.0]], 1) == [[]]
    two.put(["a"], [[1.0, 0.0, 0.0]], [fact("text")])
    with pytest.raises(StoreError, match="2 numbers cannot be compared"):
        one.search([[1.0, 2.0]], 1)
    assert ids(one.search([[1.0, 2.0, 0.0]], 1)[0]) == ["a"]


def test_a_zero_vector_is_similar_to_nothing(facts: Collection) -> None:
    facts.put(["a"], [[0.0] * DIMS], [fact("text")])
    assert facts.search([vector(1)], 1)[0][0].score == 0.0


def test_a_batch_is_written_whole_or_not_at_all(facts: Collection) -> None:
    with pytest.raises(StoreError, match="payload of b cannot be stored"):
        facts.put(["a", "b"], [vector(1), vector(2)], [fact("text"), fact("text", what=object())])
    assert facts.file.count() == 0
    with pytest.raises(StoreError, match="user_id is a list"):
        facts.put(["a"], [vector(1)], [{"user_id": ["ada"]}])


@pytest.mark.parametrize("text", ["", "Grüße, 日本 🍵", 'quo"te\\n\n\0', "\ud800 half", "x" * 100_000])
def test_any_text_comes_back_as_it_was(path: Path, facts: Collection, text: str) -> None:
    facts.put([text or "id"], [vector(1)], [fact(text, when=datetime(2026, 1, 1, tzinfo=UTC))])
    expected = fact(text, when="2026-01-01T00:00:00+00:00")
    assert facts.search([vector(1)], 1)[0][0].payload == expected
    again = Collection(path, "facts")
    hit = again.get(text or "id")
    assert hit is not None
    assert hit.payload == expected
    again.search_words(text, 3)


def test_ids_of_a_scope_may_be_any_subset(facts: Collection) -> None:
    scopes: list[dict[str, str]] = [
        {"user_id": "ada", "agent_id": "bot", "run_id": "r1"},
        {"user_id": "ada", "agent_id": "bot"},
        {"user_id": "ben", "agent_id": "bot"},
        {"agent_id": "bot", "run_id": "r1"},
        {"run_id": "r1"},
        {"agent_id": "ada"},
        {},
    ]
    names = [str(number) for number in range(len(scopes))]
    facts.put(names, [vector(number) for number in range(len(scopes))], scopes)
    for asked, found in [
        ({"user_id": "ada"}, "01"),
        ({"agent_id": "bot"}, "0123"),
        ({"run_id": "r1"}, "034"),
        ({"agent_id": "bot", "run_id": "r1"}, "03"),
        ({"agent_id": {"in": ["ada", "bot"]}}, "01235"),
        ({"AND": [{"user_id": "ada"}, {"run_id": "r1"}]}, "0"),
        ({"OR": [{"user_id": "ben"}, {"agent_id": "ada"}]}, "25"),
        ({"NOT": [{"user_id": "*"}]}, "0123456"),
        ({"user_id": "*"}, ""),
        ({"user_id": "bot"}, ""),
        (None, "0123456"),
    ]:
        assert sorted(ids(facts.first(filters=asked))) == list(found), asked
        assert sorted(ids(facts.search([vector(9)], 10, asked)[0])) == list(found), asked


def test_words_find_facts_whatever_the_query_holds(facts: Collection) -> None:
    facts.put(
        ["a", "b", "c", "d"],
        [vector(n) for n in range(4)],
        [
            fact("My cat is called Miso"),
            fact("Soups with miso paste", text_lemmatized="soup miso paste"),
            fact("Café über alles"),
            fact("Miso", "ben"),
        ],
    )
    assert set(ids(facts.search_words("miso", 5, ADA))) == {"a", "b"}
    assert ids(facts.search_words("Soups", 5, ADA)) == []
    assert ids(facts.search_words("cafe UBER", 5, ADA)) == ["c"]
    assert ids(facts.search_words("cat", 5, {**ADA, "data": {"contains": "Soups"}})) == []
    hits = facts.search_words("cat miso", 5, ADA)
    assert ids(hits) == ["a", "b"]
    assert all(hit.score is not None and hit.score > 0 for hit in hits)
    assert facts.search_words("miso", 1, {"OR": [ADA, {"user_id": "ben"}]})
    for query in (
        '"',
        "a AND",
        "NEAR(",
        "-x",
        "col:*",
        "",
        "  ",
        "()^*",
        "\0",
        "\ud800",
        "'; DROP",
        "w " * 5000,
    ):
        facts.search_words(query, 5, ADA)
    assert ids(facts.search_words(" ".join(f"word{n}" for n in range(5000)) + " cat", 5, ADA)) == []


def test_what_another_connection_writes_is_noticed(path: Path, facts: Collection) -> None:
    put(facts, "a", "b")
    assert len(facts.search([vector(1)], 5, ADA)[0]) == 2
    other = Collection(path, "facts")
    other.put(["c"], [vector(3)], [fact("text c")])
    assert ids(facts.search([vector(3)], 1, ADA)[0]) == ["c"]
    other.update("a", payload=fact("renamed"))
    assert ids(facts.search_words("renamed", 5, ADA)) == ["a"]
    put(facts, "d")
    assert set(ids(other.first(filters=ADA))) == {"a", "b", "c", "d"}
    other.delete(["a", "b", "c", "d"])
    assert facts.search([vector(1)], 5, ADA) == [[]]
    put(other, "e")
    assert ids(facts.first(filters=ADA)) == ["e"]
    other.clear()
    assert facts.first() == []
    put(facts, "f")
    assert ids(other.first()) == ["f"]


def test_another_process_writes_and_is_noticed(path: Path, facts: Collection) -> None:
    put(facts, "a")
    assert ids(facts.first()) == ["a"]
    code = (
        "import sys; from inferscale_memory.index import Collection\n"
        f"c = Collection(sys.argv[1], 'facts'); c.put(['b'], [[1.0] * {DIMS}], [{{'user_id': 'ada'}}])\n"
        "print([hit.id for hit in c.first()], 'torch' in sys.modules, 'mem0' in sys.modules)"
    )
    done = run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['a', 'b'] False False"
    assert ids(facts.first()) == ["a", "b"]


def test_few_owners_stay_in_memory_and_all_are_found(path: Path) -> None:
    facts = Collection(path, "facts", dims=DIMS, cache_bytes=20_000)
    for owner in range(40):
        facts.put([str(owner)], [vector(owner)], [fact("text", f"user{owner}")])
    for owner in range(40):
        assert ids(facts.search([vector(owner)], 1, {"user_id": f"user{owner}"})[0]) == [str(owner)]
    assert len(facts.first()) == 40
    assert [ids(facts.search([vector(owner)], 1)[0]) for owner in range(40)] == [[str(n)] for n in range(40)]
    assert 1 <= len(facts._slabs) < 20
    assert facts._held == sum(slab.nbytes for slab in facts._slabs.values())


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    import sqlite3

    (tmp_path / "text").write_text("no database" * 1000)
    with pytest.raises(StoreError, match="move that file away"):
        Collection(tmp_path / "text", "facts")
    other = sqlite3.connect(tmp_path / "other")
    other.execute("CREATE TABLE t (a)")
    other.close()
    with pytest.raises(StoreError, match="not a fact store of format"):
        Collection(tmp_path / "other", "facts")


def test_what_is_closed_twice_is_closed(facts: Collection) -> None:
    facts.close()
    facts.close()


def test_the_exact_search_is_exact(facts: Collection) -> None:
    vectors = np.stack([vector(seed) for seed in range(500)])
    facts.put([str(n) for n in range(500)], vectors, [fact("t", part=n % 3) for n in range(500)])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for seed in range(1000, 1020):
        query = vector(seed)
        scores = unit @ (query / np.linalg.norm(query))
        for where, rows in (({}, np.arange(500)), ({"part": 1}, np.arange(1, 500, 3))):
            best = rows[np.argsort(-scores[rows])][:7]
            hits = facts.search([query], 7, {**ADA, **where})[0]
            assert ids(hits) == [str(n) for n in best]
            assert [hit.score for hit in hits] == pytest.approx(scores[best].tolist(), abs=1e-6)


def test_a_vector_that_cannot_be_compared_is_refused_in_an_update_too(facts: Collection) -> None:
    """Written, it would keep its owner's slab from being loaded ever after."""
    put(facts, "a", "b")
    with pytest.raises(StoreError, match="NaN"):
        facts.update("a", vector=[float("nan")] * DIMS)
    put(facts, "c")
    [hits] = facts.search([vector(ord("a"))], 1)
    assert ids(hits) == ["a"]
