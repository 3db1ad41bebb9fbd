"""An id is a name that a user may have chosen: wherever it is passed it is literal, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from inferscale_memory.errors import ConfigurationError
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenFace
from tests.memory.faces import Settled
from tests.memory.saying import ADA, BEN, say
from tests.memory.stores import STORES

pytestmark = pytest.mark.filterwarnings("ignore:mem0 2 has no user_id=:DeprecationWarning")

Call = Callable[[Settled, Any], Any]

LITERAL = ["*", "%", "_", "a*", "?", "a&user_id=ben", "user_id=ben", "a%26", "'--", "ADA", "ad", "x" * 4000]
LITERAL += [7, UUID(int=1)]
"""Ids that are names like any other."""
REFUSED = [
    True,
    1.5,
    b"ada",
    ["ada"],
    ("ada",),
    {"ada"},
    {"ne": "x"},
    {"gt": ""},
    {"in": ["ada", "ben"]},
    object(),
    np.array(["ada", "ben"]),
    "",
    " ",
    "two words",
    "ada\0",
    "ada\ud83d",
    10**5000,
]

CALLS: dict[str, Call] = {
    "search": lambda m, who: m.search("tea", filters={"user_id": who}, threshold=0.0),
    "search eq": lambda m, who: m.search(
        "tea", filters={"agent_id": "desk", "AND": [{"user_id": {"eq": who}}]}, threshold=0.0
    ),
    "search and": lambda m, who: m.search(
        "tea", filters={"agent_id": "desk", "AND": [{"user_id": who}]}, threshold=0.0
    ),
    "search or": lambda m, who: m.search(
        "tea", filters={"agent_id": "desk", "OR": [{"user_id": who}]}, threshold=0.0
    ),
    "search nested": lambda m, who: m.search(
        "tea", filters={"agent_id": "desk", "AND": [{"OR": [{"user_id": who}]}]}, threshold=0.0
    ),
    "search in": lambda m, who: m.search(
        "tea", filters={"agent_id": "desk", "AND": [{"user_id": {"in": [who]}}]}, threshold=0.0
    ),
    "search as before": lambda m, who: m.search("tea", user_id=who, threshold=0.0),
    "get_all": lambda m, who: m.get_all(filters={"user_id": who}),
    "get_all and": lambda m, who: m.get_all(filters={"agent_id": "desk", "AND": [{"user_id": who}]}),
    "get_all or": lambda m, who: m.get_all(filters={"agent_id": "desk", "OR": [{"user_id": who}]}),
    "get_all in": lambda m, who: m.get_all(filters={"agent_id": "desk", "user_id": who}),
    "prepare": lambda m, who: m.prepare("tea?", user_id=who),
    "prepare or": lambda m, who: m.prepare("tea?", agent_id="desk", filters={"OR": [{"user_id": who}]}),
    "chat": lambda m, who: m.chat("tea?", user_id=who, max_tokens=1),
    "session": lambda m, who: _asked(m, who),
}


def _asked(memory: Settled, who: Any) -> Any:
    session = memory.session(user_id=who)
    return memory.chat("tea?", session=session, max_tokens=1)


def found(result: Any) -> set[str]:
    """The texts in what a call has found."""
    rows = result["results"] if isinstance(result, dict) else result.memories
    return {row["memory"] if isinstance(row, dict) else row.text for row in rows}


@pytest.fixture
def filled(open_face: OpenFace) -> Settled:
    return _filled(open_face())


def _filled(memory: Settled) -> Settled:
    for who in ("ada", "ben", "*"):
        memory.add(f"{who} likes tea", user_id=who, agent_id="desk", infer=False)
    return memory


@pytest.mark.parametrize("provider", STORES)
def test_a_user_called_by_the_wildcard_is_a_user_like_any_other(open_face: OpenFace, provider: str) -> None:
    memory = _filled(open_face(vector_store={"provider": provider}))
    for name, call in CALLS.items():
        for who in ("*", "ada"):
            assert found(call(memory, who)) == {f"{who} likes tea"}, (name, who)


def test_an_id_that_is_only_a_name_finds_nobody_else(filled: Settled) -> None:
    for name, call in CALLS.items():
        for who in LITERAL[1:]:
            assert found(call(filled, who)) == set(), (name, who)


def test_what_is_no_name_is_refused_or_finds_nothing_in_every_call(filled: Settled) -> None:
    for name, call in CALLS.items():
        for who in REFUSED:
            try:
                result = found(call(filled, who))
            except ValueError:  # mem0's, or ours, which is one too
                continue
            operators = isinstance(who, dict | list | tuple | set) or (
                isinstance(who, str) and " and" in name
            )
            assert " " in name, (name, who)
            assert operators or result == set(), (name, who, result)


@pytest.mark.parametrize("provider", STORES)
def test_delete_all_of_the_wildcard_deletes_its_own(open_face: OpenFace, provider: str) -> None:
    memory = _filled(open_face(vector_store={"provider": provider}))
    memory.delete_all(user_id="*")
    assert found(memory.get_all(filters={"agent_id": "desk"})) == {"ada likes tea", "ben likes tea"}


def test_delete_all_of_what_is_no_name_deletes_nothing(filled: Settled) -> None:
    for who in (*REFUSED, *LITERAL[1:]):
        with suppress(ValueError):
            filled.delete_all(user_id=who)
    assert len(found(filled.get_all(filters={"agent_id": "desk"}))) == 3


def test_add_takes_literal_ids_and_finds_them_again(either: Settled) -> None:
    for number, who in enumerate(LITERAL):
        either.add(f"fact {number}", user_id=who, infer=False)
    for number, who in enumerate(LITERAL):
        assert found(either.get_all(filters={"user_id": who})) == {f"fact {number}"}, who


def test_add_refuses_what_is_no_name_and_writes_nothing(either: Settled) -> None:
    for who in REFUSED:
        with pytest.raises(ValueError, match=r"user_id|Invalid"):
            either.add("I like tea", user_id=who, infer=False)
    assert found(either.get_all(filters={"agent_id": "desk"})) == set()


def test_a_part_of_a_filter_narrows_the_scope_and_never_widens_it(filled: Settled) -> None:
    """An app puts the user beside what the user has typed into a form."""
    for typed in (
        {"AND": [{"user_id": "ben"}]},
        {"AND": [{"user_id": {"ne": "ada"}}]},
        {"AND": [{"user_id": {"in": ["ben", "*"]}}]},
        {"OR": [{"user_id": "ben"}, {"user_id": "*"}]},
        {"NOT": [{"user_id": "ada"}]},
        {"AND": [{"OR": [{"user_id": "ben"}]}]},
        {"$and": [{"user_id": "ben"}]},
        {"$or": [{"user_id": "ben"}]},
    ):
        assert found(filled.search("tea", filters={"user_id": "ada", **typed}, threshold=0.0)) == set(), typed
        assert found(filled.search("tea", filters={**typed, "user_id": "ada"}, threshold=0.0)) == set(), typed
        assert found(filled.get_all(filters={"user_id": "ada", **typed})) == set(), typed
        assert found(filled.prepare("tea?", user_id="ada", filters=typed)) == set(), typed


def test_conditions_on_one_key_in_several_parts_all_hold(either: Settled) -> None:
    for stars in (1, 2, 3):
        either.add(f"{stars} stars", **ADA, metadata={"stars": stars}, infer=False)
    both = [{"stars": {"ne": 1}}, {"stars": {"ne": 3}}]
    assert found(either.search("stars", filters={**ADA, "AND": both}, threshold=0.0)) == {"2 stars"}
    either_of = [{"OR": [{"stars": 1}, {"stars": 2}]}, {"OR": [{"stars": 2}, {"stars": 3}]}]
    assert found(either.search("stars", filters={**ADA, "AND": either_of}, threshold=0.0)) == {"2 stars"}


def test_an_id_that_is_none_is_not_given(filled: Settled) -> None:
    filled.add("Nobody's agent likes tea", agent_id="desk", infer=False)
    for call in (filled.get_all, lambda filters: filled.search("tea", filters=filters)):
        with pytest.raises(ValueError, match="must contain at least one"):
            call(filters={"user_id": None})


def test_metadata_keeps_mem0s_wildcard(filled: Settled) -> None:
    filled.add("I like cake", **ADA, metadata={"mood": "good"}, infer=False)
    assert found(filled.search("like", filters={**ADA, "mood": "*"}, threshold=0.0)) == {"I like cake"}
    assert found(filled.get_all(filters={**ADA, "mood": "*"})) == {"I like cake"}


def test_a_session_needs_to_know_whose_it_is(memory: Memory) -> None:
    with pytest.raises(ConfigurationError, match="no scope"):
        memory.session()


def test_two_users_whose_names_differ_in_half_a_character_stay_two(memory: Memory) -> None:
    with pytest.raises(ConfigurationError, match="whole characters"):
        say(memory, "I like tea", user_id="a\ud83d")
    say(memory, "I like tea", **BEN)
    assert memory.get_all(filters={"user_id": "a\ufffd"})["results"] == []
