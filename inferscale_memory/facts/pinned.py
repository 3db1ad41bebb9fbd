"""Memories that stand in every prompt of their scope, whatever is asked: those whose metadata an app has marked.

They stand in front, in the order in which they were written, each encoded behind those before it: a chain, whose blobs
are exact. What is recalled stands behind them, and is encoded behind those that were there when it was written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferscale_memory.errors import ClosedError
from inferscale_memory.facts.expiry import is_expired
from inferscale_memory.facts.repeats import facts_once, lines_once
from inferscale_memory.facts.scope import Scope
from inferscale_memory.facts.search_result import Placement, SearchResult
from inferscale_memory.facts.text import payload_of
from inferscale_memory.journal import Fact, Journal
from inferscale_memory.mem0_adapter.rows import rows_of

MOST = 256
"""As many of a scope stand, those that were written first: more would leave no room for what is recalled."""
LISTED = 4 * MOST
"""As many rows are looked through."""

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

    def in_order(self, listed: Sequence[Mapping[str, Any]]) -> list[SearchResult]:
        """What mem0 lists of a scope's pinned facts, in the order in which they were written."""
        rows = {str(row["id"]): row for row in listed if self._marked(payload_of(row))}
        written = self._first(list(rows))
        once = lines_once(rows[name] for name in written)
        return [SearchResult(row, Placement.PINNED, score=1.0) for row in once]

    def before(self, fact: Fact) -> tuple[list[Fact], bool]:
        """The pinned facts that were written before `fact` and carry its ids, in order; and whether it is one."""
        scope = Scope.read(fact.scope)
        wanted = self.filters(scope.ids)
        if wanted is None:
            return [], False
        try:
            rows = rows_of(self._store().list(filters=wanted, top_k=LISTED))
        except ClosedError:
            raise
        except Exception as error:  # whatever stores raise
            _log.warning(
                "memory %s is not encoded behind pinned ones: they cannot be listed (%s)", fact.fact, error
            )
            return [], False
        names = [str(row.id) for row in rows if self._marked(row.payload or {})]
        known = self._journal.facts.get(names)
        inside = [
            name
            for name, other in known.items()
            if other.owner == fact.owner and scope.covers(Scope.read(other.scope))
        ]
        first = [other.fact for other in facts_once([known[name] for name in self._first(inside)])[0]]
        if fact.fact in first:
            return [known[name] for name in first[: first.index(fact.fact)]], True
        places = self._journal.facts.places([fact.fact, *first])
        own = places.get(fact.fact, 0)  # 0: forgotten meanwhile
        return [known[name] for name in first if places.get(name, own) < own], False

    def _marked(self, payload: Mapping[str, Any]) -> bool:
        """Whether a row is pinned and lives. Stores do not all compare as strictly as they should."""
        return payload.get(self.mark) is True and not is_expired(payload)

    def _first(self, names: Sequence[str]) -> list[str]:
        """Those that stand, in the order written."""
        places = self._journal.facts.places(names)
        written = sorted(names, key=lambda name: (places.get(name, 0), name))
        if len(written) > MOST:
            _log.warning("%d memories of one scope are pinned: the first %d stand", len(written), MOST)
        return written[:MOST]
