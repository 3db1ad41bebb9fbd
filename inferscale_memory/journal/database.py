"""The journal's SQLite file: one connection, one lock and one transaction for every class that keeps rows in it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from inferscale_memory.journal.schema import in_memory as copy_of
from inferscale_memory.journal.schema import opened, repair
from inferscale_memory.lifetime import closed_over_fork
from inferscale_memory.storage.scrub import scrub
from inferscale_memory.storage.sqlite import transaction, trouble

AMONG = "IN (SELECT value FROM json_each(?))"
"""SQL for "is one of": the value bound to it is a list, as `as_list` writes it."""


class Database:
    """The open file. Any number of threads may use it; another process may have the same file open.

    Attributes:
        path: the file.
        lock: held while the connection is used; a thread that holds it may take it again.
        openings: how often the file was opened.

    Args:
        in_memory: work on a copy in memory, for a folder that cannot be written.
        checked: the caller has called `repair` on the file.

    Raises:
        sqlite3.Error: the file is not a journal.
    """

    def __init__(self, path: Path, *, in_memory: bool = False, checked: bool = False) -> None:
        self.path = path
        self.lock = RLock()
        self.openings = 1
        self._closed = False
        if not in_memory and not checked:
            repair(path)
        self._open: sqlite3.Connection | None = copy_of(path) if in_memory else opened(path)
        if not in_memory:
            closed_over_fork(self)

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection, opened again if it was closed for a fork. The caller holds `lock`."""
        if self._open is None:
            self._open = opened(self.path)
            self.openings += 1
        return self._open

    def before_fork(self) -> None:
        self.lock.acquire()
        if self._open is not None and not self._closed and not self._open.in_transaction:
            self._open.close()
            self._open = None

    def after_fork(self) -> None:
        self.lock.release()

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        with self.lock:
            self._closed = True
            self.connection.close()

    def read(self, query: str, *values: str | int) -> list[Any]:
        """All rows of a query."""
        with self._own_errors(), self.lock:
            return self.connection.execute(query, values).fetchall()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction, or a part of the one under way: when the outermost block ends, everything written in it is
        durable, or, after an exception, nothing is."""
        with self.lock:
            if self.connection.in_transaction:
                yield self.connection
                return
            with self._own_errors(), transaction(self.connection):
                yield self.connection

    def scrub(self) -> bool:
        """Remove every deleted text from the file. Deleted pages are zeroed already, so only the write-ahead log still
        holds such text. False if another connection prevented it."""
        with self._own_errors(), self.lock:
            return scrub(self.connection, (), "")

    @contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Turns an error of SQLite into a `StoreError` that names the remedy."""
        try:
            yield
        except sqlite3.ProgrammingError:  # the connection is closed
            raise
        except sqlite3.Error as error:
            raise trouble(self.path, error) from error

    def column_in_scopes(self, table: str, column: str, wanted: Callable[[str], bool]) -> list[Any]:
        """The values of a column in the rows of every scope for which `wanted` is true."""
        scopes = [row[0] for row in self.read(f"SELECT DISTINCT scope FROM {table}") if wanted(row[0])]
        rows = self.read(f"SELECT {column} FROM {table} WHERE scope {AMONG}", as_list(scopes))
        return [row[0] for row in rows]


def as_list(values: Iterable[str | int]) -> str:
    """The value to bind to `AMONG`."""
    return json.dumps(list(values))
