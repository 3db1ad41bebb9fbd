"""The turn log and the ledger, on real SQLite files."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Timer

import pytest

from inferscale_memory.journal import Context, Fact, Intent, Journal, LedgerEntry, NewTurn, schema
from inferscale_memory.journal.schema import STEPS
from inferscale_memory.journal.words import PAGE
from inferscale_memory.storage import scrub
from inferscale_memory.storage.file_search import find, spellings

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
    return [turn.text for turn in journal.turns.of_session(session)]


class TestTurns:
    def test_they_are_counted_per_scope_and_never_twice(self, journal: Journal) -> None:
        first = journal.turns.append("a", [turn("one"), turn("two")])
        other = journal.turns.append("b", [turn("elsewhere")])
        journal.turns.redact([first[1].number])
        third = journal.turns.append("a", [turn("three")])
        assert [t.ordinal for t in (*first, *other, *third)] == [0, 1, 0, 2]

    def test_an_hour_between_two_turns_begins_another_session(self, journal: Journal) -> None:
        close = turn("soon after", NOON + timedelta(minutes=59))
        late = turn("later", close.when and close.when + timedelta(hours=1))
        one, two, three = journal.turns.append("a", [turn("first"), close, late])
        assert one.session == two.session == one.number
        assert three.session == three.number

    def test_a_scope_that_is_one_session_knows_no_gap(self, journal: Journal) -> None:
        turns = [turn("first"), turn("next day", NOON + timedelta(days=1))]
        one, two = journal.turns.append("a", turns, one_session=True)
        assert one.session == two.session

    def test_times_with_and_without_a_zone_can_be_compared(self, journal: Journal) -> None:
        one, two = journal.turns.append("a", [turn("first"), turn("second", NOON.replace(tzinfo=None))])
        assert one.session == two.session

    def test_undated_turns_follow_each_other_but_no_dated_one(self, journal: Journal) -> None:
        one, two, three = journal.turns.append("a", [turn("first"), turn("?", None), turn("??", None)])
        assert one.session != two.session
        assert two.session == three.session

    def test_they_outlive_the_process(self, journal: Journal, path: Path) -> None:
        [logged] = journal.turns.append("a", [turn("durable")])
        journal.close()
        again = Journal(path)
        assert again.turns.of_session(logged.session) == [logged]
        again.close()


class TestFacts:
    def test_a_fact_is_read_as_it_was_written(self, journal: Journal) -> None:
        turns = journal.turns.append("a", [turn("one"), turn("two")])
        written = fact("f", tuple(t.number for t in turns), turns[0].session)
        assert journal.facts.write([written]) == ["f"]
        assert journal.facts.get(["f", "unknown"]) == {"f": written}

    def test_writing_a_fact_again_keeps_its_place(self, journal: Journal) -> None:
        [logged] = journal.turns.append("a", [turn("one")])
        first, second = (fact(name, (logged.number,), logged.session) for name in "ab")
        journal.facts.write([first, second])
        journal.facts.write([first])
        assert journal.facts.of_session(logged.session) == [first, second]

    def test_a_forgotten_fact_stays_away_until_it_is_allowed_back(self, journal: Journal) -> None:
        journal.facts.write([fact("f")])
        journal.forget_facts(["f"])
        assert journal.facts.write([fact("f")]) == []
        journal.facts.remove_tombstones(["f"])
        assert journal.facts.write([fact("f")]) == ["f"]

    def test_an_unknown_fact_can_be_banned(self, journal: Journal) -> None:
        forgotten = journal.forget_facts(["f"])
        assert forgotten.facts == ()
        assert journal.facts.write([fact("f")]) == []


def pile(journal: Journal, *names: str) -> list[Fact]:
    """Facts, the blob of each of which stands on that of the one before it."""
    facts = [fact(name) for name in names]
    journal.facts.write(facts)
    for place, of in enumerate(facts):
        below = facts[place - 1 : place] if place else []
        context = Context(tuple(below), (), tuple(f"key-{other.fact}" for other in below))
        assert journal.ledger.enter(entry(of), of, context)
    return facts


class TestForgetting:
    def test_a_turn_that_said_nothing_else_loses_its_words(self, journal: Journal) -> None:
        one, two = journal.turns.append("a", [turn("one"), turn("two")])
        journal.facts.write([fact("f", (one.number,)), fact("g", (two.number,))])
        journal.forget_facts(["f"])
        assert said(journal, one.session) == ["two"]

    def test_so_does_one_that_said_something_else_too(self, journal: Journal) -> None:
        one, two = journal.turns.append("a", [turn("one"), turn("two")])
        journal.facts.write([fact("f", (one.number,)), fact("g", (one.number, two.number))])
        journal.forget_facts(["f"])
        assert said(journal, one.session) == ["two"]
        assert set(journal.facts.get(["f", "g"])) == {"g"}

    def test_facts_forgotten_together_take_the_turn_they_share(self, journal: Journal) -> None:
        [one] = journal.turns.append("a", [turn("one")])
        journal.facts.write([fact("f", (one.number,)), fact("g", (one.number,))])
        journal.forget_facts(["f", "g"])
        assert said(journal, one.session) == []

    def test_it_strikes_the_whole_pile_that_stands_on_the_facts_blob(self, journal: Journal) -> None:
        pile(journal, "a", "b", "c", "d")
        stranger = fact("stranger")
        journal.facts.write([stranger])
        journal.ledger.enter(entry(stranger), stranger, Context())
        forgotten = journal.forget_facts(["b"])
        assert {blob.key for blob in forgotten.blobs} == {"key-b", "key-c", "key-d"}
        assert forgotten.orphaned == ("c", "d")
        assert set(journal.ledger.get("abcd", MODEL)) == {"a"}
        assert set(journal.ledger.get(["stranger"], MODEL)) == {"stranger"}

    def test_a_pile_of_which_one_was_lost_is_struck_all_the_same(self, journal: Journal) -> None:
        pile(journal, "a", "b", "c", "d")
        journal.ledger.mark_lost(["key-b", "key-c"])
        assert set(journal.ledger.get("abcd", MODEL)) == {"a", "d"}
        assert set(journal.forget_facts(["a"]).orphaned) == {"b", "c", "d"}
        assert journal.ledger.get("abcd", MODEL) == {}

    def test_what_stands_on_a_blob_that_was_replaced_is_struck_with_what_that_was_made_of(
        self, journal: Journal
    ) -> None:
        """The new blob of `b` holds nothing of `a`, nor of the turn; what stands on the old one still does."""
        a, b, c, d = pile(journal, "a", "b", "c", "d")
        [said] = journal.turns.append("a", [turn("by the sea")])
        assert journal.ledger.enter(entry(b, "with a turn"), b, Context((a,), (said.number,), ("key-a",)))
        assert journal.ledger.enter(entry(c), c, Context((b,), (), ("with a turn",)))
        assert journal.ledger.enter(entry(d), d, Context((c,), (), ("key-c",)))
        journal.ledger.mark_lost(["with a turn"])
        assert journal.ledger.enter(entry(b, "new"), b, Context())
        with journal.transaction():
            assert set(journal.forget_turns([said.number]).orphaned) == {"c", "d"}
        assert set(journal.ledger.get("abcd", MODEL)) == {"a", "b"}

    @pytest.mark.parametrize("count", [8, 24])
    def test_blobs_that_are_made_anew_in_order_leave_no_more_behind_than_before(
        self, journal: Journal, count: int
    ) -> None:
        """As after a restart: every fact of a pile gets another blob, and each inherits from the one below."""
        facts = [fact(f"fact {number}") for number in range(count)]
        journal.facts.write(facts)
        for turn_of_all in range(3):
            for place, of in enumerate(facts):
                name = f"key {turn_of_all} {place}"
                below = facts[:place]
                bases = tuple(f"key {turn_of_all} {other}" for other in range(place))
                assert journal.ledger.enter(entry(of, name), of, Context(tuple(below), (), bases))
                held, stands = (
                    journal.database.read(f"SELECT count(*) FROM {table}")[0][0] for table in ("held", "stands")
                )
                assert held <= count * count
                assert stands <= count * count
            assert (held, stands) == (0, count - 1), "what is found through another is not noted twice"
        assert len(journal.forget_facts(["fact 0"]).orphaned) == count - 1

    def test_it_strikes_every_blob_whose_window_held_the_fact(self, journal: Journal) -> None:
        held, holder, stranger = fact("held"), fact("holder"), fact("stranger")
        journal.facts.write([held, holder, stranger])
        assert journal.ledger.enter(entry(held), held, Context())
        assert journal.ledger.enter(entry(holder), holder, Context(facts=(held,)))
        assert journal.ledger.enter(entry(stranger), stranger, Context())
        forgotten = journal.forget_facts(["held"])
        assert {blob.key for blob in forgotten.blobs} == {"key-held", "key-holder"}
        assert forgotten.facts == (held,)
        assert forgotten.orphaned == ("holder",)
        assert set(journal.ledger.get(["held", "holder", "stranger"], MODEL)) == {"stranger"}

    def test_it_strikes_every_blob_whose_window_held_its_turn(self, journal: Journal) -> None:
        [one] = journal.turns.append("a", [turn("one")])
        source, later = fact("source", (one.number,)), fact("later")
        journal.facts.write([source, later])
        journal.ledger.enter(entry(later), later, Context(turns=(one.number,)))
        assert journal.forget_facts(["source"]).orphaned == ("later",)

    def test_other_words_are_a_forgetting_of_the_old_ones(self, journal: Journal) -> None:
        [one] = journal.turns.append("a", [turn("one")])
        old, later = fact("f", (one.number,), one.session), fact("later")
        journal.facts.write([old, later])
        journal.ledger.enter(entry(old), old, Context())
        journal.ledger.enter(entry(later), later, Context(facts=(old,)))
        new = replace(old, text="new words", turns=())
        forgotten = journal.reword_fact(new)
        assert {blob.fact for blob in forgotten.blobs} == {"f", "later"}
        assert forgotten.orphaned == ("later",)
        assert journal.facts.get(["f"]) == {"f": new}
        assert said(journal, one.session) == []

    def test_another_date_of_the_same_words_keeps_their_turn(self, journal: Journal) -> None:
        [one] = journal.turns.append("a", [turn("one")])
        old = fact("f", (one.number,), one.session)
        journal.facts.write([old])
        journal.ledger.enter(entry(old), old, Context())
        assert journal.reword_fact(replace(old, when=None)).blobs == (entry(old),)
        assert said(journal, one.session) == ["one"]

    def test_turns_can_be_forgotten_alone(self, journal: Journal) -> None:
        [one] = journal.turns.append("a", [turn("one")])
        later = fact("later")
        journal.facts.write([later])
        journal.ledger.enter(entry(later), later, Context(turns=(one.number,)))
        assert journal.forget_turns([one.number]).orphaned == ("later",)
        assert said(journal, one.session) == []

    def test_turns_that_said_a_fact_again_go_with_it_and_with_its_words(self, journal: Journal) -> None:
        one, two, three = journal.turns.append("a", [turn("one"), turn("two"), turn("three")])
        journal.facts.write([fact("f", (one.number,)), fact("g")])
        journal.facts.link_turns(["f", "unknown"], [two.number])
        journal.facts.link_turns(["f", "unknown"], [two.number])
        journal.facts.link_turns(["g"], [three.number])
        assert journal.facts.get(["f"])["f"].turns == (one.number,), "it came from this one"
        assert journal.facts.turns_of(["f"]) == [one.number, two.number]
        forgotten = journal.forget_facts(["f"])
        assert forgotten.turns == (("a", two.number),)
        assert said(journal, one.session) == ["three"]
        journal.reword_fact(replace(fact("g"), text="other words"))
        assert said(journal, one.session) == []
        assert journal.facts.turns_of(["f", "g"]) == []

    def test_a_fact_the_journal_never_knew_has_turns_that_said_it(self, journal: Journal) -> None:
        [one] = journal.turns.append("a", [turn("one")])
        journal.facts.link_turns(["unknown"], [one.number])
        journal.forget_facts(["unknown"])
        assert said(journal, one.session) == []

    def test_turns_are_found_by_their_words_and_owner(self, journal: Journal) -> None:
        ada, run = "user_id=ada", "user_id=ada&run_id=r"
        one, _, three, itself = journal.turns.append(
            ada, [turn("Yes, red TEA!"), turn("red teapot"), turn("red tea"), turn("red tea")]
        )
        [elsewhere] = journal.turns.append(run, [turn("more red tea")])
        for other in ("user_id=adam", "user_id=ben", "run_id=r"):
            journal.turns.append(other, [turn("red tea")])
        journal.facts.write([replace(fact("f", (itself.number,)), verbatim=True)])
        found = [one.number, three.number, elsewhere.number]
        assert sorted(journal.turns.saying(ada, [("red tea",)])) == found
        assert sorted(journal.turns.saying(run, [("red tea",)])) == found

    def test_turns_are_found_by_their_scope(self, journal: Journal) -> None:
        [one] = journal.turns.append("a", [turn("one")])
        journal.turns.append("b", [turn("two")])
        assert journal.turns.in_scopes(lambda scope: scope == "a") == [one.number]

    def test_everything_can_be_forgotten(self, journal: Journal) -> None:
        [one] = journal.turns.append("a", [turn("one")])
        known = fact("f", (one.number,))
        journal.facts.write([known])
        journal.ledger.enter(entry(known), known, Context())
        forgotten = journal.forget_everything()
        assert forgotten.facts == (known,)
        assert forgotten.blobs == (entry(known),)
        assert journal.facts.get(["f"]) == {}
        assert journal.facts.write([known]) == []

    def test_forgotten_words_are_not_left_in_the_file(self, journal: Journal, path: Path) -> None:
        [one] = journal.turns.append("a", [turn("a very secret turn")])
        journal.facts.write([fact("f", (one.number,), text="a very secret fact")])
        journal.forget_facts(["f"])
        journal.close()
        assert b"very secret" not in path.read_bytes()

    def test_words_lie_on_overflow_pages_alone(self, journal: Journal, path: Path) -> None:
        """These are never copied, and zeroed whole; how much of a row lies elsewhere depends on its length."""
        words = []
        for length in range(0, 1200, 7):
            word = f"word{length:04d}y"
            scope = "s" * (length % 300 + 1)
            logged = journal.turns.append(scope, [turn(f"{word}t{'z' * length}")])
            journal.facts.write([replace(fact(f"id{length}"), text=f"{word}f{'z' * length}", scope=scope)])
            journal.intents.begin(Intent("delete", "f", scope, (f"{word}i{'z' * length}",)))
            journal.failed_adds.keep(scope, logged, {}, {"prompt": f"{word}o{'z' * length}"}, "cut off")
            words += [f"{word}{kind}".encode() for kind in "tfio"]
        journal.scrub()
        raw = path.read_bytes()
        places = [at for word in words if (at := raw.find(word)) >= 0]
        assert len(places) > 0.9 * len(words), "few are spread over two pages"
        kinds = {raw[at - at % PAGE] for at in places}
        assert not kinds & {0x02, 0x05, 0x0A, 0x0D}, "these are B-tree pages"

    def test_nothing_forgotten_survives_many_random_changes(self, journal: Journal, path: Path) -> None:
        draw, living, gone = random.Random(3), dict[str, str](), list[str]()

        def text(long: int = 900) -> str:
            word = f"word{len(living) + len(gone)}x{draw.getrandbits(30)}y"
            return word + " z" * draw.randrange(1, long if draw.random() < 0.9 else 4000)

        def word(said: str) -> str:
            return said.split()[0]

        for step in range(800):
            name, said = f"f{step}", text(900 if draw.random() < 0.5 else 40)
            logged = journal.turns.append(draw.choice("abc"), [turn(said)])
            intent = journal.intents.begin(Intent("delete", name, "a", (said,)))
            journal.facts.write([replace(fact(name, (logged[0].number,)), text=said)])
            living[name] = word(said)
            if step % 7 == 0:
                failed = f"option{step}x{draw.getrandbits(30)}y"
                journal.failed_adds.keep("a", logged, {"user_id": "a"}, {"prompt": failed}, "cut off")
                journal.failed_adds.settle(logged)
                gone.append(failed)
            for doomed in draw.sample(list(living), min(len(living), draw.randrange(3))):
                gone.append(living.pop(doomed))
                if draw.random() < 0.3:
                    living[doomed] = word(renewed := text(60))
                    journal.reword_fact(replace(fact(doomed), text=renewed))
                else:
                    journal.forget_facts([doomed])
            journal.intents.reduce_to_scrub([intent])
            if step % 5:
                journal.intents.finish([intent])
        assert len(gone) > 600
        assert journal.scrub()
        raw = path.read_bytes() + path.with_name(path.name + "-wal").read_bytes()
        assert [word for word in gone if word.encode() in raw] == []
        assert [word for word in gone[::20] if find(raw, spellings(word))] == []
        assert [word for word in list(living.values())[::20] if not find(raw, spellings(word))] == []

    def test_the_log_is_empty_after_a_scrub(self, journal: Journal, path: Path) -> None:
        journal.turns.append("a", [turn("a secret")])
        wal = path.with_name(path.name + "-wal")
        assert wal.stat().st_size
        assert journal.scrub()
        assert wal.stat().st_size == 0

    def test_a_reader_that_does_not_end_is_said(
        self, journal: Journal, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scrub, "_PATIENCE_S", 0.05)
        journal.turns.append("a", [turn("a secret")])
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM turns").fetchall()
        journal.turns.append("a", [turn("another")])
        assert not journal.scrub()
        assert "does not end" in caplog.text
        reader.close()
        assert journal.scrub()


class TestIntents:
    def test_they_are_there_until_they_are_finished(self, journal: Journal, path: Path) -> None:
        intents = [
            Intent("add", scope="a", turns=(1, 2)),
            Intent("delete", "f", "a", ('said "so"', "grüße")),
        ]
        first, second = (journal.intents.begin(intent) for intent in intents)
        journal.close()
        again = Journal(path)
        assert again.intents.unfinished() == {first: intents[0], second: intents[1]}
        again.intents.finish([first])
        assert list(again.intents.unfinished()) == [second]
        again.close()

    def test_one_that_is_blank_says_nothing(self, journal: Journal) -> None:
        number = journal.intents.begin(Intent("delete", "f", "a", ("secret",)))
        journal.intents.reduce_to_scrub([number])
        assert journal.intents.unfinished() == {number: Intent("scrub")}

    def test_what_is_written_together_happens_together(self, journal: Journal) -> None:
        def half() -> None:
            with journal.transaction():
                journal.intents.begin(Intent("add"))
                journal.turns.append("a", [turn("one")])
                raise RuntimeError

        with pytest.raises(RuntimeError):
            half()
        assert journal.intents.unfinished() == {}
        assert journal.turns.in_scopes(lambda scope: True) == []


class TestExpiry:
    def test_facts_expire_when_their_last_day_has_passed(self, journal: Journal) -> None:
        journal.facts.write([replace(fact("f"), expires="2024-05-12T23:59:59.999999+00:00"), fact("g")])
        assert journal.facts.expired(datetime(2024, 5, 12, 23, 59, tzinfo=UTC)) == []
        assert journal.facts.expired(datetime(2024, 5, 13, tzinfo=UTC)) == ["f"]


class TestLedger:
    def test_a_blob_that_comes_after_its_fact_was_forgotten_is_not_entered(self, journal: Journal) -> None:
        late = fact("f")
        journal.facts.write([late])
        journal.forget_facts(["f"])
        assert not journal.ledger.enter(entry(late), late, Context())

    def test_nor_one_of_words_that_changed_meanwhile(self, journal: Journal) -> None:
        late = fact("f")
        journal.facts.write([late])
        journal.reword_fact(replace(late, text="other"))
        assert not journal.ledger.enter(entry(late), late, Context())

    @pytest.mark.parametrize("what", ["fact", "reworded fact", "turn"])
    def test_nor_one_whose_window_held_what_was_forgotten_meanwhile(
        self, journal: Journal, what: str
    ) -> None:
        [one] = journal.turns.append("a", [turn("one")])
        late, held = fact("f"), fact("held", (one.number,))
        journal.facts.write([late, held])
        if what == "reworded fact":
            journal.reword_fact(replace(held, text="other", turns=()))
        else:
            journal.forget_facts(["held"])
        context = Context(turns=(one.number,)) if what == "turn" else Context(facts=(held,))
        assert not journal.ledger.enter(entry(late), late, context)

    def test_a_newer_blob_replaces_the_older_and_its_window(self, journal: Journal) -> None:
        held, of = fact("held"), fact("f")
        journal.facts.write([held, of])
        journal.ledger.enter(entry(of, "old"), of, Context(facts=(held,)))
        journal.ledger.enter(entry(of, "new"), of, Context())
        assert journal.ledger.get(["f"], MODEL)["f"].key == "new"
        assert journal.forget_facts(["held"]).orphaned == ()

    def test_each_model_has_its_own(self, journal: Journal) -> None:
        of = fact("f")
        journal.facts.write([of])
        journal.ledger.enter(entry(of), of, Context())
        assert journal.ledger.get(["f"], "model-2") == {}

    def test_blobs_are_found_by_the_words_in_them_and_in_their_window(self, journal: Journal) -> None:
        [one] = journal.turns.append("a", [turn("by the blue sea")])
        says, holds, heard, other = (fact(name) for name in ("says", "holds", "heard", "other"))
        says = replace(says, text="The Blue Sea")
        journal.facts.write([says, holds, heard, other])
        journal.ledger.enter(entry(says), says, Context())
        journal.ledger.enter(entry(holds), holds, Context(facts=(says,)))
        journal.ledger.enter(entry(heard), heard, Context(turns=(one.number,)))
        journal.ledger.enter(entry(other), other, Context(facts=(holds,)))
        assert {blob.fact for blob in journal.ledger.saying("blue sea")} == {"says", "holds", "heard"}

    def test_words_are_found_in_every_blob_that_stands_on_one_made_of_them(self, journal: Journal) -> None:
        says, *above = pile(journal, "says", "second", "third")
        journal.reword_fact(replace(says, text="The Blue Sea"))
        says = journal.facts.get(["says"])["says"]
        assert journal.ledger.get(["says", "second", "third"], MODEL) == {}
        journal.ledger.enter(entry(says), says, Context())
        for below, of in zip([says, *above], above, strict=False):
            assert journal.ledger.enter(entry(of), of, Context((below,), (), (f"key-{below.fact}",)))
        assert {blob.fact for blob in journal.ledger.saying("blue sea")} == {"says", "second", "third"}

    def test_a_blob_that_stands_on_one_that_was_struck_or_replaced_comes_too_late(
        self, journal: Journal
    ) -> None:
        below, above = fact("below"), fact("above")
        journal.facts.write([below, above])
        context = Context((below,), (), ("key-below",))
        assert not journal.ledger.enter(entry(above), above, context), "there is no such blob"
        assert journal.ledger.enter(entry(below), below, Context())
        assert journal.ledger.enter(entry(above), above, context)
        assert journal.ledger.enter(entry(below, "another"), below, Context())
        assert not journal.ledger.enter(entry(above), above, context)
        assert not journal.ledger.enter(
            replace(entry(above), fingerprint="model-2"), above, Context((below,), (), ("another",))
        ), "it is of another model"

    def test_lost_blobs_are_no_longer_named(self, journal: Journal) -> None:
        of = fact("f")
        journal.facts.write([of])
        journal.ledger.enter(entry(of), of, Context())
        journal.ledger.mark_lost(["key-f"])
        assert journal.ledger.get(["f"], MODEL) == {}
        journal.ledger.enter(entry(of), of, Context())
        assert set(journal.ledger.get(["f"], MODEL)) == {"f"}


class TestFile:
    def test_many_threads_write_at_once(self, journal: Journal) -> None:
        def write(number: int) -> int:
            [logged] = journal.turns.append(f"scope-{number % 4}", [turn(f"turn {number}")])
            journal.facts.write([fact(f"f{number}", (logged.number,), logged.session)])
            return logged.ordinal

        with ThreadPoolExecutor(8) as pool:
            ordinals = list(pool.map(write, range(64)))
        assert sorted(ordinals) == sorted(list(range(16)) * 4)
        assert len(journal.facts.get([f"f{number}" for number in range(64)])) == 64

    def test_a_journal_of_another_format_is_refused(self, journal: Journal, path: Path) -> None:
        journal.close()
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version = 99")
        db.close()
        with pytest.raises(sqlite3.DatabaseError, match="format 99"):
            Journal(path)

    @pytest.mark.parametrize("form", [1, 2])
    @pytest.mark.parametrize("failed", [False, True])
    def test_a_journal_of_an_earlier_format_is_read_on(self, path: Path, form: int, failed: bool) -> None:
        path.parent.mkdir()
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            for step in STEPS[:form]:
                db.executescript(step)
            db.execute(f"PRAGMA user_version = {form}")
            db.execute("INSERT INTO turns VALUES (7, 'a', 0, 7, 'user', 'User', 'said so', NULL)")
            db.execute("INSERT INTO turns VALUES (8, 'a', 1, 7, 'user', '', NULL, NULL)")
            db.execute(
                "INSERT INTO facts (fact, owner, scope, tag, text, speaker, said_at, session, verbatim) VALUES"
                " ('f', 'user:ada', 'a', 't', 'a fact', 'User', NULL, 7, 0), ('g', 'o', 'b', 'u', 'one', '', NULL,"
                " NULL, 1)"
            )
            db.execute("INSERT INTO sources VALUES ('f', 7)")
            db.execute("INSERT INTO ledger VALUES ('f', 'model-1', 'user:ada', 'key', 3, 'line')")
            db.execute("INSERT INTO held VALUES ('f', 'model-1', NULL, 7)")
            if form == 2:
                db.execute("INSERT INTO intents VALUES (3, 'delete', 'f', 'a', '[\"a fact\"]', '[7]')")
            for number in range(200):
                db.execute(
                    "INSERT INTO facts (fact, owner, scope, tag, text, speaker, session, verbatim) VALUES"
                    f" ('x{number}', 'o', 'c', 't', 'a secret of old', '', NULL, 0)"
                )
            db.execute("PRAGMA secure_delete = OFF")
            db.execute("DELETE FROM facts WHERE scope = 'c'")
            if failed:
                db.executescript(
                    "CREATE TABLE failed_adds (number INTEGER PRIMARY KEY AUTOINCREMENT, scope TEXT NOT NULL,"
                    " ids TEXT NOT NULL, options TEXT NOT NULL, error TEXT NOT NULL, attempts INTEGER NOT NULL,"
                    " failed_at TEXT NOT NULL) STRICT;"
                    "CREATE TABLE failed_turns (number INTEGER NOT NULL REFERENCES failed_adds (number) ON DELETE"
                    " CASCADE, turn INTEGER NOT NULL REFERENCES turns (number) ON DELETE CASCADE,"
                    " PRIMARY KEY (number, turn)) STRICT, WITHOUT ROWID;"
                    "CREATE TRIGGER failed_turn_forgotten AFTER UPDATE OF text ON turns WHEN new.text IS NULL"
                    " BEGIN DELETE FROM failed_turns WHERE turn = new.number; END;"
                    "CREATE TRIGGER failed_add_forgotten AFTER DELETE ON failed_turns"
                    " WHEN NOT EXISTS (SELECT 1 FROM failed_turns WHERE number = old.number)"
                    " BEGIN DELETE FROM failed_adds WHERE number = old.number; END;"
                    "INSERT INTO failed_adds VALUES (5, 'a', '{}', '{\"infer\": true}', 'bad', 1, '2025-01-01');"
                    "INSERT INTO failed_turns VALUES (5, 7)"
                )
        assert b"secret of old" in path.read_bytes()
        with closing(Journal(path)) as journal:
            known = journal.facts.get(["f", "g"])
            assert [(f.text, f.turns, f.session) for f in known.values()] == [
                ("a fact", (7,), 7),
                ("one", (), None),
            ]
            assert [(t.number, t.text) for t in journal.turns.get([7, 8])] == [(7, "said so")]
            assert journal.intents.unfinished() == (
                {3: Intent("delete", "f", "a", ("a fact",), (7,))} if form == 2 else {}
            )
            calls = journal.failed_adds.all()
            assert [(c.number, c.turns, c.options) for c in calls] == [(5, (7,), {"infer": True})] * failed
            assert [entry.key for entry in journal.ledger.saying("said so")] == ["key"]
            assert journal.database.read("PRAGMA page_size") == [(PAGE,)]
            assert b"secret of old" not in path.read_bytes()
            journal.forget_facts(["f"])
            assert journal.failed_adds.all() == []
            assert journal.database.read("SELECT count(*) FROM held") == [(0,)]
            assert journal.scrub()
            assert b"said so" not in path.read_bytes()
        with closing(Journal(path)) as journal:
            assert list(journal.facts.get(["f", "g"])) == ["g"]

    def test_one_of_an_earlier_format_that_is_open_elsewhere_is_left_as_it_is(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(schema, "_PATIENCE_S", 0.05)
        path.parent.mkdir()
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"{STEPS[0]}; PRAGMA user_version = 1")
            db.execute("BEGIN")
            db.execute("SELECT * FROM facts").fetchall()
            with pytest.raises(sqlite3.OperationalError):
                Journal(path)
        Journal(path).close()

    def test_one_of_an_earlier_format_is_waited_for_while_others_open_it(self, path: Path) -> None:
        path.parent.mkdir()
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(f"{STEPS[0]}; PRAGMA user_version = 1")
        Timer(0.3, db.close).start()
        Journal(path).close()

    def test_closing_twice_is_harmless(self, journal: Journal) -> None:
        journal.close()
        journal.close()


def test_the_gap_between_sessions_is_what_the_journal_was_told(tmp_path: Path) -> None:
    when = datetime(2025, 3, 1, 12, tzinfo=UTC)
    said = [
        NewTurn("user", "Ada", text, when + timedelta(minutes=20 * number))
        for number, text in enumerate("abc")
    ]
    for gap, sessions in ((timedelta(minutes=10), 3), (timedelta(hours=1), 1)):
        with closing(Journal(tmp_path / f"{sessions}.sqlite", session_gap=gap)) as journal:
            assert len({turn.session for turn in journal.turns.append("ada", said)}) == sessions
