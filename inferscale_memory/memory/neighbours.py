"""The facts a fact is likely to be recalled with: those nearest to it, known when it was written.

A fact that is encoded behind them needs less of the attention that injected facts do not pay to each other. Later facts
are left out, so that writing one makes no other blob stale. Neighbours carry every id of the fact, and nobody else's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from inferscale_memory.journal import Fact, Journal
from inferscale_memory.memory.pinned import Pinned
from inferscale_memory.memory.rows import rows_of
from inferscale_memory.memory.scope import Scope
from inferscale_memory.memory.stacking import Near
from inferscale_memory.memory.whole import Whole
from inferscale_memory.memory.words import is_expired

_LATER = 3
"""How many times as many are asked for: later ones are among them."""


_log = logging.getLogger(__name__)


class Embedder(Protocol):
    """mem0's."""

    def embed(self, text: str, memory_action: Any = None) -> Any: ...


class Neighbours:
    """Of the facts in one store."""

    def __init__(
        self,
        journal: Journal,
        store: Callable[[], Any],
        embedder: Callable[[], Embedder],
        n: int,
        whole: Whole,
        pinned: Pinned,
    ) -> None:
        self._journal = journal
        self._store = store
        self._embedder = embedder
        self._n = n
        self._whole = whole
        self._pinned = pinned

    def of(self, fact: Fact) -> Near:
        """At most n facts, the nearest last, behind the pinned ones, as the journal knows them; all earlier ones while
        they are taken whole. Before a pinned fact stand pinned ones only."""
        everything = self._whole.before(fact)
        if everything is not None:
            return Near(fact, tuple(everything), whole=True)
        front, among_them = self._pinned.before(fact)
        nearest = self._nearest(fact) if self._n and not among_them else []
        return Near(fact, (*front, *(other for other in nearest if other not in front)))

    def chained(self, fact: Fact) -> bool:
        """Whether the fact is to be encoded behind all before it."""
        return self._whole.before(fact) is not None

    def _nearest(self, fact: Fact) -> list[Fact]:
        try:
            vector = self._embedder().embed(fact.text, "search")
            found = self._store().search(
                query=fact.text,
                vectors=vector,
                top_k=_LATER * (self._n + 1),
                filters=Scope.read(fact.scope).ids,
            )
        except Exception as error:  # whatever embedders and stores raise
            _log.warning(
                "memory %s is encoded without neighbours: they cannot be searched for (%s)", fact.fact, error
            )
            return []
        living = [str(row.id) for row in rows_of(found) if not is_expired(row.payload or {})]
        places = self._journal.places([fact.fact, *living])
        own = places.pop(fact.fact, None)
        if own is None:  # forgotten meanwhile
            return []
        nearest = [name for name in dict.fromkeys(living) if name in places and places[name] < own][: self._n]
        known = self._journal.facts(nearest)
        return [
            known[name] for name in reversed(nearest) if name in known and known[name].owner == fact.owner
        ]
