"""Rows as mem0's stores return them, which wrap them in various ways."""

from __future__ import annotations

from typing import Any

MOST = 1_000_000
"""How many rows of a store are looked through. mem0 itself stops at 10,000 entities."""


def rows_of(listed: Any) -> list[Any]:
    """The rows in what a store's `list` or `search` returns."""
    if isinstance(listed, list | tuple) and listed and isinstance(listed[0], list | tuple):
        listed = listed[0]
    return list(listed or ())
