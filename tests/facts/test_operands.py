"""A fact is found by the value that it was stored with, and what cannot be compared is said."""

from __future__ import annotations

import enum
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from inferscale_memory.errors import ConfigurationError
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenFace
from tests.memory.saying import ADA, say
from tests.memory.stores import STORES


class Mood(enum.Enum):
    GOOD = "good"


VALUES: dict[str, tuple[Any, Any]] = {
    "bool": (np.bool_(True), True),
    "int": (np.int64(3), 3),
    "float": (np.float32(1.5), 1.5),
    "uuid": (UUID(int=5), str(UUID(int=5))),
    "datetime64": (np.datetime64("2020-01-01"), "2020-01-01"),
    "nanoseconds": (np.datetime64("2020-01-01T00:00:00", "ns"), "2020-01-01T00:00:00.000000000"),
    "date": (date(2020, 1, 1), "2020-01-01"),
    "datetime": (datetime(2020, 1, 1, 3, tzinfo=UTC), "2020-01-01T03:00:00+00:00"),
    "decimal": (Decimal("1.5"), 1.5),
    "whole decimal": (Decimal("3"), 3),
    "enum": (Mood.GOOD, "good"),
    "path": (PurePosixPath("/x"), "/x"),
    "text": (np.str_("x"), "x"),
}


@pytest.mark.parametrize("provider", STORES)
def test_a_fact_is_found_by_the_value_it_was_stored_with(open_face: OpenFace, provider: str) -> None:
    memory = open_face(vector_store={"provider": provider})
    for name, (value, stored) in VALUES.items():
        [added] = memory.add("I like tea", **ADA, metadata={"v": value}, infer=False)["results"]
        assert memory.get(added["id"])["metadata"]["v"] == stored, name
        for condition in (value, stored, {"in": [value]}, {"eq": value}):
            filters = {**ADA, "v": condition}
            if provider == "qdrant" and (
                isinstance(stored, float) or (isinstance(condition, dict) and stored is True)
            ):
                continue  # it compares whole numbers and text, and booleans one at a time
            assert len(memory.search("tea", filters=filters, threshold=0.0)["results"]) == 1, (
                name,
                condition,
            )
            assert len(memory.get_all(filters=filters)["results"]) == 1, (name, condition)
        memory.delete(added["id"])


@pytest.mark.parametrize("key", ["created_at", "updated_at"])
def test_times_are_compared_with_whatever_says_one(memory: Memory, key: str) -> None:
    say(memory, "I like tea", at="2024-05-12T10:00:00")
    before: list[Any] = [
        "2999-01-01",
        datetime(2999, 1, 1),
        date(2999, 1, 1),
        4e9,
        np.datetime64("2999-01-01"),
        Decimal(4_000_000_000),
    ]
    for moment in before:
        assert len(memory.get_all(filters={**ADA, key: {"lt": moment}})["results"]) == 1, moment
        assert memory.search("tea", filters={**ADA, key: {"gt": moment}}, threshold=0.0)["results"] == []


@pytest.mark.parametrize("operand", ["2016", "the other day", True, float("nan"), b"2016", object()])
def test_what_is_no_time_is_refused_where_times_are_compared(memory: Memory, operand: Any) -> None:
    for ask in (memory.get_all, lambda filters: memory.search("tea", filters=filters)):
        with pytest.raises(ConfigurationError, match=r"filters\['created_at'\] must be"):
            ask(filters={**ADA, "created_at": {"lt": operand}})


@pytest.mark.parametrize(
    "operand", [float("nan"), b"x", object(), lambda: 1, {"eq": float("nan")}, [float("nan")]]
)
def test_what_no_value_is_equal_to_is_refused(memory: Memory, operand: Any) -> None:
    for ask in (memory.get_all, lambda filters: memory.prepare("tea", **ADA, filters=filters)):
        with pytest.raises(ConfigurationError, match=r"filters\['v'\] must be"):
            ask(filters={**ADA, "v": operand})
