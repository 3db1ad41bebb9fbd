"""What every SQLite file of a memory needs: transactions, a write-ahead log that is really emptied, opening a file that
cannot be written, and errors that say what to do."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

from inferscale_memory.errors import StoreError

_PAUSE_S = 0.002
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_MAGIC = b"SQLite format 3\0"
_FULL_BYTES = 1 << 16
"""With less room than this SQLite cannot even share its log."""


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """One transaction: all of it is durable when the block is left, or none of it happened."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        # SQLite itself ends a transaction that it cannot go on with, as on a full disk.
        if db.in_transaction:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise


# -- errors --------------------------------------------------------------------------------------------------


def code_of(error: BaseException) -> int:
    """SQLite's primary result code; 0 for an error that has none."""
    return int(getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def is_damage(error: BaseException) -> bool:
    """Whether SQLite says that the file itself is not what it wrote."""
    return code_of(error) in _DAMAGED


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it was raised from, says that the disk is full."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # a chain may be a ring
        if code_of(error) == sqlite3.SQLITE_FULL:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def has_no_room(path: Path) -> bool:
    """Whether the disk of `path` is full, as far as it says."""
    with suppress(OSError):
        return shutil.disk_usage(path.parent).free < _FULL_BYTES
    return False


def trouble(path: Path | str, error: sqlite3.Error) -> StoreError:
    """An error of SQLite's as one of ours, which names the file and the remedy."""
    code = code_of(error)
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and has_no_room(Path(path))):
        return StoreError(
            f"the disk is full: {path} cannot grow. Free some room, or delete memories, which needs none"
        )
    if code in _DAMAGED:
        return StoreError(
            f"{path} is damaged ({error}): put a backup in its place, or copy what can be read of the memory into "
            "another folder with `inferscale migrate`"
        )
    if code == sqlite3.SQLITE_READONLY:
        return StoreError(
            f"{path} cannot be written: make it and its folder writable, or pass another folder"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreError(f"{path} is kept by another process ({error}): try again when that has ended")
    return StoreError(f"{path} cannot be used ({error}): look at its folder and its disk")


# -- files that cannot be written ----------------------------------------------------------------------------


def is_writable(path: Path) -> bool:
    """Whether a file may be written, or made where there is none; SQLite keeps its log in the same folder."""
    if path.exists() and not os.access(path, os.W_OK):
        return False
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def open_to_read(path: Path) -> tuple[sqlite3.Connection, TemporaryDirectory[str] | None]:
    """A connection that only reads, to a file whose folder may not be writable; and a folder to be removed after it,
    where one was needed. Raises `sqlite3.Error` and `OSError`."""
    with suppress(sqlite3.OperationalError):
        return _reading(path, "mode=ro"), None
    log = path.with_name(f"{path.name}-wal")
    if not log.exists() or not log.stat().st_size:
        return _reading(path, "immutable=1"), None
    # What was written last lies in the log, and reading that takes a file beside it.
    folder = TemporaryDirectory(prefix="inferscale-")
    try:
        for file in (path, log):
            shutil.copyfile(file, Path(folder.name) / file.name)
        return _reading(Path(folder.name) / path.name, "mode=rw"), folder
    except BaseException:
        folder.cleanup()
        raise


def _reading(path: Path, how: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{how}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA query_only = ON")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db


def copied_into(db: sqlite3.Connection, path: Path) -> None:
    """Make `db` a copy of the file at `path`, which is only read; where there is none nothing happens. Raises
    `sqlite3.Error` and `OSError`."""
    if not path.exists():
        return
    source, folder = open_to_read(path)
    try:
        with closing(source):
            source.backup(db)
    finally:
        if folder is not None:
            folder.cleanup()


def says_sqlite(path: Path) -> bool:
    """Whether a file begins as SQLite's do: what does not may be anything."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def is_sound(path: Path) -> bool:
    """Whether every page of a file is what SQLite expects. True where there is no file, or it cannot be looked at."""
    if not path.exists() or not path.stat().st_size:
        return True
    try:
        db, folder = open_to_read(path)
    except sqlite3.Error as error:
        return not is_damage(error)
    try:
        with closing(db):
            return str(db.execute("PRAGMA quick_check(1)").fetchone()[0]) == "ok"
    except sqlite3.Error as error:
        return not is_damage(error)
    finally:
        if folder is not None:
            folder.cleanup()


# -- the log -------------------------------------------------------------------------------------------------


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
