"""The journal of one memory: turns, facts, ledger, intents, failed calls and pending forgets in one SQLite file.

The journal only records. It decides neither what is encoded nor what is shown, and knows no engine, no prompt and no
mem0. Everything a method wrote is durable when the method returns, unless it says otherwise.

Forgetting a fact deletes the text of all turns it came from, whatever else they say: no code can tell which of their
words made the fact, and a paraphrase left behind would end up in the windows of other facts.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from inferscale_memory.journal.database import AMONG, Database, as_list
from inferscale_memory.journal.facts import Facts
from inferscale_memory.journal.failed_adds import FailedAdds
from inferscale_memory.journal.intents import Intents
from inferscale_memory.journal.known import Epoch, KnownFact, epoch, known_facts
from inferscale_memory.journal.ledger import Ledger
from inferscale_memory.journal.pending_forgets import PendingForgets
from inferscale_memory.journal.records import Fact, LedgerEntry
from inferscale_memory.journal.retention import drop_empty
from inferscale_memory.journal.turns import SESSION_GAP, Turns, take_text


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was forgotten together with a text.

    Attributes:
        facts: the facts that were forgotten, as they were.
        blobs: ledger entries that are no longer valid: of these facts, of facts whose window held a forgotten text, and
            of blobs that depend on such a blob.
        orphaned: ids of the facts that lost a blob only because of its window. They are to be encoded again.
        touched: other facts that came from forgotten turns.
        turns: scope and number of the forgotten turns that were the source of no fact.
    """

    facts: tuple[Fact, ...] = ()
    blobs: tuple[LedgerEntry, ...] = ()
    orphaned: tuple[str, ...] = ()
    touched: tuple[Fact, ...] = ()
    turns: tuple[tuple[str, int], ...] = ()


class Journal:
    """One journal. Any number of threads may use it; another process may have the same file open.

    Attributes:
        path: its file.
        database: the connection that everything below shares.
        turns: what was said.
        facts: what is remembered.
        ledger: the blobs of the facts.
        intents: what was begun and is not finished.
        failed_adds: calls to `add` that are to be made again.
        pending_forgets: what the engine has yet to be told to forget.

    Args:
        path: created with its folder if it does not exist.
        session_gap: turns of one scope at least this far apart belong to different sessions.
        in_memory: work on a copy in memory, for a folder that cannot be written.
        checked: the caller has called `schema.repair` on the file, which is otherwise done here.

    Raises:
        sqlite3.Error: the file is not a journal.
    """

    def __init__(
        self,
        path: Path,
        *,
        session_gap: timedelta = SESSION_GAP,
        in_memory: bool = False,
        checked: bool = False,
    ) -> None:
        self.path = path
        self.database = Database(path, in_memory=in_memory, checked=checked)
        try:
            self.turns = Turns(self.database, session_gap)
            self.facts = Facts(self.database)
            self.ledger = Ledger(self.database, self.facts)
            self.intents = Intents(self.database)
            self.failed_adds = FailedAdds(self.database)
            self.pending_forgets = PendingForgets(self.database)
        except BaseException:
            self.database.close()
            raise

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        self.database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything written within the block is one transaction."""
        with self.database.change():
            yield

    def is_new(self) -> bool:
        """Whether nothing was ever entered."""
        query = "SELECT 1 FROM (SELECT 1 FROM turns UNION ALL SELECT 1 FROM facts UNION ALL SELECT 1 FROM forgotten)"
        return not self.database.read(f"{query} LIMIT 1")

    def embedder(self) -> str | None:
        """The name of the model that computed the vectors of the facts; None if it was never noted."""
        rows = self.database.read("SELECT model FROM embedder")
        return rows[0][0] if rows else None

    def note_embedder(self, model: str) -> None:
        with self.database.change() as db:
            db.execute("DELETE FROM embedder")
            db.execute("INSERT INTO embedder (model) VALUES (?)", (model,))

    def known(self, ids: Iterable[str], fingerprint: str = "") -> tuple[Epoch, dict[str, KnownFact]]:
        """Those of `ids` that are known, with their blobs under `fingerprint`, and the epoch in which that is so."""
        return known_facts(self.database, ids, fingerprint)

    def epoch(self) -> Epoch:
        """The epoch now. While it stays the same, no fact was forgotten or reworded."""
        return epoch(self.database)

    # -- forgetting ------------------------------------------------------------------------------------------

    def forget_facts(self, ids: Sequence[str]) -> Forgotten:
        """Delete facts, the text of their turns, and every ledger entry computed from either. All of `ids` get a
        tombstone, known or not."""
        with self.database.change() as db:
            facts = list(self.facts.get(ids).values())
            turns = self.facts.turns_of(ids)
            forgotten = self._forget_text(db, facts, turns)
            for table in ("facts", "echoes"):
                db.execute(f"DELETE FROM {table} WHERE fact {AMONG}", (as_list(ids),))
            db.execute("INSERT OR IGNORE INTO forgotten SELECT value FROM json_each(?)", (as_list(ids),))
            drop_empty(db, turns)
            return forgotten

    def reword_fact(self, fact: Fact) -> Forgotten:
        """Replace a fact. If its text changes, it loses its turns, which are treated as in `forget_facts`. It keeps its
        place."""
        with self.database.change() as db:
            old = list(self.facts.get([fact.fact]).values())
            reworded = [known.fact for known in old if known.text != fact.text]
            forgotten = self._forget_text(db, old, self.facts.turns_of(reworded))
            db.execute(f"DELETE FROM echoes WHERE fact {AMONG}", (as_list(reworded),))
            self.facts.write([fact])
            return forgotten

    def forget_turns(self, numbers: Collection[int]) -> Forgotten:
        """Delete the text of turns, and every ledger entry computed from it."""
        with self.database.change() as db:
            forgotten = self._forget_text(db, (), numbers)
            drop_empty(db, numbers)
            return forgotten

    def forget_everything(self) -> Forgotten:
        """Empty turns, facts and ledger. Every fact gets a tombstone."""
        with self.database.change() as db:
            forgotten = Forgotten(
                tuple(self.facts.all()), tuple(self.ledger.all()), turns=self.turns.without_fact("?", 1)
            )
            db.execute("INSERT OR IGNORE INTO forgotten SELECT fact FROM facts")
            for table in ("held", "stands", "ledger", "echoes", "sources", "facts", "turns"):
                db.execute(f"DELETE FROM {table}")
            return forgotten

    def scrub(self) -> bool:
        """Remove every forgotten text from the bytes of the file. False if another connection prevented it."""
        return self.database.scrub()

    def _forget_text(
        self, db: sqlite3.Connection, facts: Sequence[Fact], turns: Collection[int]
    ) -> Forgotten:
        """Delete the text of `turns`, and the ledger entries of every blob computed from `facts` or `turns`."""
        sources = self.facts.drawn_from(turns)
        without_fact = self.turns.without_fact(f"number {AMONG}", as_list(turns))
        take_text(db, turns)
        own = {fact.fact for fact in facts}
        blobs = self.ledger.remove(db, [fact.fact for fact in facts], turns)
        orphaned = dict.fromkeys(entry.fact for entry in blobs if entry.fact not in own)
        touched = [fact for name, fact in self.facts.get(sources).items() if name not in own]
        return Forgotten(tuple(facts), tuple(blobs), tuple(orphaned), tuple(touched), without_fact)
