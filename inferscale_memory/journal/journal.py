"""The turn log and the ledger, in one SQLite file.

The log says what was said, in order; the ledger says which blob stands for which fact and what that blob's
window held. What a call has returned from is durable. Deleted text is overwritten in the database's pages.

It must never decide what is encoded or shown: it only remembers. It knows no engine, no prompt and no mem0.

Not yet here (the drop-in issue adds it): scrubbing the write-ahead log and mem0's own history before a delete
returns, taking a text out of a turn that said other facts too, and reconciling with the vector store after a
crash between the two writes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import RLock
from typing import Any

from inferscale_memory.journal.failed import FailedAdds
from inferscale_memory.journal.records import Context, Fact, LedgerEntry, NewTurn, Turn

SESSION_GAP = timedelta(hours=1)
"""Turns of one scope at least this far apart belong to different sessions."""

_FORMAT = 1
_SCHEMA = """
CREATE TABLE turns (
    number  INTEGER PRIMARY KEY AUTOINCREMENT,
    scope   TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    session INTEGER NOT NULL,
    role    TEXT NOT NULL,
    speaker TEXT NOT NULL,
    text    TEXT,
    said_at TEXT,
    UNIQUE (scope, ordinal)
) STRICT;
CREATE INDEX turns_by_session ON turns (session);

CREATE TABLE facts (
    place    INTEGER PRIMARY KEY AUTOINCREMENT,
    fact     TEXT NOT NULL UNIQUE,
    owner    TEXT NOT NULL,
    scope    TEXT NOT NULL,
    tag      TEXT NOT NULL,
    text     TEXT NOT NULL,
    speaker  TEXT NOT NULL,
    said_at  TEXT,
    session  INTEGER,
    verbatim INTEGER NOT NULL
) STRICT;
CREATE INDEX facts_by_session ON facts (session);

CREATE TABLE sources (
    fact TEXT NOT NULL REFERENCES facts (fact) ON DELETE CASCADE,
    turn INTEGER NOT NULL REFERENCES turns (number) ON DELETE CASCADE,
    PRIMARY KEY (fact, turn)
) STRICT, WITHOUT ROWID;
CREATE INDEX sources_by_turn ON sources (turn);

CREATE TABLE ledger (
    fact        TEXT NOT NULL REFERENCES facts (fact) ON DELETE CASCADE,
    fingerprint TEXT NOT NULL,
    owner       TEXT NOT NULL,
    key         TEXT NOT NULL,
    tokens      INTEGER NOT NULL,
    line        TEXT NOT NULL,
    PRIMARY KEY (fact, fingerprint)
) STRICT, WITHOUT ROWID;
CREATE INDEX ledger_by_key ON ledger (key);

CREATE TABLE held (
    fact        TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    other       TEXT,
    turn        INTEGER,
    FOREIGN KEY (fact, fingerprint) REFERENCES ledger (fact, fingerprint) ON DELETE CASCADE
) STRICT;
CREATE INDEX held_by_blob ON held (fact, fingerprint);
CREATE INDEX held_by_fact ON held (other);
CREATE INDEX held_by_turn ON held (turn);

