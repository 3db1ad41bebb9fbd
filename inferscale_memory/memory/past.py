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

from inferscale_memory.journal import Intent
from inferscale_memory.journal.scrub import scrub
from inferscale_memory.journal.traces import says
from inferscale_memory.memory.scope import Scope
from inferscale_memory.sqlite import transaction

_LIVING = (
    "SELECT 1 FROM history WHERE instr(lower(old_memory), lower(:text)) OR instr(lower(new_memory), lower(:text))"
    " UNION ALL SELECT 1 FROM messages WHERE instr(lower(content), lower(:text)) LIMIT 1"
)


class Past:
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
        """Delete the messages of the same owners that say one of these facts, or that are one of their turns."""
        self._delete_messages(
            lambda scope, content: any(
                Scope.read(loss.scope).owner == scope.owner
                and (says(content, loss.words[0]) or content in loss.words)
                for loss in lost
                if loss.says_something
            )
        )

    def forget_scope(self, whose: Scope) -> None:
        """Delete the messages of every scope that carries these ids; in an empty scope all."""
        self._delete_messages(lambda scope, content: whose.covers(scope))

    def scrub(self, words: Collection[str] | None) -> bool:
        """Leave nothing of these words in the file; None for whatever they were."""
        manager = self._manager()
        if not isinstance(manager, SQLiteManager) or manager.connection is None:
            return True
        with manager._lock:
            return scrub(manager.connection, words, _LIVING)

    def _delete_messages(self, goes: Callable[[Scope, str], bool]) -> None:
        with self._change() as db:
            if db is not None:
                rows = db.execute("SELECT id, session_scope, content FROM messages").fetchall()
                gone = [
                    (name,) for name, scope, said in rows if goes(Scope.read(scope or ""), str(said or ""))
                ]
                db.executemany("DELETE FROM messages WHERE id = ?", gone)

    @contextmanager
    def _change(self) -> Iterator[Connection | None]:
        """One transaction on mem0's connection; None where there is none."""
        manager = self._manager()
        if not isinstance(manager, SQLiteManager) or manager.connection is None:
            yield None
            return
        with manager._lock, transaction(manager.connection) as db:
            yield db
