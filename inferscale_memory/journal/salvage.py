"""What is kept of a damaged journal: every row that can be read, in a new file; the damaged one is moved aside.

Blobs are made anew: from what is left nobody could tell what each of them was made of, and so which of them a text is
in that is to be forgotten. An engine that outlives this process is told to forget them.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from inferscale_memory.journal.steps import FORMAT, STEPS
from inferscale_memory.storage.sqlite import is_damage, open_to_read, transaction

_log = logging.getLogger(__name__)

_NUMBERED = {"turns": "number", "facts": "place"}
_CLEAN = (
    "INSERT INTO owed (owner, keys, tags) SELECT owner, json_group_array(key), '[]' FROM ledger GROUP BY owner",
    "DELETE FROM held",
    "DELETE FROM stands",
    "DELETE FROM ledger",
    "DELETE FROM sources WHERE fact NOT IN (SELECT fact FROM facts) OR turn NOT IN (SELECT number FROM turns)",
    "DELETE FROM echoes WHERE turn NOT IN (SELECT number FROM turns)",
)


def set_aside(path: Path) -> Path:
    """Give a file and its log another name; which."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.replace(aside)
    for end in ("-wal", "-shm", "-journal"):
        beside = path.with_name(path.name + end)
        if beside.exists():
            beside.replace(aside.with_name(aside.name + end))
    return aside


def rescue(path: Path, connect: Callable[[Path], sqlite3.Connection]) -> None:
    """Move the file at `path` aside, and put a new one in its place with what can be read of it."""
    aside = set_aside(path)
    kept, lost = {"turns": 0, "facts": 0}, 0
    with closing(connect(path)) as fresh:
        try:
            damaged, folder = open_to_read(aside)
        except sqlite3.Error:
            damaged, folder = None, None
        if damaged is not None:
            damaged.text_factory = fresh.text_factory
            with closing(damaged):
                lost = _copy(damaged, fresh)
            kept = (
                {name: fresh.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in kept}
                if (_tables(fresh))
                else kept
            )
        if folder is not None:
            folder.cleanup()
    _log.warning(
        "the journal %s was damaged: %d facts and %d turns of it could be read and are kept, %d rows could not. It is "
        "%s now; delete that file when you have no more use for it, since what you delete from the memory stays in it",
        path,
        kept["facts"],
        kept["turns"],
        lost,
        aside,
    )


def _copy(damaged: sqlite3.Connection, fresh: sqlite3.Connection) -> int:
    """Copy what can be read; how many rows could not be."""
    lost = 0
    form = damaged.execute("PRAGMA user_version").fetchone()[0]
    made = dict(_until_damage(damaged, "SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
    if not 1 <= form <= FORMAT:
        return lost
    with transaction(fresh):
        for step in STEPS[:form]:
            for statement in step.split(";\n"):
                fresh.execute(statement)
        fresh.execute(f"PRAGMA user_version = {form}")
        for table, sql in made.items():
            if table not in _tables(fresh) and not table.startswith("sqlite_"):
                fresh.execute(sql)
        for table in _tables(fresh) & set(made):
            lost += _copy_table(damaged, fresh, table)
        if form == FORMAT:
            for statement in _CLEAN:
                fresh.execute(statement)
        elif "ledger" in _tables(fresh):
            fresh.execute("DELETE FROM held")
            fresh.execute("DELETE FROM ledger")
    return lost


def _copy_table(damaged: sqlite3.Connection, fresh: sqlite3.Connection, table: str) -> int:
    columns = [name for _, name, *_, hidden in fresh.execute(f"PRAGMA table_xinfo({table})") if not hidden]
    named = ", ".join(columns)
    insert = f"INSERT OR IGNORE INTO {table} ({named}) VALUES ({', '.join('?' * len(columns))})"
    lost = 0
    order = _NUMBERED.get(table)
    if order is None:
        for way in ("ASC", "DESC"):
            first = columns[0]
            fresh.executemany(
                insert, _until_damage(damaged, f"SELECT {named} FROM {table} ORDER BY {first} {way}")
            )
        return lost
    numbers = [
        number
        for way in ("ASC", "DESC")
        for (number,) in _until_damage(damaged, f"SELECT {order} FROM {table} ORDER BY {order} {way}")
    ]
    for number in range(min(numbers, default=1), max(numbers, default=0) + 1):
        try:
            rows = damaged.execute(f"SELECT {named} FROM {table} WHERE {order} = ?", (number,)).fetchall()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            lost += 1
            continue
        fresh.executemany(insert, rows)
    return lost


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _until_damage(db: sqlite3.Connection, query: str) -> Iterator[tuple[Any, ...]]:
    """The rows that can be read before a damaged page ends the query."""
    try:
        yield from db.execute(query)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
