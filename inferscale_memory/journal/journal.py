"""The turn log and the ledger, in one SQLite file.

The log says what was said, in order; the ledger says which blob stands for which fact and what that blob's
window held; the intents say what was begun, so that a start after a crash can finish it. What a call has returned
from is durable.

A forgotten fact takes the words of all its turns with it, whatever else they said: nobody knows which of them were
the fact's, and a paraphrase left behind would go on into the windows of other facts.

It must never decide what is encoded or shown: it only remembers. It knows no engine, no prompt and no mem0.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import RLock
from typing import Any

from inferscale_memory.journal.failed import FailedAdds
from inferscale_memory.journal.owed import OwedForgetting
from inferscale_memory.journal.records import Context, Fact, Intent, LedgerEntry, NewTurn, Turn, instant
from inferscale_memory.journal.retention import TRIMMED_EVERY, drop_empty, trim
from inferscale_memory.journal.said import says
from inferscale_memory.journal.schema import in_memory as copy_of
from inferscale_memory.journal.schema import opened
from inferscale_memory.journal.words import packed
from inferscale_memory.lifetime import closed_over_fork
from inferscale_memory.storage.scrub import scrub
from inferscale_memory.storage.sqlite import transaction, trouble

SESSION_GAP = timedelta(hours=1)
"""Turns of one scope at least this far apart belong to different sessions, unless a journal is told otherwise."""

_TURN = "number, ordinal, session, role, speaker, text, said_at"
_FACT = "fact, owner, scope, tag, text, speaker, said_at, session, verbatim, expires"
_ENTRY = "fact, owner, fingerprint, key, tokens, line, chained"
_AMONG = "IN (SELECT value FROM json_each(?))"
_PILE = f"""
WITH RECURSIVE pile (fact, fingerprint) AS (
    SELECT fact, fingerprint FROM ledger WHERE {{}}
    UNION
    SELECT stands.fact, stands.fingerprint FROM pile
        JOIN ledger USING (fact, fingerprint) JOIN stands ON stands.base = ledger.key
)
SELECT {_ENTRY} FROM ledger WHERE (fact, fingerprint) IN (SELECT fact, fingerprint FROM pile)
"""
"""The blobs for which a condition holds, those that stand on them, and so on up."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What goes with the words that were just forgotten.

    Attributes:
        facts: those that were known, as they were.
        blobs: ledger entries that no longer hold: of these facts, of others whose window held them, and of those that
            stand on such a blob.
        bereaved: ids of the facts that lost a blob only because of their window: they are to be encoded
            again.
        touched: other facts that were drawn from turns that were forgotten.
        turns: scope and number of the forgotten turns that no fact was drawn from.
    """

    facts: tuple[Fact, ...] = ()
    blobs: tuple[LedgerEntry, ...] = ()
    bereaved: tuple[str, ...] = ()
    touched: tuple[Fact, ...] = ()
    turns: tuple[tuple[str, int], ...] = ()


class Journal:
    """One journal. Any number of threads may call it; another process may hold the same file.

    Attributes:
        path: its file.
        failed_adds: calls to `add` that are to be made again.
        owed: what an engine is still to be told to forget.

    Invariants:
        - A ledger entry exists only for a fact that exists, and its window only held text that still exists.
        - The blobs that a blob stands on have ledger entries too, be they lost: from a text that is forgotten every
          blob is found that it went into, however deep the pile.
        - A forgotten fact comes back only after `allow`.
    """

    def __init__(self, path: Path, *, session_gap: timedelta = SESSION_GAP, in_memory: bool = False) -> None:
        """Open the journal in file `path`, creating it and its folder; with `in_memory` a copy of it, for a folder that
        cannot be written. Raises `sqlite3.Error` on a foreign file."""
        self.path = path
        self._session_gap = session_gap
        self._lock = RLock()
        self._closed = False
        self._open: sqlite3.Connection | None = copy_of(path) if in_memory else opened(path)
        try:
            self.failed_adds = FailedAdds(self._change, self._read)
            self.owed = OwedForgetting(self._change, self._read)
        except BaseException:
            self._db.close()
            raise
        if not in_memory:
            closed_over_fork(self)

    @property
    def _db(self) -> sqlite3.Connection:
        """The file, opened again where it was closed for a fork. For who holds the lock."""
        if self._open is None:
            self._open = opened(self.path)
        return self._open

    def before_fork(self) -> None:
        self._lock.acquire()
        if self._open is not None and not self._closed and not self._open.in_transaction:
            self._open.close()
            self._open = None

    def after_fork(self) -> None:
        self._lock.release()

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        with self._lock:
            self._closed = True
            self._db.close()

    # -- the log ---------------------------------------------------------------------------------------------

    def append_turns(self, scope: str, turns: Sequence[NewTurn], *, one_session: bool = False) -> list[Turn]:
        """Log `turns` at the end of `scope`. With `one_session` the whole scope is one session; otherwise a
        session ends where two turns are the session gap apart, and where dated turns follow undated ones or the
        reverse."""
        with self._change() as db:
            last = self._last_turn(scope)
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
                    (scope, ordinal, turn.role, turn.speaker, packed(turn.text), _iso(turn.when)),
                ).lastrowid
                assert number is not None
                session = last.session if last is not None and follows else number
                db.execute("UPDATE turns SET session = ? WHERE number = ?", (session, number))
                if last is not None and last.text is None:
                    drop_empty(db, [last.number])
                last = Turn(number, ordinal, session, turn.role, turn.speaker, turn.text, turn.when)
                logged.append(last)
            return logged

    def redact_turns(self, numbers: Iterable[int]) -> None:
        """Take the words out of turns."""
        with self._change() as db:
            gone = list(numbers)
            _redact(db, gone)
            drop_empty(db, gone)

    def turns(self, numbers: Iterable[int]) -> list[Turn]:
        """Those of these turns that were not forgotten, in order."""
        rows = self._read(
            f"SELECT {_TURN} FROM turns WHERE number {_AMONG} AND words IS NOT NULL ORDER BY number",
            json.dumps(list(numbers)),
        )
        return [_turn(row) for row in rows]

    def turns_saying(self, scope: str, words: Sequence[Sequence[str]]) -> list[int]:
        """Numbers of the owner's turns, in any scope that begins as this one does, that say the first of one of
        `words` or are one of its others, as an app's messages are that it sends again with every call. A turn that is
        a fact word for word is not among them."""
        owner = scope.split("&")[0]
        rows = self._read(
            # The apostrophe follows the ampersand.
            "SELECT number, text FROM turns WHERE (scope = ? OR (scope > ? AND scope < ?))"
            " AND words IS NOT NULL AND NOT EXISTS"
            " (SELECT 1 FROM sources JOIN facts USING (fact) WHERE turn = number AND verbatim)",
            owner,
            f"{owner}&",
            f"{owner}'",
        )
        same = {text for these in words for text in these}
        return [
            number for number, said in rows if said in same or any(says(said, these[0]) for these in words)
        ]

    def turns_within(self, wanted: Callable[[str], bool]) -> list[int]:
        """Numbers of the turns of every scope that is `wanted`."""
        return self._within("turns", "number", wanted)

    def turns_of_session(self, session: int) -> list[Turn]:
        """The turns of a session in order, without the forgotten ones."""
        rows = self._read(
            f"SELECT {_TURN} FROM turns WHERE session = ? AND words IS NOT NULL ORDER BY ordinal", session
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

    def link_again(self, ids: Iterable[str], turns: Iterable[int]) -> None:
        """These facts, known or not, were said once more in these turns, which go with them."""
        pairs = [(fact, turn) for turn in turns for fact in ids]
        with self._change() as db:
            db.executemany("INSERT OR IGNORE INTO echoes (fact, turn) VALUES (?, ?)", pairs)

    def turns_of(self, ids: Iterable[str]) -> list[int]:
        """Numbers of the turns that these facts came from, or that said them again."""
        name, among = json.dumps(list(ids)), f"fact {_AMONG}"
        rows = self._read(
            f"SELECT turn FROM sources WHERE {among} UNION SELECT turn FROM echoes WHERE {among} ORDER BY turn",
            name,
            name,
        )
        return [row[0] for row in rows]

    def allow(self, ids: Sequence[str]) -> None:
        """Lift the ban on facts that were forgotten: they are about to be written anew."""
        if self._read(f"SELECT 1 FROM forgotten WHERE fact {_AMONG} LIMIT 1", json.dumps(ids)):
            with self._change() as db:
                db.execute(f"DELETE FROM forgotten WHERE fact {_AMONG}", (json.dumps(ids),))

    def banned(self, ids: Iterable[str]) -> set[str]:
        """Those of `ids` that were forgotten and not written anew."""
        rows = self._read(f"SELECT fact FROM forgotten WHERE fact {_AMONG}", json.dumps(list(ids)))
        return {row[0] for row in rows}

    def facts(self, ids: Iterable[str]) -> dict[str, Fact]:
        """Those of `ids` that are known."""
        return {fact.fact: fact for fact in self._facts(f"fact {_AMONG}", json.dumps(list(ids)))}

    def places(self, ids: Iterable[str]) -> dict[str, int]:
        """Those of `ids` that are known, with numbers that say which was written first."""
        rows = self._read(f"SELECT fact, place FROM facts WHERE fact {_AMONG}", json.dumps(list(ids)))
        return dict(rows)

    def facts_within(self, wanted: Callable[[str], bool]) -> list[str]:
        """Ids of the facts of every scope that is `wanted`."""
        return self._within("facts", "fact", wanted)

    def facts_before(self, fact: str, wanted: Callable[[str], bool], most: int) -> list[Fact] | None:
        """The facts of every scope that is `wanted` that were written before `fact`, in order. None when there are more
        than `most`."""
        scopes = [row[0] for row in self._read("SELECT DISTINCT scope FROM facts") if wanted(row[0])]
        earlier = f"scope {_AMONG} AND place < (SELECT place FROM facts WHERE fact = ?)"
        names = self._read(
            f"SELECT fact FROM facts WHERE {earlier} LIMIT ?", json.dumps(scopes), fact, most + 1
        )
        if len(names) > most:
            return None
        return self._facts(f"fact {_AMONG}", json.dumps([name for (name,) in names]))

    def expired(self, now: datetime) -> list[str]:
        """Ids of the facts whose time is over."""
        rows = self._read("SELECT fact FROM facts WHERE expires <= ?", instant(now))
        return [row[0] for row in rows]

    def count(self) -> int:
        """How many facts it knows."""
        return int(self._read("SELECT count(*) FROM facts")[0][0])

    def is_new(self) -> bool:
        """Whether nothing was ever entered."""
        query = "SELECT 1 FROM (SELECT 1 FROM turns UNION ALL SELECT 1 FROM facts UNION ALL SELECT 1 FROM forgotten)"
        return not self._read(f"{query} LIMIT 1")

    def all_facts(self) -> list[str]:
        """Ids of all facts it knows."""
        return [row[0] for row in self._read("SELECT fact FROM facts ORDER BY place")]

    def embedder(self) -> str | None:
        """The name of the model that made the vectors of its facts; None where nobody has said it."""
        rows = self._read("SELECT model FROM embedder")
        return rows[0][0] if rows else None

    def note_embedder(self, model: str) -> None:
        with self._change() as db:
            db.execute("DELETE FROM embedder")
            db.execute("INSERT INTO embedder (model) VALUES (?)", (model,))

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
                expires,
            )
            for fact, owner, scope, tag, text, speaker, at, session, verbatim, expires in rows
        ]

    def _put(self, db: sqlite3.Connection, fact: Fact) -> bool:
        if self._read("SELECT 1 FROM forgotten WHERE fact = ?", fact.fact):
            return False
        db.execute(
            "INSERT INTO facts (fact, owner, scope, tag, words, speaker, said_at, session, verbatim, expires)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (fact) DO UPDATE SET"
            " owner = excluded.owner, scope = excluded.scope, tag = excluded.tag, words = excluded.words,"
            " speaker = excluded.speaker, said_at = excluded.said_at, session = excluded.session,"
            " verbatim = excluded.verbatim, expires = excluded.expires",
            (
                fact.fact,
                fact.owner,
                fact.scope,
                fact.tag,
                packed(fact.text),
                fact.speaker,
                _iso(fact.when),
                fact.session,
                int(fact.verbatim),
                fact.expires,
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
        fact, something its window held or a blob that it stands on was forgotten or replaced meanwhile."""
        with self._change() as db:
            if self.facts([entry.fact]).get(entry.fact) != fact or not self._stands(entry, context):
                return False
            self._inherit(db, entry)
            db.execute(
                "DELETE FROM ledger WHERE fact = ? AND fingerprint = ?", (entry.fact, entry.fingerprint)
            )
            db.execute(
                f"INSERT INTO ledger ({_ENTRY}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                astuple(entry),
            )
            self._note_made_of(db, entry, context)
            return True

    def _note_made_of(self, db: sqlite3.Connection, entry: LedgerEntry, context: Context) -> None:
        """What a blob was made of. A fact whose blob it stands on is found through that; and so is a blob that another
        one it stands on stands on in turn."""
        keys = json.dumps(context.blobs)
        on = {base.fact for base in self._entries(f"key {_AMONG}", keys)}
        held: list[tuple[str | None, int | None]] = [
            (other.fact, None) for other in context.facts if other.fact not in on
        ]
        held += [(None, turn) for turn in context.turns]
        db.executemany(
            "INSERT INTO held (fact, fingerprint, other, turn) VALUES (?, ?, ?, ?)",
            [(entry.fact, entry.fingerprint, *what) for what in held],
        )
        below = self._read(
            f"SELECT base FROM stands JOIN ledger USING (fact, fingerprint) WHERE ledger.key {_AMONG}", keys
        )
        deeper = {row[0] for row in below}
        db.executemany(
            "INSERT OR IGNORE INTO stands (fact, fingerprint, base) VALUES (?, ?, ?)",
            [(entry.fact, entry.fingerprint, base) for base in context.blobs if base not in deeper],
        )

    def _inherit(self, db: sqlite3.Connection, entry: LedgerEntry) -> None:
        """Another blob takes the place of the fact's old one: what stands on the old one is noted as made of the fact
        and of what that was made of, everything once."""
        for old in self._entries("fact = ? AND fingerprint = ?", entry.fact, entry.fingerprint):
            if old.key == entry.key:
                continue
            whose = {"fact": old.fact, "fingerprint": old.fingerprint, "key": old.key}
            db.execute(
                "INSERT INTO held (fact, fingerprint, other, turn)"
                " SELECT above.fact, above.fingerprint, below.other, below.turn FROM stands AS above,"
                " (SELECT other, turn FROM held WHERE fact = :fact AND fingerprint = :fingerprint"
                "  UNION SELECT :fact, NULL) AS below"
                " WHERE above.base = :key AND NOT EXISTS (SELECT 1 FROM held AS own WHERE own.fact = above.fact AND"
                " own.fingerprint = above.fingerprint AND own.other IS below.other AND own.turn IS below.turn)",
                whose,
            )
            db.execute(
                "INSERT OR IGNORE INTO stands (fact, fingerprint, base)"
                " SELECT above.fact, above.fingerprint, below.base FROM stands AS above, stands AS below"
                " WHERE below.fact = :fact AND below.fingerprint = :fingerprint AND above.base = :key",
                whose,
            )
            db.execute("DELETE FROM stands WHERE base = :key", whose)

    def ledger(self, ids: Iterable[str], fingerprint: str) -> dict[str, LedgerEntry]:
        """The blobs of those of `ids` that have one under `fingerprint`."""
        found = self._entries(
            f"fact {_AMONG} AND fingerprint = ? AND NOT lost", json.dumps(list(ids)), fingerprint
        )
        return {entry.fact: entry for entry in found}

    def named(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that stand for some fact: two that say the same may share a blob."""
        return {entry.key for entry in self._entries(f"key {_AMONG} AND NOT lost", json.dumps(keys))}

    def lose_blobs(self, keys: Sequence[str]) -> None:
        """These blobs are no longer at hand. What they were made of stays known, for the sake of those that stand on
        them."""
        with self._change() as db:
            db.execute(f"UPDATE ledger SET lost = 1 WHERE key {_AMONG}", (json.dumps(keys),))

    def _stands(self, entry: LedgerEntry, context: Context) -> bool:
        """Whether everything that the blob was made of is still what it was."""
        bases = self._entries(
            f"key {_AMONG} AND fingerprint = ?", json.dumps(context.blobs), entry.fingerprint
        )
        if {base.key for base in bases} != set(context.blobs):
            return False
        known = self.facts(fact.fact for fact in context.facts)
        turns = json.dumps(list(context.turns))
        said = self._read(f"SELECT count(*) FROM turns WHERE number {_AMONG} AND words IS NOT NULL", turns)[
            0
        ][0]
        return said == len(context.turns) and all(known.get(fact.fact) == fact for fact in context.facts)

    def _entries(self, condition: str, *values: str) -> list[LedgerEntry]:
        rows = self._read(f"SELECT {_ENTRY} FROM ledger WHERE {condition}", *values)
        return [_entry(row) for row in rows]

    def _pile(self, condition: str, *values: str) -> list[LedgerEntry]:
        """The entries for which `condition` holds, and all whose blobs stand on theirs."""
        return [_entry(row) for row in self._read(_PILE.format(condition), *values)]

    def _strike(self, db: sqlite3.Connection, entries: Iterable[LedgerEntry]) -> None:
        db.executemany(
            "DELETE FROM ledger WHERE fact = ? AND fingerprint = ?",
            [(entry.fact, entry.fingerprint) for entry in entries],
        )

    def blobs_saying(self, text: str) -> list[LedgerEntry]:
        """The blobs of facts that say `text`, those whose window held a fact or turn that does, and all that stand on
        one of them."""
        said = "(SELECT {} WHERE instr(folded(text), folded(?)))"
        facts, turns = said.format("fact FROM facts"), said.format("number FROM turns")
        window = f"(SELECT fact, fingerprint FROM held WHERE other IN {facts} OR turn IN {turns})"
        return self._pile(f"fact IN {facts} OR (fact, fingerprint) IN {window}", text, text, text)

    # -- forgetting ------------------------------------------------------------------------------------------

    def forget_facts(self, ids: Sequence[str]) -> Forgotten:
        """Delete facts, the text of their turns, and every ledger entry whose window held either. All of `ids`
        are banned from coming back, known or not."""
        with self._change() as db:
            facts = list(self.facts(ids).values())
            turns = self.turns_of(ids)
            forgotten = self._take_words(db, facts, turns)
            for table in ("facts", "echoes"):
                db.execute(f"DELETE FROM {table} WHERE fact {_AMONG}", (json.dumps(ids),))
            db.execute("INSERT OR IGNORE INTO forgotten SELECT value FROM json_each(?)", (json.dumps(ids),))
            drop_empty(db, turns)
            return forgotten

    def reword_fact(self, fact: Fact) -> Forgotten:
        """Give a fact another line. With another text it loses its turns, which are treated as in
        `forget_facts`; it keeps its place."""
        with self._change() as db:
            old = list(self.facts([fact.fact]).values())
            reworded = [known.fact for known in old if known.text != fact.text]
            forgotten = self._take_words(db, old, self.turns_of(reworded))
            db.execute(f"DELETE FROM echoes WHERE fact {_AMONG}", (json.dumps(reworded),))
            self._put(db, fact)
            return forgotten

    def forget_turns(self, numbers: Collection[int]) -> Forgotten:
        """Delete the text of turns, and every ledger entry whose window held it."""
        with self._change() as db:
            forgotten = self._take_words(db, (), numbers)
            drop_empty(db, numbers)
            return forgotten

    def forget_everything(self) -> Forgotten:
        """Empty the log and the ledger. The ids stay banned."""
        with self._change() as db:
            facts, blobs = self._facts("?", 1), self._entries("1")
            forgotten = Forgotten(tuple(facts), tuple(blobs), turns=self._alone("?", 1))
            db.execute("INSERT OR IGNORE INTO forgotten SELECT fact FROM facts")
            for table in ("held", "stands", "ledger", "echoes", "sources", "facts", "turns"):
                db.execute(f"DELETE FROM {table}")
            return forgotten

    def scrub(self) -> bool:
        """Leave nothing of what was forgotten in the file: it lay on pages that are zeroed, and is left in the
        write-ahead log alone. False where somebody else keeps it from being done."""
        with self._told(), self._lock:
            return scrub(self._db, (), "")

    def _take_words(self, db: sqlite3.Connection, facts: Sequence[Fact], turns: Collection[int]) -> Forgotten:
        """Redact `turns`, and strike the blobs of `facts`, of whatever held either, and all that stand on these."""
        ids, numbers = json.dumps([fact.fact for fact in facts]), json.dumps(list(turns))
        drawn = [row[0] for row in self._read(f"SELECT fact FROM sources WHERE turn {_AMONG}", numbers)]
        alone = self._alone(f"number {_AMONG}", numbers)
        _redact(db, turns)
        window = f"(SELECT fact, fingerprint FROM held WHERE other {_AMONG} OR turn {_AMONG})"
        blobs = self._pile(f"fact {_AMONG} OR (fact, fingerprint) IN {window}", ids, ids, numbers)
        self._strike(db, blobs)
        own = {fact.fact for fact in facts}
        bereaved = dict.fromkeys(entry.fact for entry in blobs if entry.fact not in own)
        touched = [fact for name, fact in self.facts(drawn).items() if name not in own]
        return Forgotten(tuple(facts), tuple(blobs), tuple(bereaved), tuple(touched), alone)

    def _alone(self, condition: str, value: str | int) -> tuple[tuple[str, int], ...]:
        """Scope and number of turns with words that no fact was drawn from."""
        rows = self._read(
            f"SELECT scope, number FROM turns WHERE {condition} AND words IS NOT NULL"
            " AND NOT EXISTS (SELECT 1 FROM sources WHERE turn = number)",
            value,
        )
        return tuple((scope, number) for scope, number in rows)

    # -- intents ---------------------------------------------------------------------------------------------

    def begin(self, intent: Intent) -> int:
        """Note what is about to be done; its number."""
        with self._change() as db:
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

    def blank(self, numbers: Collection[int]) -> None:
        """Of these only the scrub is left: the intents themselves hold the words."""
        with self._change() as db:
            db.execute(
                "UPDATE intents SET kind = 'scrub', fact = '', scope = '', words = ?, turns = '[]', facts = '[]'"
                f" WHERE number {_AMONG}",
                (packed("[]"), json.dumps(list(numbers))),
            )

    def finish(self, numbers: Collection[int]) -> None:
        """These are done. Not durable at once: what comes back after a crash is done twice, which is harmless."""
        if not numbers:
            return
        with self._lock:
            self._db.execute("PRAGMA synchronous = NORMAL")
            try:
                with self._change() as db:
                    db.execute(f"DELETE FROM intents WHERE number {_AMONG}", (json.dumps(list(numbers)),))
            finally:
                self._db.execute("PRAGMA synchronous = FULL")

    def begun(self) -> dict[int, Intent]:
        """What was begun and is not finished, by number."""
        rows = self._read("SELECT number, kind, fact, scope, said, turns, facts FROM intents ORDER BY number")
        begun = {}
        for number, kind, fact, scope, *lists in rows:
            try:
                begun[number] = Intent(kind, fact, scope, *(tuple(json.loads(listed)) for listed in lists))
            except ValueError:  # damaged: what it was about cannot be told, but its words must go
                begun[number] = Intent("scrub")
        return begun

    # -- inside ----------------------------------------------------------------------------------------------

    def _within(self, table: str, column: str, wanted: Callable[[str], bool]) -> list[Any]:
        scopes = [row[0] for row in self._read(f"SELECT DISTINCT scope FROM {table}") if wanted(row[0])]
        rows = self._read(f"SELECT {column} FROM {table} WHERE scope {_AMONG}", json.dumps(scopes))
        return [row[0] for row in rows]

    def _read(self, query: str, *values: str | int) -> list[Any]:
        with self._told(), self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of SQLite's as ours."""
        try:
            yield
        except sqlite3.ProgrammingError:  # it is closed
            raise
        except sqlite3.Error as error:
            raise trouble(self.path, error) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is written within the block is one transaction."""
        with self._change():
            yield

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction, or a part of the one under way: all of it is durable when the outermost block is
        left, or none of it happened."""
        with self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            with self._told(), transaction(self._db):
                yield self._db


def _redact(db: sqlite3.Connection, turns: Iterable[int]) -> None:
    db.executemany(
        "UPDATE turns SET words = NULL, speaker = '' WHERE number = ?", [(number,) for number in turns]
    )


def _turn(row: Any) -> Turn:
    number, ordinal, session, role, speaker, text, said_at = row
    return Turn(number, ordinal, session, role, speaker, text, _when(said_at))


def _entry(row: Any) -> LedgerEntry:
    fact, owner, fingerprint, key, tokens, line, chained = row
    return LedgerEntry(fact, owner, fingerprint, key, tokens, line, bool(chained))


def _iso(when: datetime | None) -> str | None:
    return None if when is None else when.isoformat()


def _when(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:  # damaged
        return None


def _close(before: datetime | None, after: datetime | None, gap: timedelta) -> bool:
    if before is None or after is None:
        return before is after
    if (before.tzinfo is None) != (after.tzinfo is None):
        before, after = (when if when.tzinfo else when.replace(tzinfo=UTC) for when in (before, after))
    return abs(after - before) < gap
