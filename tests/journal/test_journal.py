"""The turn log and the ledger, on real SQLite files."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from inferscale_memory.journal import Context, Fact, Journal, LedgerEntry, NewTurn

NOON = datetime(2024, 5, 12, 12, 0, tzinfo=UTC)
MODEL = "model-1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal(path)
    yield journal
    journal.close()


def turn(text: str, when: datetime | None = NOON) -> NewTurn:
    return NewTurn("user", "User", text, when)


def fact(name: str, turns: tuple[int, ...] = (), session: int | None = None, text: str = "words") -> Fact:
    return Fact(
        name, "user:ada", "user_id=ada", f"tag-{name}", f"{text} of {name}", "User", NOON, session, turns
    )


def entry(of: Fact, key: str = "") -> LedgerEntry:
    return LedgerEntry(of.fact, of.owner, MODEL, key or f"key-{of.fact}", 7, "line")


def said(journal: Journal, session: int) -> list[str | None]:
    return [turn.text for turn in journal.turns_of_session(session)]


class TestTurns:
    def test_they_are_counted_per_scope_and_never_twice(self, journal: Journal) -> None:
        first = journal.append_turns("a", [turn("one"), turn("two")])
        other = journal.append_turns("b", [turn("elsewhere")])
        journal.redact_turns([first[1].number])
        third = journal.append_turns("a", [turn("three")])
        assert [t.ordinal for t in (*first, *other, *third)] == [0, 1, 0, 2]

    def test_an_hour_between_two_turns_begins_another_session(self, journal: Journal) -> None:
        close = turn("soon after", NOON + timedelta(minutes=59))
        late = turn("later", close.when and close.when + timedelta(hours=1))
        one, two, three = journal.append_turns("a", [turn("first"), close, late])
        assert one.session == two.session == one.number
        assert three.session == three.number

    def test_a_scope_that_is_one_session_knows_no_gap(self, journal: Journal) -> None:
        turns = [turn("first"), turn("next day", NOON + timedelta(days=1))]
        one, two = journal.append_turns("a", turns, one_session=True)
        assert one.session == two.session

    def test_times_with_and_without_a_zone_can_be_compared(self, journal: Journal) -> None:
        one, two = journal.append_turns("a", [turn("first"), turn("second", NOON.replace(tzinfo=None))])
        assert one.session == two.session

    def test_undated_turns_follow_each_other_but_no_dated_one(self, journal: Journal) -> None:
        one, two, three = journal.append_turns("a", [turn("first"), turn("?", None), turn("??", None)])
        assert one.session != two.session
        assert two.session == three.session

    def test_they_outlive_the_process(self, journal: Journal, path: Path) -> None:
        [logged] = journal.append_turns("a", [turn("durable")])
        journal.close()
        again = Journal(path)
        assert again.turns_of_session(logged.session) == [logged]
        again.close()


class TestFacts:
    def test_a_fact_is_read_as_it_was_written(self, journal: Journal) -> None:
        turns = journal.append_turns("a", [turn("one"), turn("two")])
        written = fact("f", tuple(t.number for t in turns), turns[0].session)
        assert journal.write_facts([written]) == ["f"]
        assert journal.facts(["f", "unknown"]) == {"f": written}

    def test_writing_a_fact_again_keeps_its_place(self, journal: Journal) -> None:
        [logged] = journal.append_turns("a", [turn("one")])
        first, second = (fact(name, (logged.number,), logged.session) for name in "ab")
        journal.write_facts([first, second])
        journal.write_facts([first])
        assert journal.facts_of_session(logged.session) == [first, second]

    def test_a_forgotten_fact_stays_away_until_it_is_allowed_back(self, journal: Journal) -> None:
        journal.write_facts([fact("f")])
        journal.forget_facts(["f"])
        assert journal.write_facts([fact("f")]) == []
        journal.allow(["f"])
        assert journal.write_facts([fact("f")]) == ["f"]

    def test_an_unknown_fact_can_be_banned(self, journal: Journal) -> None:
        forgotten = journal.forget_facts(["f"])
        assert forgotten.facts == ()
        assert journal.write_facts([fact("f")]) == []


class TestForgetting:
    def test_a_turn_that_said_nothing_else_loses_its_words(self, journal: Journal) -> None:
        one, two = journal.append_turns("a", [turn("one"), turn("two")])
        journal.write_facts([fact("f", (one.number,)), fact("g", (two.number,))])
        journal.forget_facts(["f"])
        assert said(journal, one.session) == ["two"]

    def test_a_turn_that_said_something_else_keeps_them(self, journal: Journal) -> None:
        [one] = journal.append_turns("a", [turn("one")])
        journal.write_facts([fact("f", (one.number,)), fact("g", (one.number,))])
        journal.forget_facts(["f"])
        assert said(journal, one.session) == ["one"]
        journal.forget_facts(["g"])
        assert said(journal, one.session) == []

    def test_facts_forgotten_together_take_the_turn_they_share(self, journal: Journal) -> None:
        [one] = journal.append_turns("a", [turn("one")])
        journal.write_facts([fact("f", (one.number,)), fact("g", (one.number,))])
        journal.forget_facts(["f", "g"])
        assert said(journal, one.session) == []

    def test_it_strikes_every_blob_whose_window_held_the_fact(self, journal: Journal) -> None:
        held, holder, stranger = fact("held"), fact("holder"), fact("stranger")
        journal.write_facts([held, holder, stranger])
        assert journal.enter_blob(entry(held), held, Context())
        assert journal.enter_blob(entry(holder), holder, Context(facts=(held,)))
        assert journal.enter_blob(entry(stranger), stranger, Context())
        forgotten = journal.forget_facts(["held"])
        assert {blob.key for blob in forgotten.blobs} == {"key-held", "key-holder"}
        assert forgotten.facts == (held,)
        assert forgotten.bereaved == ("holder",)
        assert set(journal.ledger(["held", "holder", "stranger"], MODEL)) == {"stranger"}

    def test_it_strikes_every_blob_whose_window_held_its_turn(self, journal: Journal) -> None:
        [one] = journal.append_turns("a", [turn("one")])
        source, later = fact("source", (one.number,)), fact("later")
        journal.write_facts([source, later])
        journal.enter_blob(entry(later), later, Context(turns=(one.number,)))
        assert journal.forget_facts(["source"]).bereaved == ("later",)

    def test_other_words_are_a_forgetting_of_the_old_ones(self, journal: Journal) -> None:
        [one] = journal.append_turns("a", [turn("one")])
        old, later = fact("f", (one.number,), one.session), fact("later")
        journal.write_facts([old, later])
        journal.enter_blob(entry(old), old, Context())
        journal.enter_blob(entry(later), later, Context(facts=(old,)))
        new = replace(old, text="new words", turns=())
        forgotten = journal.reword_fact(new)
        assert {blob.fact for blob in forgotten.blobs} == {"f", "later"}
        assert forgotten.bereaved == ("later",)
        assert journal.facts(["f"]) == {"f": new}
        assert said(journal, one.session) == []

    def test_everything_can_be_forgotten(self, journal: Journal) -> None:
        [one] = journal.append_turns("a", [turn("one")])
        known = fact("f", (one.number,))
        journal.write_facts([known])
        journal.enter_blob(entry(known), known, Context())
        forgotten = journal.forget_everything()
        assert forgotten.facts == (known,)
        assert forgotten.blobs == (entry(known),)
        assert journal.facts(["f"]) == {}
        assert journal.write_facts([known]) == []

    def test_forgotten_words_are_not_left_in_the_file(self, journal: Journal, path: Path) -> None:
        [one] = journal.append_turns("a", [turn("a very secret turn")])
        journal.write_facts([fact("f", (one.number,), text="a very secret fact")])
        journal.forget_facts(["f"])
        journal.close()
        assert b"very secret" not in path.read_bytes()


class TestLedger:
    def test_a_blob_that_comes_after_its_fact_was_forgotten_is_not_entered(self, journal: Journal) -> None:
        late = fact("f")
        journal.write_facts([late])
        journal.forget_facts(["f"])
        assert not journal.enter_blob(entry(late), late, Context())

    def test_nor_one_of_words_that_changed_meanwhile(self, journal: Journal) -> None:
        late = fact("f")
        journal.write_facts([late])
        journal.reword_fact(replace(late, text="other"))
        assert not journal.enter_blob(entry(late), late, Context())

    @pytest.mark.parametrize("what", ["fact", "reworded fact", "turn"])
    def test_nor_one_whose_window_held_what_was_forgotten_meanwhile(
        self, journal: Journal, what: str
    ) -> None:
        [one] = journal.append_turns("a", [turn("one")])
        late, held = fact("f"), fact("held", (one.number,))
        journal.write_facts([late, held])
        if what == "reworded fact":
            journal.reword_fact(replace(held, text="other", turns=()))
        else:
            journal.forget_facts(["held"])
        context = Context(turns=(one.number,)) if what == "turn" else Context(facts=(held,))
        assert not journal.enter_blob(entry(late), late, context)

    def test_a_newer_blob_replaces_the_older_and_its_window(self, journal: Journal) -> None:
        held, of = fact("held"), fact("f")
        journal.write_facts([held, of])
        journal.enter_blob(entry(of, "old"), of, Context(facts=(held,)))
        journal.enter_blob(entry(of, "new"), of, Context())
        assert journal.ledger(["f"], MODEL)["f"].key == "new"
        assert journal.forget_facts(["held"]).bereaved == ()

    def test_each_model_has_its_own(self, journal: Journal) -> None:
        of = fact("f")
        journal.write_facts([of])
        journal.enter_blob(entry(of), of, Context())
        assert journal.ledger(["f"], "model-2") == {}

    def test_lost_blobs_can_be_struck(self, journal: Journal) -> None:
        of = fact("f")
        journal.write_facts([of])
        journal.enter_blob(entry(of), of, Context())
        journal.strike_blobs(["key-f"])
        assert journal.ledger(["f"], MODEL) == {}


class TestFile:
    def test_many_threads_write_at_once(self, journal: Journal) -> None:
        def write(number: int) -> int:
            [logged] = journal.append_turns(f"scope-{number % 4}", [turn(f"turn {number}")])
            journal.write_facts([fact(f"f{number}", (logged.number,), logged.session)])
            return logged.ordinal

        with ThreadPoolExecutor(8) as pool:
            ordinals = list(pool.map(write, range(64)))
        assert sorted(ordinals) == sorted(list(range(16)) * 4)
        assert len(journal.facts([f"f{number}" for number in range(64)])) == 64

    def test_a_journal_of_another_format_is_refused(self, journal: Journal, path: Path) -> None:
        journal.close()
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version = 99")
        db.close()
        with pytest.raises(sqlite3.DatabaseError, match="format 99"):
            Journal(path)

    def test_closing_twice_is_harmless(self, journal: Journal) -> None:
        journal.close()
        journal.close()
