"""The turn log: what was said in each scope, in order."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from inferscale_memory.journal.database import AMONG, Database, as_list
from inferscale_memory.journal.records import NewTurn, Turn, from_iso, to_iso
from inferscale_memory.journal.retention import TRIMMED_EVERY, drop_empty, trim
from inferscale_memory.journal.said import says
from inferscale_memory.journal.words import packed

SESSION_GAP = timedelta(hours=1)
"""Turns of one scope at least this far apart belong to different sessions, unless a journal is given another gap."""

_COLUMNS = "number, ordinal, session, role, speaker, text, said_at"


class Turns:
    """The turns of one journal."""

    def __init__(self, database: Database, session_gap: timedelta = SESSION_GAP) -> None:
        self._database = database
        self._session_gap = session_gap

    def append(self, scope: str, turns: Sequence[NewTurn], *, one_session: bool = False) -> list[Turn]:
        """Log `turns` at the end of `scope`.

        With `one_session` the whole scope is one session. Otherwise a new session starts where two turns are the
        session gap or more apart, and where a dated turn follows an undated one or the reverse.
        """
        with self._database.change() as db:
            last = self._last(scope)
            if last is not None and last.ordinal % TRIMMED_EVERY + len(turns) >= TRIMMED_EVERY:
                trim(db, scope, last.ordinal)
            logged: list[Turn] = []
            for turn in turns:
                ordinal = 0 if last is None else last.ordinal + 1
                follows = last is not None and (
                    one_session or _close(last.when, turn.when, self._session_gap)
                )
                number = db.execute(
                    "INSERT INTO turns (scope, ordinal, session, role, speaker, words, said_at)"
                    " VALUES (?, ?, 0, ?, ?, ?, ?)",
                    (scope, ordinal, turn.role, turn.speaker, packed(turn.text), to_iso(turn.when)),
                ).lastrowid
                assert number is not None
                session = last.session if last is not None and follows else number
                db.execute("UPDATE turns SET session = ? WHERE number = ?", (session, number))
                if last is not None and last.text is None:
                    drop_empty(db, [last.number])
                last = Turn(number, ordinal, session, turn.role, turn.speaker, turn.text, turn.when)
                logged.append(last)
            return logged

    def redact(self, numbers: Iterable[int]) -> None:
        """Delete the text of these turns."""
        with self._database.change() as db:
            gone = list(numbers)
            take_text(db, gone)
            drop_empty(db, gone)

    def get(self, numbers: Iterable[int]) -> list[Turn]:
        """Those of these turns that still have their text, in order."""
        return self._turns(f"number {AMONG} AND words IS NOT NULL ORDER BY number", as_list(numbers))

    def of_session(self, session: int) -> list[Turn]:
        """The turns of a session that still have their text, in order."""
        return self._turns("session = ? AND words IS NOT NULL ORDER BY ordinal", session)

    def in_scopes(self, wanted: Callable[[str], bool]) -> list[int]:
        """Numbers of the turns in every scope for which `wanted` is true."""
        return self._database.column_in_scopes("turns", "number", wanted)

    def saying(self, scope: str, texts: Sequence[Sequence[str]]) -> list[int]:
        """Numbers of the owner's turns, in any scope that begins like `scope`, that repeat a fact or its turns.

        Args:
            texts: of each fact its own text, then the texts of its turns. A turn repeats the fact if it contains the
                fact's text or equals any of the texts: apps send earlier messages again with every call. A turn that is
                some fact word for word is left out.
        """
        owner = scope.split("&")[0]
        rows = self._database.read(
            # In ASCII the apostrophe is the character after the ampersand.
            "SELECT number, text FROM turns WHERE (scope = ? OR (scope > ? AND scope < ?))"
            " AND words IS NOT NULL AND NOT EXISTS"
            " (SELECT 1 FROM sources JOIN facts USING (fact) WHERE turn = number AND verbatim)",
            owner,
            f"{owner}&",
            f"{owner}'",
        )
        same = {text for fact in texts for text in fact}
        return [number for number, said in rows if said in same or any(says(said, fact[0]) for fact in texts)]

    def without_fact(self, condition: str, value: str | int) -> tuple[tuple[str, int], ...]:
        """Scope and number of the turns that meet `condition`, still have their text, and are the source of no fact."""
        rows = self._database.read(
            f"SELECT scope, number FROM turns WHERE {condition} AND words IS NOT NULL"
            " AND NOT EXISTS (SELECT 1 FROM sources WHERE turn = number)",
            value,
        )
        return tuple((scope, number) for scope, number in rows)

    def _last(self, scope: str) -> Turn | None:
        return next(iter(self._turns("scope = ? ORDER BY ordinal DESC LIMIT 1", scope)), None)

    def _turns(self, condition: str, value: str | int) -> list[Turn]:
        rows = self._database.read(f"SELECT {_COLUMNS} FROM turns WHERE {condition}", value)
        return [_turn(row) for row in rows]


def take_text(db: sqlite3.Connection, turns: Iterable[int]) -> None:
    """Delete the text and the speaker of turns; their rows stay."""
    db.executemany(
        "UPDATE turns SET words = NULL, speaker = '' WHERE number = ?", [(number,) for number in turns]
    )


def _turn(row: Any) -> Turn:
    number, ordinal, session, role, speaker, text, said_at = row
    return Turn(number, ordinal, session, role, speaker, text, from_iso(said_at))


def _close(before: datetime | None, after: datetime | None, gap: timedelta) -> bool:
    if before is None or after is None:
        return before is after
    if (before.tzinfo is None) != (after.tzinfo is None):
        before, after = (when if when.tzinfo else when.replace(tzinfo=UTC) for when in (before, after))
    return abs(after - before) < gap
