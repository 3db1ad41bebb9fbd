"""What every SQLite file of a memory needs: transactions, and a write-ahead log that is really emptied."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep

_PAUSE_S = 0.002


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """One transaction: all of it is durable when the block is left, or none of it happened."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


@contextmanager
def patience(db: sqlite3.Connection, seconds: float) -> Iterator[None]:
    """Within the block SQLite waits so long for other connections."""
    before = db.execute("PRAGMA busy_timeout").fetchone()[0]
    db.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")
    try:
        yield
    finally:
        db.execute(f"PRAGMA busy_timeout = {before}")


def use_log(db: sqlite3.Connection, seconds: float) -> None:
    """Switch to a write-ahead log. SQLite does not wait for another connection that does the same, so that is done
    here. Raises what SQLite raises when `seconds` were not enough."""
    deadline = monotonic() + seconds
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or monotonic() > deadline:
                raise
        sleep(_PAUSE_S)


def empty_log(db: sqlite3.Connection, seconds: float) -> bool:
    """Move the write-ahead log into the file and truncate it: it holds the pages as they were before they were
    zeroed. SQLite does not wait for another connection that does the same, whatever its timeout, so that is done
    here; False when `seconds` were not enough."""
    deadline = monotonic() + seconds
    while db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        if monotonic() > deadline:
            return False
        sleep(_PAUSE_S)
    return True
