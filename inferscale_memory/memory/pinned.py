"""Memories that stand in every prompt of their scope, whatever is asked: those whose metadata an app has marked.

They stand in front, in the order in which they were written, each encoded behind those before it: a chain, whose blobs
are exact. What is recalled stands behind them, and is encoded behind those that were there when it was written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferscale_memory.journal import Fact, Journal
from inferscale_memory.memory.rows import rows_of
from inferscale_memory.memory.scope import Scope
from inferscale_memory.memory.words import is_expired

MOST = 256
"""As many of a scope are looked for: more would leave no room for what is recalled."""

_log = logging.getLogger(__name__)


class Pinned:
    """Of the facts in one store.

    Attributes:
        mark: the metadata key that is true of them; "" where nothing is pinned.
    """

    def __init__(self, journal: Journal, store: Callable[[], Any], mark: str) -> None:
        self.mark = mark
        self._journal = journal
        self._store = store

    def filters(self, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
        """Filters that only pinned facts of those `wanted` pass. None where these say themselves what is marked, or
        nothing is pinned."""
        return {**wanted, self.mark: True} if self.mark and self.mark not in wanted else None

    def in_front(
        self, listed: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """What mem0 lists of a scope's pinned facts, marked as `pinned`, then what its search found besides."""
        places = self._journal.places(str(row["id"]) for row in listed)
        written = sorted(listed, key=lambda row: (places.get(str(row["id"]), 0), str(row["id"])))
        names = {row["id"] for row in written}
        front = [{**row, "score": 1.0, "pinned": True} for row in written]
        return [*front, *(dict(row) for row in found if row["id"] not in names)]

    def before(self, fact: Fact) -> tuple[list[Fact], bool]:
        """The pinned facts that were written before `fact` and carry its ids, in order; and whether it is one."""
        wanted = self.filters(Scope.read(fact.scope).ids)
        if wanted is None:
            return [], False
        try:
            rows = rows_of(self._store().list(filters=wanted, top_k=MOST))
        except Exception as error:  # whatever stores raise
            _log.warning(
                "memory %s is not encoded behind pinned ones: they cannot be listed (%s)", fact.fact, error
            )
            return [], False
        names = [str(row.id) for row in rows if not is_expired(row.payload or {})]
        places = self._journal.places([fact.fact, *names])
        own = places.get(fact.fact)
        if own is None:  # forgotten meanwhile
            return [], False
        earlier = sorted((name for name in names if places.get(name, own) < own), key=places.__getitem__)
        known = self._journal.facts(earlier)
        facts = [known[name] for name in earlier if name in known]
        return [other for other in facts if other.owner == fact.owner], fact.fact in names
