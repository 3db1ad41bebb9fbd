"""The ledger: which blob belongs to which fact, and what each blob was computed from.

A blob's text, the text of its window, and every blob that was injected while it was computed are part of what it was
computed from. So a forgotten text leads to every blob that it influenced, through any number of blobs in between.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

from inferscale_memory.journal.database import AMONG, Database, as_list
from inferscale_memory.journal.facts import Facts
from inferscale_memory.journal.records import Context, Fact, LedgerEntry

_COLUMNS = "fact, owner, fingerprint, key, tokens, line, chained"
_WITH_DEPENDENTS = f"""
WITH RECURSIVE affected (fact, fingerprint) AS (
    SELECT fact, fingerprint FROM ledger WHERE {{}}
    UNION
    SELECT stands.fact, stands.fingerprint FROM affected
        JOIN ledger USING (fact, fingerprint) JOIN stands ON stands.base = ledger.key
)
SELECT {_COLUMNS} FROM ledger WHERE (fact, fingerprint) IN (SELECT fact, fingerprint FROM affected)
"""
"""The blobs that meet a condition, the blobs that depend on them, and so on."""


class Ledger:
    """The ledger of one journal.

    Invariants:
        - An entry exists only for a fact that exists, and only while every text its blob was computed from does.
        - Every blob that another depends on has an entry, even after the blob itself is lost.
    """

    def __init__(self, database: Database, facts: Facts) -> None:
        self._database = database
        self._facts = facts

    def enter(self, entry: LedgerEntry, fact: Fact, context: Context) -> bool:
        """Note that the blob of `entry` belongs to `fact`. Returns False and notes nothing if the fact, a text of its
        window or a blob it depends on was forgotten or replaced while it was computed."""
        with self._database.change() as db:
            if self._facts.get([entry.fact]).get(entry.fact) != fact or not self._is_current(entry, context):
                return False
            self._replace_in_dependents(db, entry)
            db.execute(
                "DELETE FROM ledger WHERE fact = ? AND fingerprint = ?", (entry.fact, entry.fingerprint)
            )
            db.execute(f"INSERT INTO ledger ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(entry))
            self._note_context(db, entry, context)
            return True

    def get(self, ids: Iterable[str], fingerprint: str) -> dict[str, LedgerEntry]:
        """The entries of those of `ids` that have a blob under `fingerprint`, by id."""
        found = self._entries(f"fact {AMONG} AND fingerprint = ? AND NOT lost", as_list(ids), fingerprint)
        return {entry.fact: entry for entry in found}

    def all(self) -> list[LedgerEntry]:
        """Every entry, those of lost blobs included."""
        return self._entries("1")

    def referenced(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that belong to a fact. Facts with the same text may share a blob."""
        return {entry.key for entry in self._entries(f"key {AMONG} AND NOT lost", as_list(keys))}

    def mark_lost(self, keys: Sequence[str]) -> None:
        """Note that the engine no longer holds these blobs. What they were computed from stays known, because other
        blobs may depend on them."""
        with self._database.change() as db:
            db.execute(f"UPDATE ledger SET lost = 1 WHERE key {AMONG}", (as_list(keys),))

    def saying(self, text: str) -> list[LedgerEntry]:
        """The blobs that were computed from a fact or turn that contains `text`, directly or through other blobs."""
        containing = "(SELECT {} WHERE instr(folded(text), folded(?)))"
        facts, turns = containing.format("fact FROM facts"), containing.format("number FROM turns")
        window = f"(SELECT fact, fingerprint FROM held WHERE other IN {facts} OR turn IN {turns})"
        return self._with_dependents(f"fact IN {facts} OR (fact, fingerprint) IN {window}", text, text, text)

    def remove(self, db: sqlite3.Connection, facts: Iterable[str], turns: Iterable[int]) -> list[LedgerEntry]:
        """Delete, in the transaction of `db`, the entries of every blob computed from these facts or turns, directly or
        through other blobs. Returns them."""
        ids, numbers = as_list(facts), as_list(turns)
        window = f"(SELECT fact, fingerprint FROM held WHERE other {AMONG} OR turn {AMONG})"
        entries = self._with_dependents(f"fact {AMONG} OR (fact, fingerprint) IN {window}", ids, ids, numbers)
        db.executemany(
            "DELETE FROM ledger WHERE fact = ? AND fingerprint = ?",
            [(entry.fact, entry.fingerprint) for entry in entries],
        )
        return entries

    def _is_current(self, entry: LedgerEntry, context: Context) -> bool:
        """Whether everything the blob was computed from is still what it was."""
        bases = self._entries(f"key {AMONG} AND fingerprint = ?", as_list(context.blobs), entry.fingerprint)
        if {base.key for base in bases} != set(context.blobs):
            return False
        known = self._facts.get(fact.fact for fact in context.facts)
        [(turns,)] = self._database.read(
            f"SELECT count(*) FROM turns WHERE number {AMONG} AND words IS NOT NULL", as_list(context.turns)
        )
        return turns == len(context.turns) and all(known.get(fact.fact) == fact for fact in context.facts)

    def _note_context(self, db: sqlite3.Connection, entry: LedgerEntry, context: Context) -> None:
        """Note what a blob was computed from. A fact whose blob was injected, and a blob that an injected blob depends
        on, are not noted again: they are found through the injected blob."""
        keys = as_list(context.blobs)
        injected = {base.fact for base in self._entries(f"key {AMONG}", keys)}
        window: list[tuple[str | None, int | None]] = [
            (other.fact, None) for other in context.facts if other.fact not in injected
        ]
        window += [(None, turn) for turn in context.turns]
        db.executemany(
            "INSERT INTO held (fact, fingerprint, other, turn) VALUES (?, ?, ?, ?)",
            [(entry.fact, entry.fingerprint, *part) for part in window],
        )
        rows = self._database.read(
            f"SELECT base FROM stands JOIN ledger USING (fact, fingerprint) WHERE ledger.key {AMONG}", keys
        )
        indirect = {row[0] for row in rows}
        db.executemany(
            "INSERT OR IGNORE INTO stands (fact, fingerprint, base) VALUES (?, ?, ?)",
            [(entry.fact, entry.fingerprint, base) for base in context.blobs if base not in indirect],
        )

    def _replace_in_dependents(self, db: sqlite3.Connection, entry: LedgerEntry) -> None:
        """A new blob replaces the fact's old one. The blobs that depend on the old one now depend directly on the fact
        and on everything the old one was computed from, each noted once."""
        for old in self._entries("fact = ? AND fingerprint = ?", entry.fact, entry.fingerprint):
            if old.key == entry.key:
                continue
            replaced = {"fact": old.fact, "fingerprint": old.fingerprint, "key": old.key}
            db.execute(
                "INSERT INTO held (fact, fingerprint, other, turn)"
                " SELECT above.fact, above.fingerprint, below.other, below.turn FROM stands AS above,"
                " (SELECT other, turn FROM held WHERE fact = :fact AND fingerprint = :fingerprint"
                "  UNION SELECT :fact, NULL) AS below"
                " WHERE above.base = :key AND NOT EXISTS (SELECT 1 FROM held AS own WHERE own.fact = above.fact AND"
                " own.fingerprint = above.fingerprint AND own.other IS below.other AND own.turn IS below.turn)",
                replaced,
            )
            db.execute(
                "INSERT OR IGNORE INTO stands (fact, fingerprint, base)"
                " SELECT above.fact, above.fingerprint, below.base FROM stands AS above, stands AS below"
                " WHERE below.fact = :fact AND below.fingerprint = :fingerprint AND above.base = :key",
                replaced,
            )
            db.execute("DELETE FROM stands WHERE base = :key", replaced)

    def _entries(self, condition: str, *values: str) -> list[LedgerEntry]:
        return _read(self._database.read(f"SELECT {_COLUMNS} FROM ledger WHERE {condition}", *values))

    def _with_dependents(self, condition: str, *values: str) -> list[LedgerEntry]:
        return _read(self._database.read(_WITH_DEPENDENTS.format(condition), *values))


def _read(rows: Iterable[Any]) -> list[LedgerEntry]:
    return [
        LedgerEntry(fact, owner, fingerprint, key, tokens, line, bool(chained))
        for fact, owner, fingerprint, key, tokens, line, chained in rows
    ]
