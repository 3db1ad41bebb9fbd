"""The facts, the turns they came from, and the tombstones of those that were forgotten."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from inferscale_memory.journal.database import AMONG, Database, as_list
from inferscale_memory.journal.records import Fact, from_iso, instant, to_iso
from inferscale_memory.journal.words import packed

_COLUMNS = "fact, owner, scope, tag, text, speaker, said_at, session, verbatim, expires"


class Facts:
    """The facts of one journal. A forgotten fact leaves a tombstone: it can be written again only after
    `remove_tombstones`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def write(self, facts: Iterable[Fact]) -> list[str]:
        """Enter facts; a known one is replaced and keeps its place. Returns the ids that were entered: a fact with a
        tombstone is not."""
        with self._database.change() as db:
            return [fact.fact for fact in facts if self._write(db, fact)]

    def _write(self, db: sqlite3.Connection, fact: Fact) -> bool:
        if self._database.read("SELECT 1 FROM forgotten WHERE fact = ?", fact.fact):
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
                to_iso(fact.when),
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

    def get(self, ids: Iterable[str]) -> dict[str, Fact]:
        """Those of `ids` that are known."""
        return {fact.fact: fact for fact in self._facts(f"fact {AMONG}", as_list(ids))}

    def of_session(self, session: int) -> list[Fact]:
        """The facts of a session in the order in which they were first written."""
        return self._facts("session = ?", session)

    def in_scopes(self, wanted: Callable[[str], bool]) -> list[str]:
        """Ids of the facts in every scope for which `wanted` is true."""
        return self._database.column_in_scopes("facts", "fact", wanted)

    def before(self, fact: str, wanted: Callable[[str], bool], limit: int) -> list[Fact] | None:
        """The facts written before `fact` in every scope for which `wanted` is true, in order. None if there are more
        than `limit`."""
        scopes = [row[0] for row in self._database.read("SELECT DISTINCT scope FROM facts") if wanted(row[0])]
        earlier = f"scope {AMONG} AND place < (SELECT place FROM facts WHERE fact = ?)"
        names = self._database.read(
            f"SELECT fact FROM facts WHERE {earlier} LIMIT ?", as_list(scopes), fact, limit + 1
        )
        if len(names) > limit:
            return None
        return self._facts(f"fact {AMONG}", as_list(name for (name,) in names))

    def places(self, ids: Iterable[str]) -> dict[str, int]:
        """Those of `ids` that are known, each with a number that grows in the order of first writing."""
        rows = self._database.read(f"SELECT fact, place FROM facts WHERE fact {AMONG}", as_list(ids))
        return dict(rows)

    def all(self) -> list[Fact]:
        """Every known fact, in the order of first writing."""
        return self._facts("?", 1)

    def all_ids(self) -> list[str]:
        """Ids of every known fact, in the order of first writing."""
        return [row[0] for row in self._database.read("SELECT fact FROM facts ORDER BY place")]

    def count(self) -> int:
        """How many facts are known."""
        return int(self._database.read("SELECT count(*) FROM facts")[0][0])

    def expired(self, now: datetime) -> list[str]:
        """Ids of the facts that have expired by `now`."""
        rows = self._database.read("SELECT fact FROM facts WHERE expires <= ?", instant(now))
        return [row[0] for row in rows]

    def link_turns(self, ids: Iterable[str], turns: Iterable[int]) -> None:
        """Note that these turns repeat these facts, known or not. The turns are forgotten with the facts."""
        pairs = [(fact, turn) for turn in turns for fact in ids]
        with self._database.change() as db:
            db.executemany("INSERT OR IGNORE INTO echoes (fact, turn) VALUES (?, ?)", pairs)

    def turns_of(self, ids: Iterable[str]) -> list[int]:
        """Numbers of the turns that these facts came from or that repeat them."""
        among, names = f"fact {AMONG}", as_list(ids)
        rows = self._database.read(
            f"SELECT turn FROM sources WHERE {among} UNION SELECT turn FROM echoes WHERE {among} ORDER BY turn",
            names,
            names,
        )
        return [row[0] for row in rows]

    def drawn_from(self, turns: Iterable[int]) -> list[str]:
        """Ids of the facts that came from these turns."""
        rows = self._database.read(f"SELECT fact FROM sources WHERE turn {AMONG}", as_list(turns))
        return [row[0] for row in rows]

    def tombstones(self, ids: Iterable[str]) -> set[str]:
        """Those of `ids` that were forgotten and not allowed again since."""
        rows = self._database.read(f"SELECT fact FROM forgotten WHERE fact {AMONG}", as_list(ids))
        return {row[0] for row in rows}

    def remove_tombstones(self, ids: Sequence[str]) -> None:
        """Allow forgotten facts again, since they are about to be written anew."""
        if self.tombstones(ids):
            with self._database.change() as db:
                db.execute(f"DELETE FROM forgotten WHERE fact {AMONG}", (as_list(ids),))

    def _facts(self, condition: str, value: str | int) -> list[Fact]:
        with self._database.lock:
            rows = self._database.read(
                f"SELECT {_COLUMNS} FROM facts WHERE {condition} ORDER BY place", value
            )
            sources: dict[str, list[int]] = {row[0]: [] for row in rows}
            for fact, turn in self._database.read(
                f"SELECT fact, turn FROM sources WHERE fact {AMONG} ORDER BY turn", as_list(sources)
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
                from_iso(at),
                session,
                tuple(sources[fact]),
                bool(verbatim),
                expires,
            )
            for fact, owner, scope, tag, text, speaker, at, session, verbatim, expires in rows
        ]
