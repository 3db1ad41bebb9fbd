"""mem0's history file: the events of each memory, and the last messages of each scope.

Events stay, with their ids, kinds and times; of a text that was forgotten there is None. Messages that said it go.
It must never touch what mem0 still needs: the words a memory has now, and messages of other owners.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from sqlite3 import Connection
from typing import Any
from uuid import uuid4

from mem0.memory.storage import SQLiteManager

from inferscale_memory.facts.scope import Scope
from inferscale_memory.journal import Intent
from inferscale_memory.journal.said import says
from inferscale_memory.mem0_adapter.private import history_lock, normalize_iso_timestamp_to_utc
from inferscale_memory.scripts import word_count
from inferscale_memory.storage.scrub import scrub
from inferscale_memory.storage.sqlite import transaction

_LIVING = (
    "SELECT 1 FROM history WHERE instr(lower(old_memory), lower(:text)) OR instr(lower(new_memory), lower(:text))"
    " UNION ALL SELECT 1 FROM messages WHERE instr(lower(content), lower(:text)) LIMIT 1"
)
_INDEX = "inferscale_events_by_memory"
_TELLING = 3
"""Words that make a turn one that is said once; a shorter one, as "yes", is in everything."""


class HistoryFile:
    """The file, through mem0's own connection. Where an app or a test has put something else in its place, there
    is nothing to be done."""

    def __init__(self, manager: Callable[[], Any]) -> None:
        self._manager = manager

    @staticmethod
    def guard(manager: Any) -> None:
        """What mem0 deletes from now on is overwritten: it evicts messages itself."""
        if isinstance(manager, SQLiteManager) and manager.connection is not None:
            for pragma in ("secure_delete = ON", "temp_store = MEMORY"):
                manager.connection.execute(f"PRAGMA {pragma}")
            with history_lock(manager):  # mem0 looks through all events for those of one memory
                manager.connection.execute(f"CREATE INDEX IF NOT EXISTS {_INDEX} ON history (memory_id)")

    def redact(self, now: Mapping[str, str | None]) -> None:
        """Take out of the events of these memories every text but the one that each has now."""
        with self._change() as db:
            if db is not None:
                db.executemany(
                    "UPDATE history SET"
                    " old_memory = CASE WHEN old_memory = :now THEN old_memory END,"
                    " new_memory = CASE WHEN new_memory = :now THEN new_memory END"
                    " WHERE memory_id = :id",
                    [{"id": name, "now": text} for name, text in now.items()],
                )

    def memories(self) -> list[str]:
        """Ids of the memories of which a text is left."""
        with self._change() as db:
            if db is None:
                return []
            return [
                row[0]
                for row in db.execute(
                    "SELECT DISTINCT memory_id FROM history"
                    " WHERE old_memory IS NOT NULL OR new_memory IS NOT NULL"
                )
            ]

    def enter(self, memory: str, payload: Mapping[str, Any] | None) -> None:
        """The last event of a memory, if mem0 did not come to write it: it was added, updated, or, with None,
        deleted."""
        now = payload or {}
        text = now.get("data")
        with self._change() as db:
            if db is None:
                return
            events = db.execute(
                "SELECT event, new_memory, created_at FROM history WHERE memory_id = ?", (memory,)
            ).fetchall()
            if payload is None:
                event = "DELETE"
                written = any(kind == event for kind, _, _ in events)
            else:
                event = "UPDATE" if events else "ADD"
                written = any(said == text for _, said, _ in events)
            if not written:
                db.execute(
                    "INSERT INTO history (id, memory_id, new_memory, event, created_at, updated_at, is_deleted,"
                    " actor_id, role) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        str(uuid4()),
                        memory,
                        text,
                        event,
                        now.get("created_at") or min((at for _, _, at in events if at), default=None),
                        now.get("updated_at") or datetime.now(UTC).isoformat(),
                        int(payload is None),
                        now.get("actor_id"),
                        now.get("role"),
                    ),
                )

    def forget_messages(self, lost: Sequence[Intent]) -> None:
        """Delete the messages of the same owners that say one of these facts or its turns, whoever's they are, and
        all of a call of which one is such a turn: instructions and what was seen in pictures are no turns, and the
        fact may be drawn from them."""
        words: dict[str, _Words] = {}
        for loss in lost:
            if loss.says_something:
                words.setdefault(Scope.read(loss.scope).owner, _Words()).add(loss.words)
        if not words:
            return
        with self._change() as db:
            if db is None:
                return
            calls: dict[
                tuple[str, str], list[tuple[str, str]]
            ] = {}  # mem0 dates all messages of a call alike
            for name, scope, at, said in db.execute(
                "SELECT id, session_scope, created_at, content FROM messages"
            ):
                calls.setdefault((scope or "", at), []).append((name, str(said or "")))
            for (scope, _), messages in calls.items():
                these = words.get(Scope.read(scope).owner)
                if these is not None:
                    gone = these.said_in(messages)
                    db.executemany("DELETE FROM messages WHERE id = ?", [(name,) for name in gone])

    def forget_scope(self, whose: Scope) -> None:
        """Delete the messages of every scope that carries these ids; in an empty scope all."""
        with self._change() as db:
            if db is not None:
                scopes = db.execute("SELECT DISTINCT session_scope FROM messages").fetchall()
                gone = [(scope,) for (scope,) in scopes if whose.covers(Scope.read(scope or ""))]
                db.executemany("DELETE FROM messages WHERE session_scope IS ?", gone)

    def scrub(self, words: Collection[str] | None) -> bool:
        """Leave nothing of these words in the file; None for whatever they were."""
        manager = self._manager()
        if not isinstance(manager, SQLiteManager) or manager.connection is None:
            return True
        with history_lock(manager):
            return scrub(manager.connection, words, _LIVING)

    @contextmanager
    def _change(self) -> Iterator[Connection | None]:
        """One transaction on mem0's connection; None where there is none."""
        manager = self._manager()
        if not isinstance(manager, SQLiteManager) or manager.connection is None:
            yield None
            return
        with history_lock(manager), transaction(manager.connection) as db:
            yield db


class _Words:
    """What facts of one owner said, and the turns each of them came from."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._same: set[str] = set()
        self._telling: set[str] = set()
        self._turns: set[frozenset[str]] = set()

    def add(self, words: Sequence[str]) -> None:
        """The words of an `Intent`."""
        telling = [turn for turn in words[1:] if word_count(turn) >= _TELLING]
        self._telling.update(telling)
        self._said.update([words[0], *telling])
        self._same.update(words[1:])
        self._turns.add(frozenset(words[1:]))

    def said_in(self, call: Sequence[tuple[str, str]]) -> list[str]:
        """Which of the messages of a call, as name and text, go."""
        texts = {text for _, text in call}
        if texts & self._telling or any(turns and turns <= texts for turns in self._turns):
            return [name for name, _ in call]
        return [
            name for name, text in call if text in self._same or any(says(text, gone) for gone in self._said)
        ]


def deletion(memory: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The event that mem0 writes when it deletes a memory, without the text that would be taken out of it at once."""
    return {
        "memory_id": memory,
        "event": "DELETE",
        "created_at": normalize_iso_timestamp_to_utc(payload.get("created_at")),
        "updated_at": datetime.now(UTC).isoformat(),
        "is_deleted": 1,
        "actor_id": payload.get("actor_id"),
        "role": payload.get("role"),
    }
