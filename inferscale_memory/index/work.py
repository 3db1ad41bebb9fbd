"""One transaction's changes to the facts of a file, collected per owner."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from inferscale_memory.index.records import Floats, OwnerChange, Payload, Row
from inferscale_memory.index.schema import SHIFT

Changes = dict[int, OwnerChange]
"""What a transaction did, by number of owner."""


class Work:
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
        if found is not None and found[0] >> SHIFT == owner:
            place = found[0]
            self.replaced = True
            self._db.execute(
                "UPDATE facts SET agent = ?, run = ?, body = ? WHERE place = ?", (*scope, body, place)
            )
        else:
            if found is not None:
                self.drop(found[0])
            place = (owner << SHIFT) + self._next[owner]
            self._next[owner] += 1
            self._facts[owner] += 1
            self._db.execute(
                "INSERT INTO facts (place, key, agent, run, body) VALUES (?, ?, ?, ?, ?)",
                (place, key, *scope, body),
            )
        id, vector, payload = fact
        self._changes[owner].put[place] = Row(place, id, vector, payload)

    def drop(self, place: int) -> None:
        owner = place >> SHIFT
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
