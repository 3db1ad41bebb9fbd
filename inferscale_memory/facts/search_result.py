"""A memory as mem0's search returns it, with the reason why it was retrieved."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Placement(Enum):
    """Why a memory was retrieved, which decides where it goes in the prompt."""

    NEAREST = "nearest"
    """The search found it: it is placed as the configuration says."""
    PINNED = "pinned"
    """It is in every prompt of its scope, in front of all others."""
    WHOLE = "whole"
    """The scope is taken whole: all of it is placed as it was written."""


class SearchResult(dict[str, Any]):
    """One of mem0's search results. The placement is an attribute and not a key, so that results which an app passes
    cannot set it."""

    placement: Placement

    def __init__(self, row: Mapping[str, Any], placement: Placement = Placement.NEAREST, **more: Any) -> None:
        super().__init__(row, **more)
        self.placement = placement


def placement_of(row: Mapping[str, Any]) -> Placement:
    """NEAREST for a plain dictionary."""
    return row.placement if isinstance(row, SearchResult) else Placement.NEAREST
