"""Reading a file some pages of which are damaged: what can be read is served, the rest is counted.

SQLite finds a row by the pages of its table or by those of an index. A damaged page of the one is gone around by the
other; where an index itself is needed, the file is made anew from its rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

from inferscale_memory.storage.sqlite import is_damage

_ROWS = "SELECT place, body FROM facts WHERE place BETWEEN ? AND ? ORDER BY place"
# A unary plus keeps SQLite from using the index of that column: the two find a place by different pages.
_PLACES = (
    "SELECT place FROM facts WHERE place BETWEEN ? AND ? ORDER BY place",
    "SELECT place FROM facts WHERE place BETWEEN ? AND ? ORDER BY place DESC",
    "SELECT place FROM facts WHERE +place BETWEEN ? AND ? ORDER BY key",
    "SELECT place FROM facts WHERE +place BETWEEN ? AND ? ORDER BY key DESC",
)
_ALL = (-(1 << 63), (1 << 63) - 1)
_FACT = "place, key, agent, run, body"
_OWNER = "number, collection, key, changes, facts, next"

OwnerOf = Callable[[bytes, bytes], tuple[str, bytes] | None]
"""Collection and key of the owner of a fact, from the fact's own key and body."""


def rows_between(db: sqlite3.Connection, first: int, last: int) -> tuple[list[tuple[int, bytes]], list[int]]:
    """Place and body of every row in a range, in order, and the places whose rows SQLite cannot read."""
    try:
        return db.execute(_ROWS, (first, last)).fetchall(), []
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
    found: list[tuple[int, bytes]] = []
    lost: list[int] = []
    for place, rows in _one_by_one(db, "place, body", first, last):
        if rows:
            found += rows
        else:
            lost.append(place)
    return found, lost


def made_anew(damaged: sqlite3.Connection, schema: Sequence[str], shift: int, owner_of: OwnerOf) -> int:
    """Write the file behind `damaged` anew from the rows in it that can be read; how many facts could not be.

    Raises:
        sqlite3.Error: not even its schema can be read, or there is no room.
    """
    with closing(sqlite3.connect("", isolation_level=None)) as fresh:
        fresh.execute(f"PRAGMA page_size = {damaged.execute('PRAGMA page_size').fetchone()[0]}")
        for statement in schema:
            fresh.execute(statement)
        for pragma in ("application_id", "user_version"):
            fresh.execute(f"PRAGMA {pragma} = {damaged.execute(f'PRAGMA {pragma}').fetchone()[0]}")
        for table, columns in (("collections", 3), ("reembedding", 4), ("owners", 6)):
            held = _until_damage(damaged, f"SELECT * FROM {table}")
            marks = ", ".join("?" * columns)
            fresh.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", held)
        lost = 0
        for _, rows in _one_by_one(damaged, _FACT, *_ALL):
            lost += not rows
            fresh.executemany(f"INSERT OR IGNORE INTO facts ({_FACT}) VALUES (?, ?, ?, ?, ?)", rows)
        _give_owners(fresh, shift, owner_of)
        fresh.backup(damaged)
    return lost


def _give_owners(db: sqlite3.Connection, shift: int, owner_of: OwnerOf) -> None:
    """Facts whose owner could not be read get it back from what they say; counters are counted anew."""
    homeless = db.execute(
        f"SELECT place >> {shift}, key, body FROM facts"
        f" WHERE place >> {shift} NOT IN (SELECT number FROM owners) GROUP BY place >> {shift}"
    ).fetchall()
    for number, key, body in homeless:
        owner = owner_of(key, body)
        if owner is not None:
            db.execute(f"INSERT OR IGNORE INTO owners ({_OWNER}) VALUES (?, ?, ?, 0, 0, 0)", (number, *owner))
    db.execute(
        "UPDATE owners SET changes = changes + 1, next = max(next, coalesce("
        f" (SELECT max(place) - (number << {shift}) + 1 FROM facts WHERE place >> {shift} = number), 0)),"
        f" facts = (SELECT count(*) FROM facts WHERE place >> {shift} = number)"
    )
    db.execute("DELETE FROM owners WHERE facts = 0")


def _one_by_one(
    db: sqlite3.Connection, columns: str, first: int, last: int
) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
    """Every place in a range with its row, or with none where it cannot be read."""
    places = {place for query in _PLACES for (place,) in _until_damage(db, query, first, last)}
    query = f"SELECT {columns} FROM facts WHERE place = ?"
    for place in sorted(places):
        yield place, list(_until_damage(db, query, place))


def _until_damage(db: sqlite3.Connection, query: str, *values: int) -> Iterator[tuple[Any, ...]]:
    """The rows that can be read before a damaged page ends the query."""
    try:
        yield from db.execute(query, values)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
