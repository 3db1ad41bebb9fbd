"""The durable truth: vectors and payloads of any number of collections in one SQLite file.

What a call has returned from is on the disk, and what it has deleted or replaced is gone from the file and from
its write-ahead log. One call is one transaction. Nothing a person wrote may lie in a B-tree page (`index.body` says
why), so ids are looked up by digest.

It must never answer a search: it knows owners and places, not what they mean.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from threading import RLock
from typing import Any

from inferscale_memory.errors import StoreError
from inferscale_memory.index.body import Layout
from inferscale_memory.index.records import Floats, OwnerChange, Payload, Row, from_json, to_json
from inferscale_memory.index.scope import owner_of, trimmed
from inferscale_memory.sqlite import empty_log, patience, transaction, use_log

log = logging.getLogger(__name__)

_FORMAT = 1
_APPLICATION = 0x1F5CA1E  # PRAGMA application_id: whose file this is
_PATIENCE = 30.0
"""Seconds to wait for another process to end its transaction."""
_SCRUB_PATIENCE = 5.0
"""Seconds to wait for another process to end its reading."""
_SHIFT = 32
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

Changes = dict[int, OwnerChange]
"""What a transaction did, by number of owner."""


class FactFile:
    """One collection of one file. Any number of threads may call it; other processes may hold the same file.

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
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._connect()
            self._create()
            self._reader = self._connect()
        except sqlite3.Error as error:
            raise StoreError(
                f"{path} cannot be opened as a fact store ({error}): pass another path, or move that file away"
            ) from error
        self._reader.execute("PRAGMA query_only = ON")
        self._layout = Layout(int(self._db.execute("PRAGMA page_size").fetchone()[0]))
        self._asked = dims
        self._dims: int | None = None
        with self._change() as db:
            self._dims = self._settle(db, dims)
        self._scrub()  # what a process that was killed has left in the log

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        with self._lock, self._reading:
            self._reader.close()
            self._db.close()

    # -- writing ---------------------------------------------------------------------------------------------

    def put(self, ids: Sequence[str], vectors: Floats, payloads: Sequence[Mapping[str, Any]]) -> Changes:
        """Write facts, each in the place of what had its id before. Vectors are `[facts, dims]`."""
        with self._change() as db:
            work = _Work(db, self.collection)
            dims = self._settle(db, vectors.shape[1])
            for id, vector, payload in zip(ids, vectors, payloads, strict=True):
                self._put(work, id, vector, payload)
            changes = work.finish()
        self._dims = dims
        self._scrub(work.replaced)
        return changes

    def update(self, id: str, vector: Floats | None, payload: Mapping[str, Any] | None) -> Changes:
        """Give a fact another vector, another payload, or both.

        Raises:
            StoreError: there is no such fact. A fact that was deleted meanwhile does not come back.
        """
        with self._change() as db:
            row = db.execute("SELECT body FROM facts WHERE key = ?", (self._key("fact", id),)).fetchone()
            if row is None:
                raise StoreError(f"there is no fact {id!r} to update: insert it")
            work = _Work(db, self.collection)
            held, _, old = self._layout.unpack(row[0])
            self._put(work, id, held if vector is None else vector, old if payload is None else payload)
            changes = work.finish()
        self._scrub()
        return changes

    def delete(self, ids: Sequence[str]) -> Changes:
        """Delete facts; ids that are unknown are gone already. Their bytes are gone when this returns."""
        with self._change() as db:
            work = _Work(db, self.collection)
            for id in ids:
                row = db.execute("SELECT place FROM facts WHERE key = ?", (self._key("fact", id),)).fetchone()
                if row is not None:
                    work.drop(row[0])
            changes = work.finish()
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
            db.execute("DELETE FROM collections WHERE name = ?", (self.collection,))
        self._dims = self._asked
        self._scrub()

    def _put(self, work: _Work, id: str, vector: Floats, payload: Mapping[str, Any]) -> None:
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
        with self._reading:
            return int(self._reader.execute("PRAGMA data_version").fetchone()[0])

    def changes(self, owner: int) -> int | None:
        """The owner's counter; None where it has no facts."""
        rows = self._read("SELECT changes FROM owners WHERE number = ?", owner)
        return None if not rows else int(rows[0][0])

    def load(self, owner: int) -> tuple[int, list[int], Floats, list[tuple[str, Payload]]] | None:
        """An owner's facts in the order of their places: its counter, places, vectors `[facts, dims]`, ids
        and payloads. None where it has none."""
        with self._snapshot() as db:
            found = db.execute("SELECT changes FROM owners WHERE number = ?", (owner,)).fetchone()
            if found is None:
                return None
            rows = db.execute(
                "SELECT place, body FROM facts WHERE place BETWEEN ? AND ? ORDER BY place", _range(owner)
            ).fetchall()
        matrix, words = self._layout.unpack_all([body for _, body in rows])
        return int(found[0]), [place for place, _ in rows], matrix, words

    def get(self, id: str) -> Payload | None:
        """A fact's payload."""
        rows = self._read("SELECT body FROM facts WHERE key = ?", self._key("fact", id))
        return self._layout.unpack(rows[0][0])[2] if rows else None

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
                query = f"SELECT DISTINCT place >> {_SHIFT} FROM facts WHERE {name} = ?"
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
        return int(
            self._read("SELECT coalesce(sum(facts), 0) FROM owners WHERE collection = ?", self.collection)[0][
                0
            ]
        )

    def collections(self) -> list[str]:
        """The names of all collections in the file."""
        return [row[0] for row in self._read("SELECT name FROM collections ORDER BY name")]

    # -- inside ----------------------------------------------------------------------------------------------

    def _key(self, kind: str, value: str) -> bytes:
        text = f"{self.collection}\0{kind}\0{value}".encode("utf-8", "surrogatepass")
        return blake2b(text, digest_size=16).digest()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            use_log(db, _PATIENCE)
        except sqlite3.Error:
            db.close()
            raise
        for pragma in (
            "synchronous = FULL",
            "secure_delete = ON",
            "temp_store = MEMORY",
        ):
            db.execute(f"PRAGMA {pragma}")
        return db

    def _create(self) -> None:
        with self._change() as db:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            owner = db.execute("PRAGMA application_id").fetchone()[0]
            empty = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if empty and (found, owner) == (0, 0):
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {_APPLICATION}")
                db.execute(f"PRAGMA user_version = {_FORMAT}")
            elif (found, owner) != (_FORMAT, _APPLICATION):
                raise sqlite3.DatabaseError(f"it is not a fact store of format {_FORMAT}")

    def _settle(self, db: sqlite3.Connection, dims: int | None) -> int | None:
        """The length of the collection's vectors. The collection is made once that is known."""
        row = db.execute("SELECT dims FROM collections WHERE name = ?", (self.collection,)).fetchone()
        if row is None:
            if dims is not None:
                db.execute("INSERT INTO collections (name, dims) VALUES (?, ?)", (self.collection, dims))
            return dims
        if dims is not None and row[0] != dims:
            raise StoreError(
                f"the collection {self.collection!r} in {self.path} holds vectors of {row[0]} numbers, not {dims}: "
                "use the embedder it was written with, or another collection_name"
            )
        return int(row[0])

    def _read(self, query: str, *values: Any) -> list[Any]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    @contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        with self._reading:
            self._reader.execute("BEGIN")
            try:
                yield self._reader
            finally:
                self._reader.execute("COMMIT")

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._lock, transaction(self._db):
            yield self._db

    def _scrub(self, needed: bool = True) -> None:
        """Empty the write-ahead log: it holds the pages as they were before they were zeroed."""
        with self._lock:
            if not needed and not self._unscrubbed:
                return
            with patience(self._db, _SCRUB_PATIENCE):
                self._unscrubbed = not empty_log(self._db, _SCRUB_PATIENCE)
        if self._unscrubbed:
            log.warning(
                "%s is being read by somebody who does not end: what was just deleted stays in its "
                "write-ahead log until the next change",
                self.path,
            )


