"""What an engine could not be told to forget, until it is told.

Only digests, no words of anybody's. It must never outlive the engine: what an engine of a process held is gone with
that process.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Owed:
    """One call of an engine's `forget` that is still to be made, with its arguments."""

    owner: str
    keys: tuple[str, ...]
    tags: tuple[str, ...]


class OwedForgetting:
    """What is owed according to one journal.

    Args:
        change, read: the journal's own, which see to locks and transactions.
    """

    def __init__(
        self,
        change: Callable[[], AbstractContextManager[sqlite3.Connection]],
        read: Callable[..., list[Any]],
    ) -> None:
        self._change = change
        self._read = read

    def owe(self, what: Sequence[Owed]) -> None:
        """These calls have failed."""
        with self._change() as db:
            db.executemany(
                "INSERT INTO owed (owner, keys, tags) VALUES (?, ?, ?)",
                [(call.owner, json.dumps(call.keys), json.dumps(call.tags)) for call in what],
            )

    def all(self) -> dict[int, Owed]:
        """By number, oldest first."""
        rows = self._read("SELECT number, owner, keys, tags FROM owed ORDER BY number")
        return {
            number: Owed(owner, tuple(json.loads(keys)), tuple(json.loads(tags)))
            for number, owner, keys, tags in rows
        }

    def count(self) -> int:
        return int(self._read("SELECT count(*) FROM owed")[0][0])

    def settle(self, numbers: Collection[int]) -> None:
        """These have been made, or there is nobody left to make them to."""
        if numbers:
            with self._change() as db:
                db.executemany("DELETE FROM owed WHERE number = ?", [(number,) for number in numbers])
