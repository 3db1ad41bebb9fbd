"""Finishes at the start what a crash has cut off.

Deletions are carried out, whatever of them had happened. Facts that had reached the store are entered in the journal,
with the turns they came from. It must never undo what was acknowledged, and what it cannot finish it leaves for the
next start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from inferscale_memory.facts.scope import Scope
from inferscale_memory.forget.entities import Entities
from inferscale_memory.forget.forget import ADD, DELETE_ALL, EXPIRE, RESET, SCRUB, UPDATE
from inferscale_memory.forget.history import HistoryFile
from inferscale_memory.journal import Intent, Journal
from inferscale_memory.mem0_adapter.rows import MOST, rows_of
from inferscale_memory.write.writer import WritePath

_log = logging.getLogger(__name__)


class Recovery:
    """One start. `store` is the fact store behind its mirror, so what happens here is forgotten as always."""

    def __init__(
        self, journal: Journal, writes: WritePath, history: HistoryFile, entities: Entities, store: Any
    ) -> None:
        self._journal = journal
        self._writes = writes
        self._history = history
        self._entities = entities
        self._store = store

    def run(self) -> None:
        for number, intent in self._journal.intents.unfinished().items():
            try:
                self._finish(number, intent)
            except Exception:
                _log.exception(
                    "a call of kind %r that was cut off is finished at the next start", intent.kind
                )

    def _finish(self, number: int, intent: Intent) -> None:
        if intent.kind == UPDATE and self._text(intent.fact) == intent.words[0]:
            self._journal.intents.finish([number])  # it had not reached the store
            return
        if intent.kind == SCRUB:
            self._writes.scrub(number)
            return
        with self._writes.resumed(number, intent):
            if intent.kind == ADD:
                self._enter(intent)
            elif intent.kind == DELETE_ALL:
                self._delete_all(Scope.read(intent.scope), intent.facts)
            elif intent.kind == RESET:
                self._entities.clear()
                self._store.reset()
            elif intent.kind == EXPIRE:
                self._writes.deleted([intent.fact])
            else:
                self._bring_in_step(intent)

    def _enter(self, intent: Intent) -> None:
        """Facts that mem0 had written, and the journal had not."""
        scope = Scope.read(intent.scope)
        listed = rows_of(self._store.list(filters=scope.ids, top_k=MOST))
        rows = {str(row.id): row.payload or {} for row in listed if Scope.of(row.payload or {}) == scope}
        for name in self._journal.facts.tombstones(rows):  # put away because it has expired: not of this call
            del rows[name]
        known = self._journal.facts.get(rows)
        self._writes.written([(name, payload) for name, payload in rows.items() if name not in known])
        for name, payload in rows.items():
            if name not in known or set(known[name].turns) & set(intent.turns):
                self._history.enter(name, payload)

    def _bring_in_step(self, intent: Intent) -> None:
        """A deletion is finished; of an update the store has the new words, or no such fact any more."""
        row = self._store.get(intent.fact)
        if row is not None and intent.kind == UPDATE:
            self._writes.updated(intent.fact, row.payload)
            self._history.enter(intent.fact, row.payload)
        else:
            self._delete([intent.fact] if row is not None else [], [intent.fact])

    def _delete_all(self, whose: Scope, named: Sequence[str]) -> None:
        """What the store has of them, what the journal still has, and what the store had when it was begun."""
        stored = [str(row.id) for row in rows_of(self._store.list(filters=whose.ids, top_k=MOST))]
        known = self._journal.facts.in_scopes(lambda scope: whose.covers(Scope.read(scope)))
        self._delete(stored, list(dict.fromkeys([*stored, *known, *named])))

    def _delete(self, stored: Sequence[str], facts: Sequence[str]) -> None:
        for fact in stored:
            self._store.delete(vector_id=fact)
        self._writes.deleted(facts)
        for fact in facts:
            self._history.enter(fact, None)

    def _text(self, fact: str) -> Any:
        payload = getattr(self._store.get(fact), "payload", None)
        return None if payload is None else payload.get("data")
