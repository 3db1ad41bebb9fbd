"""What the engine has yet to be told to forget.

The rows hold digests and no text. They are of no use once the engine is gone: an engine that lives in a process loses
its blobs with that process.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inferscale_memory.journal.database import Database


@dataclass(frozen=True, slots=True)
class PendingForget:
    """A call of an engine's `forget` that is still to be made, with its arguments."""

    owner: str
    keys: tuple[str, ...]
    tags: tuple[str, ...]


class PendingForgets:
    """The pending calls of one journal."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, calls: Sequence[PendingForget]) -> None:
        """Keep calls that failed."""
        with self._database.change() as db:
            db.executemany(
                "INSERT INTO owed (owner, keys, tags) VALUES (?, ?, ?)",
                [(call.owner, json.dumps(call.keys), json.dumps(call.tags)) for call in calls],
            )

    def all(self) -> dict[int, PendingForget]:
        """By number, oldest first."""
        rows = self._database.read("SELECT number, owner, keys, tags FROM owed ORDER BY number")
        return {
            number: PendingForget(owner, tuple(json.loads(keys)), tuple(json.loads(tags)))
            for number, owner, keys, tags in rows
        }

    def count(self) -> int:
        return int(self._database.read("SELECT count(*) FROM owed")[0][0])

    def remove(self, numbers: Collection[int]) -> None:
        """Remove calls that were made, or whose engine is gone."""
        if numbers:
            with self._database.change() as db:
                db.executemany("DELETE FROM owed WHERE number = ?", [(number,) for number in numbers])
