"""A damaged row is left out and named, all others are served: whatever part of the file the damage is in."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from inferscale_memory.errors import StoreError
from inferscale_memory.index import Collection
from tests.index.facts import DIMS, fact, vector

PAGE = 4096
NAMES = [f"fact-{number}" for number in range(30)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "facts.sqlite"
    with closing(Collection(path, "facts", dims=DIMS)) as facts:
        facts.put(NAMES, [vector(n) for n in range(30)], [fact(f"text of {name}") for name in NAMES])
    return path


def noise(path: Path, page: int, seed: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(random.Random(seed).randbytes(PAGE))


def pages(path: Path, kind: str) -> list[int]:
    """Numbers of the pages of the file that are "body" (a fact's own), "rows" or "key" (an index of them)."""
    data = path.read_bytes()
    with closing(sqlite3.connect(path)) as db:
        roots = dict(db.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage"))
    if kind == "body":
        return [at // PAGE + 1 for at in range(0, len(data), PAGE) if b"text of" in data[at : at + PAGE]]
    if kind == "key":
        return [roots["sqlite_autoindex_facts_1"]]
    root = roots["facts"]
    head = data[(root - 1) * PAGE : root * PAGE]
    if head[0] == 13:  # a leaf: there is only one
        return [root]
    cells = [
        int.from_bytes(head[12 + 2 * n : 14 + 2 * n], "big") for n in range(int.from_bytes(head[3:5], "big"))
    ]
    return [int.from_bytes(head[at : at + 4], "big") for at in cells]


def served(facts: Collection) -> set[str]:
    return {hit.id for hit in facts.first(filters={"user_id": "ada"})}


def test_noise_in_one_fact_leaves_out_that_one_and_names_it_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noise(path, pages(path, "body")[15])
    with closing(Collection(path, "facts", dims=DIMS)) as facts, caplog.at_level(logging.WARNING):
        left = served(facts)
        assert len(left) == 29
        found = facts.search([vector(3)], 40, {"user_id": "ada"})[0]
        assert {hit.id for hit in found} == left
        assert {hit.id for hit in facts.search_words("text", 40, {"user_id": "ada"})} == left
        [lost] = set(NAMES) - left
        assert facts.get(lost) is None
        facts.put(["new"], [vector(99)], [fact("a new one")])
        assert served(facts) == left | {"new"}
    assert len([record for record in caplog.records if "damaged and left out" in record.message]) == 1


def test_a_bit_that_flipped_in_a_vector_is_noticed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b'["fact-7",') - 4 * DIMS
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with closing(Collection(path, "facts", dims=DIMS)) as facts:
        assert served(facts) == set(NAMES) - {"fact-7"}


def test_a_page_that_sqlite_itself_calls_malformed_costs_the_rows_on_it_alone(path: Path) -> None:
    with closing(Collection(path, "facts", dims=DIMS)) as facts:
        names = [f"more-{number}" for number in range(300)]
        facts.put(names, [vector(n) for n in range(300)], [fact(f"text of {name}") for name in names])
    leaves = pages(path, "rows")
    assert leaves
    noise(path, leaves[0])
    with closing(Collection(path, "facts", dims=DIMS)) as facts:
        left = served(facts)
        assert 250 < len(left) < 330
        assert all(facts.get(name) is not None for name in left)
        facts.put(["new"], [vector(99)], [fact("a new one")])
        assert served(facts) == {*left, "new"}
        assert facts.search([vector(3)], 10, {"user_id": "ada"})[0]


def test_a_damaged_index_is_made_anew_from_the_rows(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    noise(path, pages(path, "key")[0])
    with closing(Collection(path, "facts", dims=DIMS)) as facts, caplog.at_level(logging.WARNING):
        payload = facts.get("fact-3")
        assert payload is not None
        assert payload.payload["data"] == "text of fact-3"
        facts.delete(["fact-4"])
        assert served(facts) == set(NAMES) - {"fact-4"}
    assert "made anew" in caplog.text


def test_a_damaged_fact_can_be_deleted_and_written_anew(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"text of fact-9", b"text of fact-X"))
    with closing(Collection(path, "facts", dims=DIMS)) as facts:
        assert served(facts) == set(NAMES) - {"fact-9"}
        with pytest.raises(StoreError, match=r"'fact-9' in .* is damaged"):
            facts.update("fact-9", payload=fact("other words"))
        facts.put(["fact-9"], [vector(9)], [fact("text of fact-9")])
        assert served(facts) == set(NAMES)
        facts.delete(["fact-9"])
        assert served(facts) == set(NAMES) - {"fact-9"}


@pytest.mark.parametrize("seed", range(12))
def test_noise_anywhere_is_left_out_or_refused_by_name(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    noise(path, draw.randint(1, os.path.getsize(path) // PAGE), seed)
    refused = None
    try:
        with closing(Collection(path, "facts", dims=DIMS)) as facts:
            assert served(facts) <= set(NAMES)
            facts.search([vector(3)], 10)
            facts.get("fact-1")
    except StoreError as error:
        refused = str(error)
    assert refused is None or "facts.sqlite" in refused


def test_bodies_of_the_first_format_are_read_on(path: Path) -> None:
    """Such a file has no checksums and no names of embedders."""
    with closing(sqlite3.connect(path)) as db:
        layout = 4096
        kept = (layout - 12) * 32 // 255 - 23
        for place, body in db.execute("SELECT place, body FROM facts").fetchall():
            old = bytearray(body)
            dims = int.from_bytes(old[kept + 4 : kept + 8], "little") & ~(1 << 31)
            end = kept + 8 + 4 * dims + int.from_bytes(old[kept : kept + 4], "little")
            old[kept + 4 : kept + 8] = dims.to_bytes(4, "little")
            old[end : end + 4] = bytes(4)
            db.execute("UPDATE facts SET body = ? WHERE place = ?", (bytes(old), place))
        db.execute("ALTER TABLE collections DROP COLUMN model")
        db.execute("DROP TABLE reembedding")
        db.execute("PRAGMA user_version = 1")
        db.commit()
    with closing(Collection(path, "facts", dims=DIMS)) as facts:
        assert served(facts) == set(NAMES)
        facts.put(["new"], [vector(99)], [fact("a new one")])
    with closing(Collection(path, "facts", dims=DIMS)) as facts:
        assert served(facts) == {*NAMES, "new"}
