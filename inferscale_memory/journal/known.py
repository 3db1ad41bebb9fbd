"""What a question needs to know of the facts that it retrieves, in one query."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from inferscale_memory.journal.database import AMONG, Database, as_list
from inferscale_memory.journal.records import LedgerEntry, from_iso

Epoch = tuple[int, int, int]
"""Changes with every change of the journal, whoever makes it. While it is the same, no fact was forgotten or reworded.
It says nothing about the time in between: a new epoch may still have the same facts."""

_VERSION = "(SELECT data_version FROM pragma_data_version)"
"""SQLite counts in it what other connections have written."""


@dataclass(frozen=True, slots=True)
class KnownFact:
    """A fact without its turns, and its blob if it has one."""

    text: str
    speaker: str
    when: datetime | None
    session: int | None
    place: int
    blob: LedgerEntry | None


def known_facts(
    database: Database, ids: Iterable[str], fingerprint: str
) -> tuple[Epoch, dict[str, KnownFact]]:
    """Those of `ids` that are known, with their blobs under `fingerprint`, and the epoch in which that is so."""
    with database.lock:
        rows = database.read(
            f"SELECT {_VERSION}, facts.fact, text, speaker, said_at, session, place, ledger.owner, key, tokens, line,"
            " chained FROM facts LEFT JOIN ledger ON ledger.fact = facts.fact AND fingerprint = ? AND NOT lost"
            f" WHERE facts.fact {AMONG}",
            fingerprint,
            as_list(ids),
        )
        now = _epoch(database, rows[0][0]) if rows else epoch(database)
    known = {}
    for _, fact, text, speaker, when, session, place, owner, key, tokens, line, chained in rows:
        blob = (
            None if key is None else LedgerEntry(fact, owner, fingerprint, key, tokens, line, bool(chained))
        )
        known[fact] = KnownFact(text, speaker, from_iso(when), session, place, blob)
    return now, known


def epoch(database: Database) -> Epoch:
    """The epoch now."""
    with database.lock:
        return _epoch(database, database.read("PRAGMA data_version")[0][0])


def _epoch(database: Database, others: int) -> Epoch:
    """`database.lock` is held."""
    return database.openings, database.connection.total_changes, others
