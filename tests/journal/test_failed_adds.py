"""Calls to `add` that failed: kept by the numbers of their turns, and gone when those are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from inferscale_memory.journal import Fact, Journal, NewTurn, Turn

SCOPE = "user_id=ada"
MAY = datetime(2024, 5, 12, 10, tzinfo=UTC)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    yield journal
    journal.close()


def say(journal: Journal, *texts: str, scope: str = SCOPE) -> list[Turn]:
    return journal.turns.append(scope, [NewTurn("user", "User", text, MAY) for text in texts])


def fail(journal: Journal, turns: list[Turn], error: str = "cut off", scope: str = SCOPE) -> None:
    journal.failed_adds.keep(scope, turns, {"user_id": "ada"}, {"metadata": {"n": 1}, "infer": True}, error)


def test_a_failed_call_is_kept_with_its_turns_and_options(journal: Journal, tmp_path: Path) -> None:
    turns = say(journal, "one", "two")
    fail(journal, turns)
    journal.close()
    again = Journal(tmp_path / "journal.sqlite")
    [call] = again.failed_adds.all()
    assert call.turns == tuple(turn.number for turn in turns)
    assert (call.ids, call.options) == ({"user_id": "ada"}, {"metadata": {"n": 1}, "infer": True})
    assert (call.error, call.attempts) == ("cut off", 1)
    assert abs((datetime.now(UTC) - call.failed_at).total_seconds()) < 60
    assert again.turns.get(call.turns) == turns
    again.close()


def test_the_same_turns_are_the_same_call(journal: Journal) -> None:
    turns = say(journal, "one")
    fail(journal, turns)
    fail(journal, turns, "no JSON")
    [call] = journal.failed_adds.all()
    assert (call.error, call.attempts) == ("no JSON", 2)


def test_a_call_that_went_well_is_settled(journal: Journal) -> None:
    first, second = say(journal, "one"), say(journal, "two")
    fail(journal, first)
    fail(journal, second)
    journal.failed_adds.settle(first)
    assert [call.turns for call in journal.failed_adds.all()] == [(second[0].number,)]
    assert len(journal.turns.get([first[0].number])) == 1, "its turns stay"
    journal.failed_adds.settle(first)
    journal.failed_adds.settle([])


def test_a_call_about_nothing_is_not_kept(journal: Journal) -> None:
    fail(journal, [])
    assert journal.failed_adds.all() == []


def test_calls_are_found_by_scope(journal: Journal) -> None:
    fail(journal, say(journal, "one"))
    fail(journal, say(journal, "two", scope="user_id=ben"), scope="user_id=ben")
    assert len(journal.failed_adds.of_scope(SCOPE)) == 1
    assert len(journal.failed_adds.of_scope("user_id=cy")) == 0


def test_a_forgotten_turn_leaves_the_call_and_the_last_one_takes_it_along(journal: Journal) -> None:
    turns = say(journal, "one", "two")
    fail(journal, turns)
    journal.turns.redact([turns[0].number])
    [call] = journal.failed_adds.all()
    assert call.turns == (turns[1].number,)
    fact = Fact("f", "user:ada", SCOPE, "t", "Two", "", MAY, turns[1].session, (turns[1].number,))
    journal.facts.write([fact])
    journal.forget_facts(["f"])
    assert journal.failed_adds.all() == []
    assert journal.database.read("SELECT COUNT(*) FROM failed_turns") == [(0,)]


def test_forgetting_everything_forgets_them_too(journal: Journal) -> None:
    fail(journal, say(journal, "one"))
    journal.forget_everything()
    assert journal.failed_adds.all() == []


def test_a_call_is_claimed_by_one_at_a_time(journal: Journal) -> None:
    turns = say(journal, "one")
    fail(journal, turns)
    [call] = journal.failed_adds.all()
    with journal.failed_adds.claimed(call.number) as mine:
        assert mine
        assert journal.failed_adds.get(call.number) == call
        with journal.failed_adds.claimed(call.number) as theirs:
            assert not theirs
        journal.failed_adds.settle(turns)
    with journal.failed_adds.claimed(call.number) as again:
        assert again
        assert journal.failed_adds.get(call.number) is None
