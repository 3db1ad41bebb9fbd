"""The facts nearest to a fact, of those that were there before it: its likely company when it is recalled.

Later ones are left out, so that writing one makes no other blob stale. They carry every id of the fact, and nobody
else's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from inferscale_memory.journal import Fact, Journal
from inferscale_memory.memory.rows import rows_of
from inferscale_memory.memory.scope import Scope
from inferscale_memory.memory.words import is_expired

_LATER = 3
"""How many times as many are asked for: later ones are among them."""

_log = logging.getLogger(__name__)


class Embedder(Protocol):
    """mem0's."""

    def embed(self, text: str, memory_action: Any = None) -> Any: ...


class Nearest:
    """Of the facts in one store. Attributes: n: how many at most."""

    def __init__(
        self, journal: Journal, store: Callable[[], Any], embedder: Callable[[], Embedder], n: int
    ) -> None:
        self.n = n
        self._journal = journal
        self._store = store
        self._embedder = embedder

    def before(self, fact: Fact) -> list[Fact]:
        """At most n facts as the journal knows them, the nearest last. None where they cannot be searched for."""
        if not self.n:
            return []
        try:
            vector = self._embedder().embed(fact.text, "search")
            found = self._store().search(
                query=fact.text,
                vectors=vector,
                top_k=_LATER * (self.n + 1),
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
        nearest = [name for name in dict.fromkeys(living) if name in places and places[name] < own][: self.n]
        known = self._journal.facts(nearest)
        return [
            known[name] for name in reversed(nearest) if name in known and known[name].owner == fact.owner
        ]
