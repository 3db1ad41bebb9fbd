"""When an item of the LangGraph store has outlived its time to live.

mem0 knows days, LangGraph minutes: what has expired meanwhile is still in the memory until it is swept, and must not
be told to anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time
from typing import Any

EXPIRES = "lg_expires"
"""Where a fact of the store says when it expires: seconds since the epoch."""


def is_over(fact: Mapping[str, Any]) -> bool:
    """Whether a fact's time is over, by its payload or metadata."""
    expires = fact.get(EXPIRES)
    return isinstance(expires, int | float) and expires <= time()


def living(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of mem0's search results whose time is not over."""
    return [result for result in found if not is_over(result.get("metadata") or {})]
