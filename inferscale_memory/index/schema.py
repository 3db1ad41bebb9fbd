"""What the file of facts is made of, and how it is opened: to be written, or where that cannot be, to be read."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from inferscale_memory.errors import StoreError
from inferscale_memory.storage.sqlite import (
    has_no_room,
    is_full,
    is_writable,
    open_to_read,
    transaction,
    trouble,
    use_log,
)

FORMAT = 2
"""The first has no names of embedders, and no checksums in its bodies."""
SHIFT = 32
"""Bits of a place that are a number within the owner."""
_APPLICATION = 0x1F5CA1E  # PRAGMA application_id: whose file this is
_PATIENCE = 30.0
"""Seconds to wait for another process to end its transaction."""
_SCHEMA = """
CREATE TABLE collections (
    name TEXT PRIMARY KEY,
    dims INTEGER NOT NULL
) STRICT;

CREATE TABLE owners (
    number     INTEGER PRIMARY KEY AUTOINCREMENT,
    collection TEXT NOT NULL,
    key        BLOB NOT NULL UNIQUE,
    changes    INTEGER NOT NULL,
    facts      INTEGER NOT NULL,
    next       INTEGER NOT NULL
) STRICT;
CREATE INDEX owners_by_collection ON owners (collection);

CREATE TABLE facts (
    place INTEGER PRIMARY KEY,
    key   BLOB NOT NULL UNIQUE,
    agent BLOB,
    run   BLOB,
    body  BLOB NOT NULL
) STRICT;
CREATE INDEX facts_by_agent ON facts (agent) WHERE agent IS NOT NULL;
CREATE INDEX facts_by_run ON facts (run) WHERE run IS NOT NULL
"""
_SECOND = """
ALTER TABLE collections ADD COLUMN model TEXT;

CREATE TABLE reembedding (
    collection TEXT PRIMARY KEY,
    model      TEXT NOT NULL,
    dims       INTEGER NOT NULL,
    place      INTEGER NOT NULL
) STRICT
"""
STATEMENTS = [*_SCHEMA.split(";\n"), *_SECOND.split(";\n")]
"""What makes an empty file one of facts."""


@dataclass(slots=True)
class Opened:
    """The connections to a file.

    Attributes:
        writer: None where the file can only be read.
        why: what keeps it from being written.
    """

    reader: sqlite3.Connection
    writer: sqlite3.Connection | None
    why: str = ""
    folder: TemporaryDirectory[str] | None = None

    def close(self) -> None:
        self.reader.close()
        if self.writer is not None:
            self.writer.close()
        if self.folder is not None:
            self.folder.cleanup()


def opened(path: Path) -> Opened:
    """Open the file, which is made where there is none.

    Raises:
        StoreError: it is not one of ours, is damaged, or can neither be read nor made.
    """
    if not is_writable(path):
        return _to_read(path, f"{path} cannot be written")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = _connect(path)
        try:
            _bring_up(writer)
            reader = _connect(path)
            reader.execute("PRAGMA query_only = ON")
        except BaseException:
            writer.close()
            raise
        return Opened(reader, writer)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be made ({error.strerror}): pass another folder, or set INFERSCALE_HOME"
        ) from error
    except sqlite3.Error as error:
        if path.exists() and (is_full(error) or has_no_room(path)):
            with suppress(StoreError):
                return _to_read(path, f"the disk of {path} is full")
            raise trouble(path, error) from error
        raise StoreError(
            f"{path} cannot be opened as a fact store ({error}): pass another path, or move that file away"
        ) from error


def _to_read(path: Path, why: str) -> Opened:
    if not path.exists():
        raise StoreError(
            f"{path} cannot be made, its folder is not writable: pass another folder, or set INFERSCALE_HOME"
        )
    try:
        reader, folder = open_to_read(path)
        found = Opened(reader, None, why, folder)
        if not _is_ours(reader):
            found.close()
            raise StoreError(f"{path} cannot be opened as a fact store: it is not one. Pass another path")
        return found
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"{why}, nor opened to be read ({error}): pass another folder") from error


def _is_ours(db: sqlite3.Connection) -> bool:
    found = db.execute("PRAGMA user_version").fetchone()[0]
    owner = db.execute("PRAGMA application_id").fetchone()[0]
    return bool(owner == _APPLICATION and 1 <= found <= FORMAT)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        use_log(db, _PATIENCE)
        for pragma in ("synchronous = FULL", "secure_delete = ON", "temp_store = MEMORY"):
            db.execute(f"PRAGMA {pragma}")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _bring_up(db: sqlite3.Connection) -> None:
    with transaction(db):
        found = db.execute("PRAGMA user_version").fetchone()[0]
        owner = db.execute("PRAGMA application_id").fetchone()[0]
        if (found, owner) == (0, 0) and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in STATEMENTS:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION}")
        elif not _is_ours(db):
            raise sqlite3.DatabaseError(f"it is not a fact store of format {FORMAT} or earlier")
        elif found == 1:
            for statement in _SECOND.split(";\n"):
                db.execute(statement)
        if found < FORMAT:
            db.execute(f"PRAGMA user_version = {FORMAT}")
