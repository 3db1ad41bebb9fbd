"""Rows as mem0's stores return them, which wrap them in various ways."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

MOST = 1_000_000
"""How many rows of a store are looked through. mem0 itself stops at 10,000 entities."""

_log = logging.getLogger(__name__)


def ids_in(store: Any, filters: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Ids of the rows that match, as far as the store lists them: some servers refuse to list so many, and then it
    is mem0's business how it deletes them."""
    try:
        return tuple(str(row.id) for row in rows_of(store.list(filters=filters, top_k=MOST)))
    except Exception as error:
        _log.info("the store does not list what it holds: %s", error)
        return ()


def rows_of(listed: Any) -> list[Any]:
    """The rows in what a store's `list` or `search` returns."""
    if isinstance(listed, list | tuple) and listed and isinstance(listed[0], list | tuple):
        listed = listed[0]
    return list(listed or ())
