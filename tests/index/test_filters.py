"""mem0's filters, on columns, against what a person would say of one payload at a time."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale_memory.errors import StoreError
from inferscale_memory.index import filters
from inferscale_memory.index.slab import DictColumn

PAYLOADS: list[dict[str, Any]] = [
    {"n": 1, "word": "Tea", "tags": ["hot", "green"], "day": "2026-01-02", "yes": True},
    {"n": 2.5, "word": "coffee", "tags": ["hot"], "day": "2026-01-02T10:00:00+02:00", "yes": False},
    {"n": 3, "word": "tea leaves", "tags": [], "day": "2026-01-02T09:00:00Z", "nested": {"a": 1}},
    {"word": None},
]


class Table:
    def __len__(self) -> int:
        return len(PAYLOADS)

    def column(self, key: str) -> DictColumn:
        return DictColumn([payload.get(key) for payload in PAYLOADS])


def matching(condition: Any) -> list[int]:
    mask = filters.read(condition).mask(Table())
    return list(range(len(PAYLOADS))) if mask is None else [row for row, on in enumerate(mask) if on]


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        (None, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 3]),
        ({"n": 1}, [0]),
        ({"n": {"eq": 1.0}}, [0]),
        ({"yes": 1}, []),
        ({"n": True}, []),
        ({"word": None}, [3]),
        ({"word": {"ne": None}}, [0, 1, 2]),
        ({"n": {"ne": 1}}, [1, 2]),
        ({"n": [1, 3]}, [0, 2]),
        ({"n": {"in": [1, 3, "x"]}}, [0, 2]),
        ({"n": {"in": []}}, []),
        ({"n": {"nin": [1, 3]}}, [1]),
        ({"n": {"nin": []}}, [0, 1, 2]),
        ({"n": {"gt": 1}}, [1, 2]),
        ({"n": {"gte": 2.5, "lt": 3}}, [1]),
        ({"n": {"lte": 2.5}}, [0, 1]),
        ({"word": {"gt": "Z"}}, [1, 2]),
        ({"n": {"gt": "1"}}, []),
        ({"day": {"gt": "2026-01-02"}}, [1, 2]),
        ({"day": {"lte": "2026-01-02T08:30:00"}}, [0, 1]),
        ({"word": {"contains": "tea"}}, [2]),
        ({"word": {"icontains": "TEA"}}, [0, 2]),
        ({"word": {"contains": "%"}}, []),
        ({"tags": "hot"}, [0, 1]),
        ({"tags": {"contains": "green"}}, [0]),
        ({"tags": {"icontains": "GREEN"}}, [0]),
        ({"tags": {"nin": ["green"]}}, [1, 2]),
        ({"tags": "*"}, [0, 1, 2]),
        ({"unknown": "*"}, []),
        ({"nested": {"ne": 1}}, [2]),
        ({"n": 1, "word": "coffee"}, []),
        ({"AND": [{"n": {"gt": 1}}, {"word": "coffee"}]}, [1]),
        ({"OR": [{"n": 1}, {"word": "coffee"}]}, [0, 1]),
        ({"$or": [{"n": 1}, {"word": "*"}]}, [0, 1, 2]),
        ({"OR": [{"n": 1}], "$or": [{"n": 1}]}, [0]),
        ({"NOT": [{"n": 1}, {"word": "coffee"}]}, [2, 3]),
        ({"$not": [{"n": {"gte": 1}}]}, [3]),
        ({"NOT": [{}]}, []),
        ({"NOT": [{"OR": [{"n": 1}, {"AND": [{"n": 3}, {"word": {"contains": "leaves"}}]}]}]}, [1, 3]),
    ],
)
def test_a_filter_matches_what_it_says(condition: Any, rows: list[int]) -> None:
    assert matching(condition) == rows


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        (
            {"n": {"between": [1, 2]}},
            r"no filter operator 'between' on 'n': this store knows eq, ne, gt, gte",
        ),
        ({"n": {"eq": 1, "$gt": 1}}, r"'\$gt' on 'n'"),
        ({"$nor": [{"n": 1}]}, r"'\$nor'"),
        ({"OR": []}, "OR needs a list of at least one filter"),
        ({"NOT": {"n": 1}}, "NOT needs a list"),
        ({"AND": [1]}, "AND needs a list"),
        ({"n": {}}, "the filter on 'n' is empty"),
        ({"n": {"in": "abc"}}, "needs a list"),
        ({"n": {"gt": None}}, "cannot order by None"),
        ({"n": {"gt": True}}, "cannot order by True"),
        ({"n": {"eq": [1]}}, "compares with a list"),
        ({"n": {"contains": None}}, "pass text"),
        (["n"], "filters are a list"),
    ],
)
def test_what_is_no_filter_is_refused_and_the_remedy_named(condition: Any, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        filters.read(condition)
