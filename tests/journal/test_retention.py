"""Days of use: what the journal and the process keep does not grow with what has come and gone."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from inferscale_memory.bounded import Bounded
from inferscale_memory.index import Collection
from inferscale_memory.journal import Fact, Journal, NewTurn
from inferscale_memory.journal.retention import KEPT

DIMS = 8
WHEN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        # What a test asks of a disk is not how long it takes.
        journal.database.connection.execute("PRAGMA synchronous = OFF")
        yield journal


def rows(journal: Journal, table: str) -> int:
    return int(journal.database.read(f"SELECT count(*) FROM {table}")[0][0])


def turn(number: int) -> NewTurn:
    return NewTurn("user", "Ada", f"I said the thing number {number}", WHEN)


def test_a_conversation_without_facts_keeps_its_last_turns(journal: Journal) -> None:
    for number in range(3 * KEPT):
        journal.turns.append("user_id=ada", [turn(number)])
    assert KEPT <= rows(journal, "turns") <= KEPT + 128
    [last] = journal.turns.append("user_id=ada", [turn(0)])
    assert last.ordinal == 3 * KEPT
    assert last.session == 1, "it is one session still"


def test_what_facts_came_from_stays(journal: Journal) -> None:
    [first] = journal.turns.append("user_id=ada", [turn(0)])
    journal.facts.write([fact("f", first.number)])
    for number in range(2 * KEPT):
        journal.turns.append("user_id=ada", [turn(number)])
    assert journal.turns.get([first.number]) == [first]
    journal.forget_facts(["f"])
    assert journal.database.read("SELECT 1 FROM turns WHERE number = ?", first.number) == []


def test_one_call_of_many_turns_keeps_them_all(journal: Journal) -> None:
    logged = journal.turns.append("user_id=ada", [turn(number) for number in range(2 * KEPT)])
    assert rows(journal, "turns") == len(logged) == 2 * KEPT


def fact(name: str, number: int) -> Fact:
    return Fact(name, "ada", "user_id=ada", f"tag-{name}", f"text of {name}", "Ada", WHEN, 1, (number,))


def test_fifty_thousand_operations_leave_no_more_than_what_lives(tmp_path: Path, journal: Journal) -> None:
    """Adds, updates, searches and deletes; about a hundred facts live at any time."""
    path = tmp_path / "facts.sqlite"
    draw = np.random.default_rng(1)
    sizes, memory = [], []
    with closing(Collection(path, "facts", dims=DIMS)) as facts:
        facts.file._files.writer.execute("PRAGMA synchronous = OFF")  # type: ignore[union-attr]
        facts.file._scrub = lambda *needed: None  # type: ignore[method-assign]  # the disk is not what is tested
        tracemalloc.start()
        number = 0
        for round in range(125):
            names = [f"fact-{number + n}" for n in range(100)]
            number += 100
            vectors = draw.standard_normal((100, DIMS))
            payloads = [{"data": f"text of {name}", "user_id": "ada", "updated_at": name} for name in names]
            logged = journal.turns.append("user_id=ada", [turn(n) for n in range(100)])
            journal.facts.write([fact(name, said.number) for name, said in zip(names, logged, strict=True)])
            facts.put(names, vectors, payloads)
            facts.search(vectors, 3, {"user_id": "ada"})
            for name, vector in zip(names[:5], vectors, strict=False):
                facts.search([vector], 3, {"user_id": "ada", "updated_at": {"in": [name]}})
            facts.put(
                names,
                vectors,
                [{**payload, "updated_at": f"{payload['data']} again"} for payload in payloads],
            )
            facts.delete(names)
            journal.forget_facts(names)
            if round in (24, 124):
                sizes.append(
                    sum(file.stat().st_size for file in tmp_path.iterdir() if file.suffix == ".sqlite")
                )
                memory.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert rows(journal, "turns") <= 1
    assert rows(journal, "facts") == rows(journal, "sources") == 0
    assert memory[1] - memory[0] < 4 << 20
    # 10,000 ids of facts that stay forgotten, so that nobody brings them back: a few dozen bytes each
    assert sizes[1] - sizes[0] < 10_000 * 64 + (1 << 20)


def test_what_is_only_remembered_to_be_quicker_has_an_end() -> None:
    known: Bounded[int, int] = Bounded(3)
    for number in range(10):
        known[number] = number
    known[8] = 0
    known[11] = 0
    assert list(known) == [9, 8, 11]
