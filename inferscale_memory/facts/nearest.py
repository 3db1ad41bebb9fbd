"""The facts nearest to a fact, of those that were there before it: its likely company when it is recalled.

Later ones are left out, so that writing one makes no other blob stale. They carry every id of the fact, and nobody
else's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

from inferscale_memory.errors import ClosedError
from inferscale_memory.facts.expiry import is_expired
from inferscale_memory.facts.repeats import facts_once, same_words
from inferscale_memory.facts.scope import Scope
from inferscale_memory.journal import Fact, Journal
from inferscale_memory.mem0_adapter.rows import rows_of

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

    def before(self, fact: Fact, besides: Collection[Fact] = ()) -> list[Fact]:
        """At most n facts as the journal knows them, the nearest last, and none of `besides`. None at all where they
        cannot be searched for."""
        if not self.n:
            return []
        scope, out = Scope.read(fact.scope), {other.fact for other in besides}
        try:
            vector = self._embedder().embed(fact.text, "search")
            found = self._store().search(
                query=fact.text,
                vectors=vector,
                top_k=_LATER * (self.n + 1) + len(besides),
                filters=scope.ids,
            )
        except ClosedError:
            raise
        except Exception as error:  # whatever embedders and stores raise
            _log.warning(
                "memory %s is encoded without neighbours: they cannot be searched for (%s)", fact.fact, error
            )
            return []
        living = [str(row.id) for row in rows_of(found) if not is_expired(row.payload or {})]
        places = self._journal.facts.places([fact.fact, *living])
        own = places.pop(fact.fact, None)
        if own is None:  # forgotten meanwhile
            return []
        earlier = [name for name in dict.fromkeys(living) if places.get(name, own) < own and name not in out]
        known = self._journal.facts.get(earlier)
        inside = [
            known[name]
            for name in earlier
            if name in known
            and known[name].owner == fact.owner
            and scope.covers(Scope.read(known[name].scope))
        ]
        others = [other for other in inside if not same_words(other, fact)]
        return facts_once(others)[0][: self.n][::-1]
