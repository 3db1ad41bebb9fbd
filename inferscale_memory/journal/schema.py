"""What a journal's file is made of, and how one of an earlier format becomes one of the present.

A journal that cannot be written is read into memory, one that is damaged is made anew from what can be read. It must
never leave a file half changed, nor words of an earlier format in its free room.
"""

from __future__ import annotations

import random
import sqlite3
from functools import partial
from pathlib import Path
from time import monotonic, sleep

from inferscale_memory.journal.salvage import rescue
from inferscale_memory.journal.steps import FORMAT, STEPS
from inferscale_memory.journal.words import packed, settle_page_size
from inferscale_memory.storage.sqlite import (
    copied_into,
    empty_log,
    is_sound,
    says_sqlite,
    transaction,
    use_log,
)

_PATIENCE_S = 30.0
_PAUSE_S = 0.05


def connect(path: Path) -> sqlite3.Connection:
    """A connection to the file, which is made, with its folder, where there is none. It settles how large the pages
    are, so nothing else may make the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    db = _connected(str(path))
    try:
        if not db.execute("PRAGMA page_count").fetchone()[0]:
            settle_page_size(db)
        use_log(db, _PATIENCE_S)
        for pragma in ("synchronous = FULL", "secure_delete = ON", "temp_store = MEMORY"):
            db.execute(f"PRAGMA {pragma}")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _connected(where: str) -> sqlite3.Connection:
    db = sqlite3.connect(where, timeout=_PATIENCE_S, isolation_level=None, check_same_thread=False)
    db.text_factory = partial(str, encoding="utf-8", errors="replace")  # damaged words are no reason to fail
    db.create_function("packed", 1, packed, deterministic=True)
    db.create_function("folded", 1, _folded, deterministic=True)
    return db


def _folded(text: str | None) -> str | None:
    """SQLite's own `lower` knows the letters of ASCII alone."""
    return None if text is None else text.casefold()


def in_memory(path: Path) -> sqlite3.Connection:
    """A copy of the file in memory, with everything in it that a journal needs: what is written to it is gone when it
    is closed. Raises `sqlite3.Error` and `OSError`."""
    db = _connected(":memory:")
    try:
        settle_page_size(db)
        copied_into(db, path)
        if db.execute("PRAGMA user_version").fetchone()[0] < FORMAT:
            _step_up(db)
        db.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        db.close()
        raise
    return db


def repair(path: Path) -> None:
    """Look at every page of the file. A damaged file is moved aside, and what can be read of it is kept.

    This reads the whole file: about 5 ms of CPU time a megabyte, 0.8 s at 170 MB (50,000 facts, 100,000 turns). So it
    is done once when a memory is opened, and not when a file is opened again after a fork.
    """
    if says_sqlite(path) and not is_sound(path):
        rescue(path, connect)


def opened(path: Path) -> sqlite3.Connection:
    """A connection to the file, brought to the present format. Raises `sqlite3.Error` if the file is not a journal, or
    if another process keeps it from being converted."""
    deadline = monotonic() + _PATIENCE_S
    while True:
        try:
            return _opened(path)
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or monotonic() > deadline:
                raise
        # The connection is closed while this waits: processes that convert a file at once keep each other out.
        sleep(random.uniform(0, _PAUSE_S))


def _opened(path: Path) -> sqlite3.Connection:
    db = connect(path)
    try:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found > FORMAT:
            raise sqlite3.DatabaseError(f"{path} is a journal of format {found}, this library reads {FORMAT}")
        if found < FORMAT:
            _bring_up(db)
        db.execute("PRAGMA foreign_keys = ON")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _is_busy(error: sqlite3.OperationalError) -> bool:
    """SQLite does not wait where the file must be nobody else's, whatever its timeout."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_BUSY)  # an error of ours says the same
    return code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _bring_up(db: sqlite3.Connection) -> None:
    """References are not followed meanwhile: a table that is replaced would take along what refers to it."""
    settle_page_size(db)
    use_log(db, _PATIENCE_S)
    found = _step_up(db)
    if found:  # what an earlier format has forgotten lies in the free room of its pages
        db.execute("VACUUM")
        empty_log(db, _PATIENCE_S)


def _step_up(db: sqlite3.Connection) -> int:
    """Bring the tables to the present format; which they had."""
    with transaction(db):
        found = int(db.execute("PRAGMA user_version").fetchone()[0])
        for step in STEPS[found:]:
            for statement in step.split(";\n"):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {FORMAT}")
    return found
