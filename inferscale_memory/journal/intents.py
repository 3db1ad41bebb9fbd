"""The intents: what was begun, so that the next start can finish it after a crash."""

from __future__ import annotations

import json
from collections.abc import Collection

from inferscale_memory.journal.database import AMONG, Database, as_list
from inferscale_memory.journal.records import Intent
from inferscale_memory.journal.words import packed


class Intents:
    """The unfinished intents of one journal."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, intent: Intent) -> int:
        """Note what is about to be done. Returns its number."""
        with self._database.change() as db:
            number = db.execute(
                "INSERT INTO intents (kind, fact, scope, words, turns, facts) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    intent.kind,
                    intent.fact,
                    intent.scope,
                    packed(json.dumps(intent.words, ensure_ascii=False)),
                    json.dumps(intent.turns),
                    json.dumps(intent.facts),
                ),
            ).lastrowid
            assert number is not None
            return number

    def reduce_to_scrub(self, numbers: Collection[int]) -> None:
        """Everything but the scrub is done. The intents themselves hold text that the scrub removes, so they are
        emptied first."""
        with self._database.change() as db:
            db.execute(
                "UPDATE intents SET kind = 'scrub', fact = '', scope = '', words = ?, turns = '[]', facts = '[]'"
                f" WHERE number {AMONG}",
                (packed("[]"), as_list(numbers)),
            )

    def finish(self, numbers: Collection[int]) -> None:
        """Remove finished intents. This is not durable at once: after a crash an intent may be carried out a second
        time, which is harmless."""
        if not numbers:
            return
        with self._database.lock:
            self._database.connection.execute("PRAGMA synchronous = NORMAL")
            try:
                with self._database.change() as db:
                    db.execute(f"DELETE FROM intents WHERE number {AMONG}", (as_list(numbers),))
            finally:
                self._database.connection.execute("PRAGMA synchronous = FULL")

    def unfinished(self) -> dict[int, Intent]:
        """The intents that are not finished, by number, oldest first."""
        rows = self._database.read(
            "SELECT number, kind, fact, scope, said, turns, facts FROM intents ORDER BY number"
        )
        intents = {}
        for number, kind, fact, scope, *lists in rows:
            try:
                intents[number] = Intent(kind, fact, scope, *(tuple(json.loads(text)) for text in lists))
            except ValueError:  # damaged: its work is unknown, but its text must go
                intents[number] = Intent("scrub")
        return intents
