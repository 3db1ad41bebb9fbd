"""Scopes, owners, and what a fact says."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import pytest

from inferscale_memory.facts.scope import Scope, fact_tag
from inferscale_memory.facts.text import payload_of, read_date, words_of
from inferscale_memory.prompt import PUBLIC_OWNER


@pytest.mark.parametrize(
    ("ids", "owner"),
    [
        ({"user_id": "ada", "agent_id": "b", "run_id": "r"}, "user:ada"),
        ({"agent_id": "b", "run_id": "r"}, "agent:b"),
        ({"run_id": "r"}, "run:r"),
        ({"user_id": " ada "}, "user:ada"),
        ({"user_id": 7}, "user:7"),
        ({"user_id": "", "agent_id": "b"}, "agent:b"),
        ({}, ""),
    ],
)
def test_the_owner_is_the_user_else_the_agent_else_the_run(ids: dict[str, Any], owner: str) -> None:
    assert Scope.of(ids).owner == owner


def test_nobody_can_be_the_public_owner() -> None:
    assert Scope(user_id=PUBLIC_OWNER).owner != PUBLIC_OWNER


def test_scopes_that_differ_have_keys_that_differ() -> None:
    scopes = [
        Scope(user_id="a", agent_id="b"),
        Scope(user_id="a&agent_id=b"),
        Scope(user_id="a"),
        Scope(agent_id="a"),
        Scope(user_id="a", agent_id="b", run_id="c"),
    ]
    assert len({scope.key for scope in scopes}) == len(scopes)


def test_tags_are_stable_and_apart() -> None:
    assert fact_tag("user:a", "1") == fact_tag("user:a", "1")
    assert len({fact_tag("user:a", "1"), fact_tag("user:b", "1"), fact_tag("user:a", "2")}) == 3


def test_a_payload_and_the_search_result_it_becomes_say_the_same() -> None:
    payload = {
        "data": "I moved",
        "created_at": "2024-05-12T10:00:00+00:00",
        "role": "user",
        "speaker": "Ada",
        "date": "2023-01-02",
        "user_id": "ada",
    }
    result = {
        "id": "1",
        "memory": "I moved",
        "created_at": payload["created_at"],
        "role": "user",
        "user_id": "ada",
        "metadata": {"speaker": "Ada", "date": "2023-01-02"},
        "score": 0.5,
    }
    assert words_of(payload) == words_of(payload_of(result))
    assert words_of(payload).line == "- [2023-01-02] Ada: I moved\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime(2024, 5, 12, 8), datetime(2024, 5, 12, 8)),
        (date(2024, 5, 12), datetime(2024, 5, 12)),
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        ("2024-05-12T08:00:00Z", datetime(2024, 5, 12, 8, tzinfo=UTC)),
        ("1:56 pm on 8 May, 2023", datetime(2023, 5, 8, 13, 56)),
        ("yesterday", None),
        ("", None),
        (None, None),
        (True, None),
        (float("nan"), None),
        (10**30, None),
        ([2024], None),
    ],
)
def test_dates_are_read_or_left_out(value: Any, expected: datetime | None) -> None:
    assert read_date(value) == expected