class _Work:
    """One transaction's changes, collected per owner."""

    def __init__(self, db: sqlite3.Connection, collection: str) -> None:
        self._db = db
        self._collection = collection
        self._changes: Changes = {}
        self._facts: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self.replaced = False

    def put(
        self,
        owner_key: bytes,
        key: bytes,
        scope: Sequence[bytes | None],
        body: bytes,
        fact: tuple[str, Floats, Payload],
    ) -> None:
        owner = self._owner(owner_key)
        found = self._db.execute("SELECT place FROM facts WHERE key = ?", (key,)).fetchone()
        if found is not None and found[0] >> _SHIFT == owner:
            place = found[0]
            self.replaced = True
            self._db.execute(
                "UPDATE facts SET agent = ?, run = ?, body = ? WHERE place = ?", (*scope, body, place)
            )
        else:
            if found is not None:
                self.drop(found[0])
            place = (owner << _SHIFT) + self._next[owner]
            self._next[owner] += 1
            self._facts[owner] += 1
            self._db.execute(
                "INSERT INTO facts (place, key, agent, run, body) VALUES (?, ?, ?, ?, ?)",
                (place, key, *scope, body),
            )
        id, vector, payload = fact
        self._changes[owner].put[place] = Row(place, id, vector, payload)

    def drop(self, place: int) -> None:
        owner = place >> _SHIFT
        self._touch(owner)
        self.replaced = True
        self._db.execute("DELETE FROM facts WHERE place = ?", (place,))
        self._facts[owner] -= 1
        self._changes[owner].put.pop(place, None)
        self._changes[owner].dropped.add(place)

    def finish(self) -> Changes:
        for owner, change in self._changes.items():
            if self._facts[owner] == 0:
                change.after = None
                self._db.execute("DELETE FROM owners WHERE number = ?", (owner,))
            else:
                self._db.execute(
                    "UPDATE owners SET changes = ?, facts = ?, next = ? WHERE number = ?",
                    (change.after, self._facts[owner], self._next[owner], owner),
                )
        return self._changes

    def _owner(self, key: bytes) -> int:
        row = self._db.execute("SELECT number FROM owners WHERE key = ?", (key,)).fetchone()
        if row is None:
            row = self._db.execute(
                "INSERT INTO owners (collection, key, changes, facts, next) VALUES (?, ?, 0, 0, 0)"
                " RETURNING number",
                (self._collection, key),
            ).fetchone()
        self._touch(row[0])
        return int(row[0])

    def _touch(self, owner: int) -> None:
        if owner not in self._changes:
            changes, self._facts[owner], self._next[owner] = self._db.execute(
                "SELECT changes, facts, next FROM owners WHERE number = ?", (owner,)
            ).fetchone()
            self._changes[owner] = OwnerChange(changes, changes + 1, {}, set())


def _range(owner: int) -> tuple[int, int]:
    return owner << _SHIFT, ((owner + 1) << _SHIFT) - 1
