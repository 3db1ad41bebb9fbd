"""The durable truth: vectors and payloads of any number of collections in one SQLite file.

What a call has returned from is on the disk, and what it has deleted or replaced is gone from the file and from
its write-ahead log. One call is one transaction. Nothing a person wrote may lie in a B-tree page (`index.body` says
why), so ids are looked up by digest. A damaged row is left out and named; all others are served.

It must never answer a search: it knows owners and places, not what they mean.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import numpy as np

from inferscale_memory.errors import StoreError
from inferscale_memory.index.body import DamagedBodyError, Layout
from inferscale_memory.index.embedder import Embedded
from inferscale_memory.index.records import Floats, Payload, from_json, to_json
from inferscale_memory.index.salvage import made_anew, rows_between
from inferscale_memory.index.schema import SHIFT, STATEMENTS, Opened, opened
from inferscale_memory.index.scope import owner_of, trimmed
from inferscale_memory.index.work import Changes, Work
from inferscale_memory.lifetime import closed_over_fork
from inferscale_memory.storage.sqlite import (
    empty_log,
    is_damage,
    is_full,
    patience,
    transaction,
    trouble,
)

log = logging.getLogger(__name__)

_SCRUB_PATIENCE = 5.0
"""Seconds to wait for another process to end its reading."""
_T = TypeVar("_T")


class FactFile:
    """One collection of one file. Any number of threads may call it; other processes may hold the same file.

    Attributes:
        read_only: why the file cannot be written; empty where it can.

    Invariants:
        - The places of an owner's facts lie in one range, and no place is used twice.
        - An owner's `changes` grows with every transaction that touches its facts; an owner without facts has
          no row, and one that comes back has another number.
    """

    def __init__(self, path: Path, collection: str, dims: int | None) -> None:
        """Open `path`, creating it and its folder. `dims` None takes what the collection has, or what the
        first vector brings.

        Raises:
            StoreError: the file is not one of ours, or the collection holds vectors of another length.
        """
        self.path = path
        self.collection = collection
        self._lock = RLock()
        self._reading = RLock()
        self._unscrubbed = False
        self._made_anew = False
        self._said: set[int] = set()
        self._opening = RLock()
        self._closed = False
        self._open: Opened | None = opened(path)
        self.read_only = self._files.why
        self._layout = Layout(int(self._reader.execute("PRAGMA page_size").fetchone()[0]))
        self.embedded = Embedded(path, collection)
        self._model: str | None = None
        self._asked = dims
        self._dims: int | None = None
        try:
            if self.read_only:
                self._dims = self.embedded.settled(self._reader, dims, write=False)
            else:
                self._dims = self._mended(self._settle)
                self._scrub()  # what a process that was killed has left in the log
        except BaseException:
            self._files.close()
            raise
        closed_over_fork(self)

    def claim(self, model: str) -> None:
        """The vectors are `model`'s: those that are there, and those that are written from now on.

        Raises:
            StoreError: those that are there are another model's.
        """

        def note() -> None:
            if self.read_only:
                with self._snapshot() as db:
                    self.embedded.claim(db, model, write=False)
            else:
                with self._change() as db:
                    self.embedded.claim(db, model)

        self._mended(note)
        self._model = model

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        with self._lock, self._reading:
            self._closed = True
            self._files.close()

    @property
    def _files(self) -> Opened:
        """The file, opened again where it was closed for a fork."""
        with self._opening:
            if self._open is None:
                self._open = opened(self.path)
            return self._open

    @property
    def _reader(self) -> sqlite3.Connection:
        return self._files.reader

    def before_fork(self) -> None:
        for lock in (self._lock, self._reading, self._opening):
            lock.acquire()
        if self._open is not None and not self._closed and not self.read_only:
            self._open.close()
            self._open = None

    def after_fork(self) -> None:
        for lock in (self._opening, self._reading, self._lock):
            lock.release()

    # -- writing ---------------------------------------------------------------------------------------------

    def put(self, ids: Sequence[str], vectors: Floats, payloads: Sequence[Mapping[str, Any]]) -> Changes:
        """Write facts, each in the place of what had its id before. Vectors are `[facts, dims]`."""

        def write() -> tuple[Work, int | None, Changes]:
            with self._change() as db:
                work = Work(db, self.collection)
                dims = self.embedded.settled(db, vectors.shape[1], fixed=self._asked is not None)
                if self._model is not None:
                    self.embedded.claim(db, self._model)
                for id, vector, payload in zip(ids, vectors, payloads, strict=True):
                    self._put(work, id, vector, payload)
                return work, dims, work.finish()

        work, self._dims, changes = self._mended(write)
        self._scrub(work.replaced)
        return changes

    def update(self, id: str, vector: Floats | None, payload: Mapping[str, Any] | None) -> Changes:
        """Give a fact another vector, another payload, or both.

        Raises:
            StoreError: there is no such fact. A fact that was deleted meanwhile does not come back.
        """

        def write() -> Changes:
            with self._change() as db:
                row = db.execute("SELECT body FROM facts WHERE key = ?", (self._key("fact", id),)).fetchone()
                if row is None:
                    raise StoreError(f"there is no fact {id!r} to update: insert it")
                work = Work(db, self.collection)
                new, words = vector, payload
                if new is None or words is None:
                    try:
                        held, _, old = self._layout.unpack(row[0])
                    except DamagedBodyError as error:
                        raise StoreError(
                            f"the fact {id!r} in {self.path} is damaged: delete it, and add it anew"
                        ) from error
                    new, words = held if new is None else new, old if words is None else words
                self._put(work, id, new, words)
                return work.finish()

        changes = self._mended(write)
        self._scrub()
        return changes

    def delete(self, ids: Sequence[str]) -> Changes:
        """Delete facts; ids that are unknown are gone already. Their bytes are gone when this returns. On a full disk
        they are deleted in parts, as far as that goes: the log of one needs less room than that of many."""
        try:
            return self._delete(ids)
        except StoreError as error:
            if len(ids) < 2 or not is_full(error):
                raise
        half = len(ids) // 2
        changes = self.delete(ids[:half])
        for owner, change in self.delete(ids[half:]).items():
            if owner in changes:
                change.before = changes[owner].before
                change.dropped |= changes[owner].dropped
            changes[owner] = change
        return changes

    def _delete(self, ids: Sequence[str]) -> Changes:
        def write() -> tuple[Work, Changes]:
            with self._change() as db:
                work = Work(db, self.collection)
                for id in ids:
                    row = db.execute(
                        "SELECT place FROM facts WHERE key = ?", (self._key("fact", id),)
                    ).fetchone()
                    if row is not None:
                        work.drop(row[0])
                return work, work.finish()

        work, changes = self._mended(write)
        self._scrub(work.replaced)
        return changes

    def clear(self) -> None:
        """Delete the collection with all its facts. Writing to it makes it again."""
        with self._change() as db:
            owners = db.execute(
                "SELECT number FROM owners WHERE collection = ?", (self.collection,)
            ).fetchall()
            for (owner,) in owners:
                db.execute("DELETE FROM facts WHERE place BETWEEN ? AND ?", _range(owner))
            db.execute("DELETE FROM owners WHERE collection = ?", (self.collection,))
            self.embedded.clear(db)
        self._dims = self._asked
        self._scrub()

    def _put(self, work: Work, id: str, vector: Floats, payload: Mapping[str, Any]) -> None:
        words = to_json(id, payload)
        body = self._layout.pack(vector, words)
        payload = from_json(words)[1]
        keys = [
            self._key(name, value) if (value := trimmed(f"{name}_id", payload)) else None
            for name in ("agent", "run")
        ]
        work.put(
            self._key("owner", owner_of(payload)), self._key("fact", id), keys, body, (id, vector, payload)
        )

    # -- reading ---------------------------------------------------------------------------------------------

    def version(self) -> int:
        """Another number than before when anybody else, in this process or another, may have written."""
        return int(self._read("PRAGMA data_version")[0][0])

    def changes(self, owner: int) -> int | None:
        """The owner's counter; None where it has no facts."""
        rows = self._read("SELECT changes FROM owners WHERE number = ?", owner)
        return None if not rows else int(rows[0][0])

    def load(self, owner: int) -> tuple[int, list[int], Floats, list[tuple[str, Payload]]] | None:
        """An owner's facts in the order of their places: its counter, places, vectors `[facts, dims]`, ids
        and payloads. None where it has none. Those that are damaged are left out."""
        return self._mended(lambda: self._load(owner))

    def _load(self, owner: int) -> tuple[int, list[int], Floats, list[tuple[str, Payload]]] | None:
        with self._snapshot() as db:
            found = db.execute("SELECT changes FROM owners WHERE number = ?", (owner,)).fetchone()
            if found is None:
                return None
            rows, lost = rows_between(db, *_range(owner))
            dims = self.embedded.dims(db)
        places: list[int] = []
        vectors: list[Floats] = []
        words: list[tuple[str, Payload]] = []
        for place, body in rows:
            try:
                vector, id, payload = self._layout.unpack(body)
            except DamagedBodyError:
                lost.append(place)
                continue
            if len(vector) != (dims or len(vector)):
                lost.append(place)
                continue
            places.append(place)
            vectors.append(vector)
            words.append((id, payload))
        self._name_damaged(lost)
        matrix = np.stack(vectors) if vectors else np.empty((0, dims or 1), np.float32)
        return int(found[0]), places, matrix, words

    def get(self, id: str) -> Payload | None:
        """A fact's payload; None where it is damaged."""
        rows = self._read("SELECT place, body FROM facts WHERE key = ?", self._key("fact", id))
        if not rows:
            return None
        try:
            return self._layout.unpack(rows[0][1])[2]
        except DamagedBodyError:
            self._name_damaged([rows[0][0]])
            return None

    def holds(self, ids: Sequence[str]) -> list[bool]:
        """Which of these facts have a row, be it damaged."""
        query = "SELECT 1 FROM facts WHERE key = ?"
        return [bool(self._read(query, self._key("fact", id))) for id in ids]

    def owners(self, pinned: tuple[str, list[str]] | None) -> list[int]:
        """The numbers of the owners whose facts can carry one of the values of an id; with None, all."""
        if pinned is None:
            rows = self._read(
                "SELECT number FROM owners WHERE collection = ? ORDER BY number", self.collection
            )
        else:
            name, values = pinned[0].removesuffix("_id"), pinned[1]
            if name == "user":
                query, keys = "SELECT number FROM owners WHERE key = ?", [f"user:{value}" for value in values]
                rows = [row for key in keys for row in self._read(query, self._key("owner", key))]
            else:
                query = f"SELECT DISTINCT place >> {SHIFT} FROM facts WHERE {name} = ?"
                rows = [row for value in values for row in self._read(query, self._key(name, value))]
        return sorted({int(row[0]) for row in rows})

    @property
    def dims(self) -> int | None:
        """The length of the collection's vectors; None while that is open."""
        if self._dims is None:
            rows = self._read("SELECT dims FROM collections WHERE name = ?", self.collection)
            self._dims = int(rows[0][0]) if rows else None
        return self._dims

    def count(self) -> int:
        """How many facts the collection holds."""
        query = "SELECT coalesce(sum(facts), 0) FROM owners WHERE collection = ?"
        return int(self._read(query, self.collection)[0][0])

    def collections(self) -> list[str]:
        """The names of all collections in the file."""
        return [row[0] for row in self._read("SELECT name FROM collections ORDER BY name")]

    # -- inside ----------------------------------------------------------------------------------------------

    def _settle(self) -> int | None:
        with self._change() as db:
            return self.embedded.settled(db, self._asked)

    def _key(self, kind: str, value: str) -> bytes:
        text = f"{self.collection}\0{kind}\0{value}".encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=16).digest()

    def _read(self, query: str, *values: Any) -> list[Any]:
        def read() -> list[Any]:
            with self._told(), self._reading:
                return self._reader.execute(query, values).fetchall()

        return self._mended(read)

    @contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        with self._told(), self._reading:
            self._reader.execute("BEGIN")
            try:
                yield self._reader
            finally:
                with suppress(sqlite3.Error):  # after a damaged page SQLite says so once more here
                    self._reader.execute("ROLLBACK")

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        if self.read_only:
            raise StoreError(
                f"nothing can be stored or deleted: {self.read_only}. Free room or make it writable, then open the "
                "memory again, or pass another folder"
            )
        with self._told(), self._lock:
            writer = self._files.writer
            assert writer is not None, "a file that is not read only has one"
            with transaction(writer):
                yield writer

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of SQLite's as ours."""
        try:
            yield
        except sqlite3.ProgrammingError:  # it is closed
            raise
        except sqlite3.Error as error:
            raise trouble(self.path, error) from error

    def _mended(self, work: Callable[[], _T]) -> _T:
        """What `work` gives. Where a page that everything is found by is damaged, the file is made anew first."""
        try:
            return work()
        except StoreError as error:
            if not is_damage(error.__cause__ or error) or not self._make_anew():
                raise
        return work()

    def _make_anew(self) -> bool:
        """Write the file anew from the rows that can be read, once; whether that was done."""
        with self._lock, self._reading:
            writer = self._files.writer
            if self._made_anew or writer is None:
                return False
            self._made_anew = True
            try:
                lost = made_anew(writer, STATEMENTS, SHIFT, self._owner_of)
            except sqlite3.Error:
                return False
        log.warning(
            "%s was damaged, and has been made anew from the facts in it that can be read; %d could not be: put a "
            "backup of the file in its place, or add them again",
            self.path,
            lost,
        )
        return True

    def _owner_of(self, key: bytes, body: bytes) -> tuple[str, bytes] | None:
        """Collection and owner's key of a fact, where it is of this collection and can be read."""
        try:
            _, id, payload = self._layout.unpack(body)
        except DamagedBodyError:
            return None
        if self._key("fact", id) != key:
            return None
        return self.collection, self._key("owner", owner_of(payload))

    def _name_damaged(self, places: Sequence[int]) -> None:
        new = sorted(set(places) - self._said)
        if new:
            self._said.update(new)
            log.warning(
                "%d facts in %s are damaged and left out, all others are served (rows %s): put a backup of the file in "
                "its place, or add them again",
                len(new),
                self.path,
                ", ".join(map(str, new[:10])) + (", ..." if len(new) > 10 else ""),
            )

    def _scrub(self, needed: bool = True) -> None:
        """Empty the write-ahead log: it holds the pages as they were before they were zeroed."""
        with self._lock:
            writer = self._files.writer
            if writer is None or (not needed and not self._unscrubbed):
                return
            with self._told(), patience(writer, _SCRUB_PATIENCE):
                self._unscrubbed = not empty_log(writer, _SCRUB_PATIENCE)
        if self._unscrubbed:
            log.warning(
                "%s is being read by somebody who does not end: what was just deleted stays in its "
                "write-ahead log until the next change",
                self.path,
            )


def _range(owner: int) -> tuple[int, int]:
    return owner << SHIFT, ((owner + 1) << SHIFT) - 1