CREATE TABLE forgotten (
    fact TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID
"""
_TURN = "number, ordinal, session, role, speaker, text, said_at"
_FACT = "fact, owner, scope, tag, text, speaker, said_at, session, verbatim"
_ENTRY = "fact, owner, fingerprint, key, tokens, line"
_AMONG = "IN (SELECT value FROM json_each(?))"


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What goes with the words that were just forgotten.

    Attributes:
        facts: those that were known, as they were.
        blobs: ledger entries that no longer hold: of these facts, and of others whose window held them.
        bereaved: ids of the facts that lost a blob only because of their window: they are to be encoded
            again.
    """

    facts: tuple[Fact, ...] = ()
    blobs: tuple[LedgerEntry, ...] = ()
    bereaved: tuple[str, ...] = ()


class Journal:
    """One journal. Any number of threads may call it; another process may hold the same file.

    Attributes:
        failed_adds: calls to `add` that are to be made again.

    Invariants:
        - A ledger entry exists only for a fact that exists, and its window only held text that still exists.
        - A forgotten fact comes back only after `allow`.
    """

    def __init__(self, path: Path) -> None:
        """Open the journal in file `path`, creating it and its folder. Raises `sqlite3.Error` on a foreign
        file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = RLock()
        self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON", "foreign_keys = ON"):
            self._db.execute(f"PRAGMA {pragma}")
        with self._change() as db:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                for statement in _SCHEMA.split(";\n"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_FORMAT}")
            elif found != _FORMAT:
                raise sqlite3.DatabaseError(
                    f"{path} is a journal of format {found}, this library reads {_FORMAT}"
                )
        self.failed_adds = FailedAdds(self._change, self._read)

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        with self._lock:
            self._db.close()

    # -- the log ---------------------------------------------------------------------------------------------

    def append_turns(self, scope: str, turns: Sequence[NewTurn], *, one_session: bool = False) -> list[Turn]:
        """Log `turns` at the end of `scope`. With `one_session` the whole scope is one session; otherwise a
        session ends where two turns are `SESSION_GAP` apart, and where dated turns follow undated ones or the
        reverse."""
        with self._change() as db:
            last = self._last_turn(scope)
            logged: list[Turn] = []
            for turn in turns:
                ordinal = 0 if last is None else last.ordinal + 1
                follows = last is not None and (one_session or _close(last.when, turn.when))
                number = db.execute(
                    "INSERT INTO turns (scope, ordinal, session, role, speaker, text, said_at)"
                    " VALUES (?, ?, 0, ?, ?, ?, ?)",
                    (scope, ordinal, turn.role, turn.speaker, turn.text, _iso(turn.when)),
                ).lastrowid
                assert number is not None
                session = last.session if last is not None and follows else number
                db.execute("UPDATE turns SET session = ? WHERE number = ?", (session, number))
                last = Turn(number, ordinal, session, turn.role, turn.speaker, turn.text, turn.when)
                logged.append(last)
            return logged

    def redact_turns(self, numbers: Iterable[int]) -> None:
        """Take the words out of turns; their places stay."""
        with self._change() as db:
            _redact(db, numbers)

    def turns(self, numbers: Iterable[int]) -> list[Turn]:
        """Those of `numbers` that are not forgotten, in order."""
        wanted = json.dumps(list(numbers))
        rows = self._read(
            f"SELECT {_TURN} FROM turns WHERE number {_AMONG} AND text IS NOT NULL ORDER BY number", wanted
        )
        return [_turn(row) for row in rows]

    def turns_of_session(self, session: int) -> list[Turn]:
        """The turns of a session in order, without the forgotten ones."""
        rows = self._read(
            f"SELECT {_TURN} FROM turns WHERE session = ? AND text IS NOT NULL ORDER BY ordinal", session
        )
        return [_turn(row) for row in rows]

    def _last_turn(self, scope: str) -> Turn | None:
        rows = self._read(f"SELECT {_TURN} FROM turns WHERE scope = ? ORDER BY ordinal DESC LIMIT 1", scope)
        return _turn(rows[0]) if rows else None

    # -- facts -----------------------------------------------------------------------------------------------

    def write_facts(self, facts: Iterable[Fact]) -> list[str]:
        """Enter facts that were just written; a known id keeps its place. Returns the ids of those entered: a
        fact that was forgotten between its writing and this call is not."""
        with self._change() as db:
            return [fact.fact for fact in facts if self._put(db, fact)]

    def allow(self, ids: Sequence[str]) -> None:
        """Lift the ban on facts that were forgotten: they are about to be written anew."""
        if self._read(f"SELECT 1 FROM forgotten WHERE fact {_AMONG} LIMIT 1", json.dumps(ids)):
            with self._change() as db:
                db.execute(f"DELETE FROM forgotten WHERE fact {_AMONG}", (json.dumps(ids),))

    def facts(self, ids: Iterable[str]) -> dict[str, Fact]:
        """Those of `ids` that are known."""
        return {fact.fact: fact for fact in self._facts(f"fact {_AMONG}", json.dumps(list(ids)))}

    def facts_of_session(self, session: int) -> list[Fact]:
        """The facts of a session in the order in which they were first written."""
        return self._facts("session = ?", session)

    def _facts(self, condition: str, value: str | int) -> list[Fact]:
        with self._lock:
            rows = self._read(f"SELECT {_FACT} FROM facts WHERE {condition} ORDER BY place", value)
            sources: dict[str, list[int]] = {row[0]: [] for row in rows}
            for fact, turn in self._read(
                f"SELECT fact, turn FROM sources WHERE fact {_AMONG} ORDER BY turn", json.dumps(list(sources))
            ):
                sources[fact].append(turn)
        return [
            Fact(
                fact,
                owner,
                scope,
                tag,
                text,
                speaker,
                _when(at),
                session,
                tuple(sources[fact]),
                bool(verbatim),
            )
            for fact, owner, scope, tag, text, speaker, at, session, verbatim in rows
        ]

    def _put(self, db: sqlite3.Connection, fact: Fact) -> bool:
        if self._read("SELECT 1 FROM forgotten WHERE fact = ?", fact.fact):
            return False
        db.execute(
            f"INSERT INTO facts ({_FACT}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (fact) DO UPDATE SET"
            " owner = excluded.owner, scope = excluded.scope, tag = excluded.tag, text = excluded.text,"
            " speaker = excluded.speaker, said_at = excluded.said_at, session = excluded.session,"
            " verbatim = excluded.verbatim",
            (
                fact.fact,
                fact.owner,
                fact.scope,
                fact.tag,
                fact.text,
                fact.speaker,
                _iso(fact.when),
                fact.session,
                int(fact.verbatim),
            ),
        )
        db.execute("DELETE FROM sources WHERE fact = ?", (fact.fact,))
        db.executemany(
            "INSERT INTO sources (fact, turn) VALUES (?, ?)", [(fact.fact, turn) for turn in fact.turns]
        )
        return True

    # -- the ledger ------------------------------------------------------------------------------------------

    def enter_blob(self, entry: LedgerEntry, fact: Fact, context: Context) -> bool:
        """Note that `entry`'s blob stands for `fact`. False, and nothing noted, when it came too late: the
        fact or something its window held was forgotten or reworded meanwhile."""
        with self._change() as db:
            if self.facts([entry.fact]).get(entry.fact) != fact or not self._stands(context):
                return False
            db.execute(
                "DELETE FROM ledger WHERE fact = ? AND fingerprint = ?", (entry.fact, entry.fingerprint)
            )
            db.execute(
                f"INSERT INTO ledger ({_ENTRY}) VALUES (?, ?, ?, ?, ?, ?)",
                (entry.fact, entry.owner, entry.fingerprint, entry.key, entry.tokens, entry.line),
            )
            held: list[tuple[str | None, int | None]] = [(other.fact, None) for other in context.facts]
            held += [(None, turn) for turn in context.turns]
            db.executemany(
                "INSERT INTO held (fact, fingerprint, other, turn) VALUES (?, ?, ?, ?)",
                [(entry.fact, entry.fingerprint, *what) for what in held],
            )
            return True

    def ledger(self, ids: Iterable[str], fingerprint: str) -> dict[str, LedgerEntry]:
        """The blobs of those of `ids` that have one under `fingerprint`."""
        found = self._entries(f"fact {_AMONG} AND fingerprint = ?", json.dumps(list(ids)), fingerprint)
        return {entry.fact: entry for entry in found}

    def strike_blobs(self, keys: Sequence[str]) -> None:
        """Remove from the ledger blobs that are no longer at hand."""
        with self._change() as db:
            db.execute(f"DELETE FROM ledger WHERE key {_AMONG}", (json.dumps(keys),))

    def _stands(self, context: Context) -> bool:
        known = self.facts(fact.fact for fact in context.facts)
        turns = json.dumps(list(context.turns))
        said = self._read(f"SELECT count(*) FROM turns WHERE number {_AMONG} AND text IS NOT NULL", turns)[0][
            0
        ]
        return said == len(context.turns) and all(known.get(fact.fact) == fact for fact in context.facts)

    def _entries(self, condition: str, *values: str) -> list[LedgerEntry]:
        return [
            LedgerEntry(*row) for row in self._read(f"SELECT {_ENTRY} FROM ledger WHERE {condition}", *values)
        ]

    # -- forgetting ------------------------------------------------------------------------------------------

    def forget_facts(self, ids: Sequence[str]) -> Forgotten:
        """Delete facts, the text of every turn that said nothing but them, and every ledger entry whose
        window held either. All of `ids` are banned from coming back, known or not."""
        with self._change() as db:
            forgotten = self._take_words(db, list(self.facts(ids).values()))
            db.execute(f"DELETE FROM facts WHERE fact {_AMONG}", (json.dumps(ids),))
            db.execute("INSERT OR IGNORE INTO forgotten SELECT value FROM json_each(?)", (json.dumps(ids),))
            return forgotten

    def reword_fact(self, fact: Fact) -> Forgotten:
        """Give a fact other words. What its old words were in is treated as in `forget_facts`; it keeps its
        place."""
        with self._change() as db:
            forgotten = self._take_words(db, list(self.facts([fact.fact]).values()))
            self._put(db, fact)
            return forgotten

    def forget_everything(self) -> Forgotten:
        """Empty the journal. The ids stay banned."""
        with self._change() as db:
            forgotten = Forgotten(tuple(self._facts("?", 1)), tuple(self._entries("1")))
            db.execute("INSERT OR IGNORE INTO forgotten SELECT fact FROM facts")
            for table in ("held", "ledger", "sources", "facts", "turns"):
                db.execute(f"DELETE FROM {table}")
            return forgotten

    def _take_words(self, db: sqlite3.Connection, facts: Sequence[Fact]) -> Forgotten:
        """Redact the turns that said nothing but `facts`, and strike the blobs that held either."""
        ids = json.dumps([fact.fact for fact in facts])
        turns = [
            row[0]
            for row in self._read(
                f"SELECT turn FROM sources WHERE turn {_AMONG} GROUP BY turn HAVING min(fact {_AMONG})",
                json.dumps([turn for fact in facts for turn in fact.turns]),
                ids,
            )
        ]
        _redact(db, turns)
        window = f"(SELECT fact, fingerprint FROM held WHERE other {_AMONG} OR turn {_AMONG})"
        blobs = self._entries(
            f"fact {_AMONG} OR (fact, fingerprint) IN {window}", ids, ids, json.dumps(turns)
        )
        db.executemany(
            "DELETE FROM ledger WHERE fact = ? AND fingerprint = ?",
            [(entry.fact, entry.fingerprint) for entry in blobs],
        )
        own = {fact.fact for fact in facts}
        bereaved = dict.fromkeys(entry.fact for entry in blobs if entry.fact not in own)
        return Forgotten(tuple(facts), tuple(blobs), tuple(bereaved))

    # -- inside ----------------------------------------------------------------------------------------------

    def _read(self, query: str, *values: str | int) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it is durable when the block is left, or none of it happened."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def _redact(db: sqlite3.Connection, turns: Iterable[int]) -> None:
    db.executemany(
        "UPDATE turns SET text = NULL, speaker = '' WHERE number = ?", [(number,) for number in turns]
    )


def _turn(row: Any) -> Turn:
    number, ordinal, session, role, speaker, text, said_at = row
    return Turn(number, ordinal, session, role, speaker, text, _when(said_at))


def _iso(when: datetime | None) -> str | None:
    return None if when is None else when.isoformat()


def _when(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _close(before: datetime | None, after: datetime | None) -> bool:
    if before is None or after is None:
        return before is after
    if (before.tzinfo is None) != (after.tzinfo is None):
        before, after = (when if when.tzinfo else when.replace(tzinfo=UTC) for when in (before, after))
    return abs(after - before) < SESSION_GAP
