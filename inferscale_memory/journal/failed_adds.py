"""Calls to `add` whose extraction failed: which turns they were about, and with which options.

The turns in the log are the truth; here are only their numbers. It must never keep words of its own: where the last
turn of a call is forgotten, the call is forgotten with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from inferscale_memory.journal.database import Database
from inferscale_memory.journal.records import Turn
from inferscale_memory.journal.words import packed

# The calls themselves are in a table of the journal's own.
_SCHEMA = (
    "CREATE INDEX IF NOT EXISTS failed_adds_by_scope ON failed_adds (scope)",
    """
    CREATE TABLE IF NOT EXISTS failed_turns (
        number INTEGER NOT NULL REFERENCES failed_adds (number) ON DELETE CASCADE,
        turn   INTEGER NOT NULL REFERENCES turns (number) ON DELETE CASCADE,
        PRIMARY KEY (number, turn)
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS failed_turns_by_turn ON failed_turns (turn)",
    # Whoever takes the words out of a turn need not know of this table.
    """
    CREATE TRIGGER IF NOT EXISTS failed_turn_forgotten AFTER UPDATE OF words ON turns WHEN new.words IS NULL
    BEGIN DELETE FROM failed_turns WHERE turn = new.number; END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS failed_add_forgotten AFTER DELETE ON failed_turns
    WHEN NOT EXISTS (SELECT 1 FROM failed_turns WHERE number = old.number)
    BEGIN DELETE FROM failed_adds WHERE number = old.number; END
    """,
)
_COLUMNS = "number, ids, options, error, attempts, failed_at"
_SAID = "(SELECT min(turn) FROM failed_turns WHERE failed_turns.number = failed_adds.number), number"
"""When a call was said: what was split off from one came later, and stands behind its first half."""


@dataclass(frozen=True, slots=True)
class FailedAdd:
    """A call to `add` that is to be made again.

    Attributes:
        number: its name in this journal.
        ids: whose words these were: user_id, agent_id, run_id, as far as given.
        turns: numbers of the turns it was about that are not forgotten.
        options: the call's other arguments, as far as JSON can say them.
        error: why it failed the last time.
        attempts: how often it was made.
        failed_at: when it failed the last time.
    """

    number: int
    ids: Mapping[str, str]
    turns: tuple[int, ...]
    options: Mapping[str, Any]
    error: str
    attempts: int
    failed_at: datetime


class FailedAdds:
    """The failed calls of one journal."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = Lock()
        self._claimed: set[int] = set()
        with database.change() as db:
            for statement in _SCHEMA:
                db.execute(statement)

    def keep(
        self,
        scope: str,
        turns: Sequence[Turn],
        ids: Mapping[str, str],
        options: Mapping[str, Any],
        error: str,
    ) -> None:
        """A call has failed. One about the same turns is the same call; one about no turns is not kept, as there
        is nothing it could be made with again."""
        known = self._about(turns)
        with self._database.change() as db:
            if known is not None:
                db.execute(
                    "UPDATE failed_adds SET error = ?, attempts = attempts + 1, failed_at = ? WHERE number = ?",
                    (error, _now(), known),
                )
            elif turns:
                number = db.execute(
                    "INSERT INTO failed_adds (scope, ids, words, error, attempts, failed_at)"
                    " VALUES (?, ?, ?, ?, 1, ?)",
                    (
                        scope,
                        json.dumps(dict(ids)),
                        packed(json.dumps(dict(options), default=str, skipkeys=True)),
                        error,
                        _now(),
                    ),
                ).lastrowid
                db.executemany(
                    "INSERT INTO failed_turns (number, turn) VALUES (?, ?)",
                    [(number, turn.number) for turn in turns],
                )

    def split(self, first: Turn, second: Turn) -> list[int]:
        """Make two calls out of one, which begin with the turns `first` and `second`: their numbers, in order. Empty
        where there is no call about `first`."""
        known = self._about([first])
        if known is None:
            return []
        with self._database.change() as db:
            other = db.execute(
                "INSERT INTO failed_adds (scope, ids, words, error, attempts, failed_at)"
                " SELECT scope, ids, words, error, attempts, failed_at FROM failed_adds WHERE number = ?",
                (known,),
            ).lastrowid
            db.execute(
                "UPDATE failed_turns SET number = ? WHERE number = ? AND turn >= ?",
                (other, known, second.number),
            )
        return [known, int(other or 0)]

    def settle(self, turns: Sequence[Turn]) -> None:
        """A call about these turns went well."""
        known = self._about(turns)
        if known is not None:
            with self._database.change() as db:
                db.execute("DELETE FROM failed_adds WHERE number = ?", (known,))

    def kept(self, turns: Sequence[Turn]) -> bool:
        """Whether a call about these turns is to be made again."""
        return self._about(turns) is not None

    def all(self) -> list[FailedAdd]:
        """Oldest first."""
        return self._rows(self._database.read(f"SELECT {_COLUMNS} FROM failed_adds ORDER BY {_SAID}"))

    def of_scope(self, scope: str) -> list[FailedAdd]:
        """Those of one scope, oldest first."""
        return self._rows(
            self._database.read(f"SELECT {_COLUMNS} FROM failed_adds WHERE scope = ? ORDER BY {_SAID}", scope)
        )

    def get(self, number: int) -> FailedAdd | None:
        """One of them; None where it is gone."""
        rows = self._database.read(f"SELECT {_COLUMNS} FROM failed_adds WHERE number = ?", number)
        return next(iter(self._rows(rows)), None)

    @contextmanager
    def claimed(self, number: int) -> Iterator[bool]:
        """Whether a call is, for the block, only the caller's to make again. Reads nothing: it never blocks."""
        with self._lock:
            mine = number not in self._claimed
            self._claimed.add(number)
        try:
            yield mine
        finally:
            if mine:
                with self._lock:
                    self._claimed.discard(number)

    def _about(self, turns: Sequence[Turn]) -> int | None:
        """The call about the first of these turns. A turn belongs to one call only."""
        if not turns:
            return None
        rows = self._database.read("SELECT number FROM failed_turns WHERE turn = ?", turns[0].number)
        return int(rows[0][0]) if rows else None

    def _rows(self, rows: Iterable[Any]) -> list[FailedAdd]:
        found = []
        for number, ids, options, error, attempts, failed_at in rows:
            turns = self._database.read(
                "SELECT turn FROM failed_turns WHERE number = ? ORDER BY turn", number
            )
            try:
                whose, how = json.loads(ids), json.loads(options)
                when = datetime.fromisoformat(failed_at)
            except ValueError:  # damaged: nobody can make it again
                continue
            found.append(
                FailedAdd(number, whose, tuple(turn for (turn,) in turns), how, error, attempts, when)
            )
        return found


def _now() -> str:
    return datetime.now(UTC).isoformat()
