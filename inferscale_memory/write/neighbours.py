"""The facts that a fact is encoded behind: those that it is likely to be recalled with.

Behind them it needs less of the attention that injected facts do not pay to each other.
"""

from __future__ import annotations

from inferscale_memory.facts.nearest import Nearest
from inferscale_memory.facts.pinned import Pinned
from inferscale_memory.facts.whole import Whole
from inferscale_memory.journal import Fact
from inferscale_memory.write.stacking import Near


class Neighbours:
    """All earlier facts while a memory is taken whole, else the pinned ones and then the nearest."""

    def __init__(self, whole: Whole, pinned: Pinned, nearest: Nearest) -> None:
        self._whole = whole
        self._pinned = pinned
        self._nearest = nearest

    def of(self, fact: Fact) -> Near:
        """A fact's neighbours, as the journal knows them. Before a pinned fact stand pinned ones only."""
        everything = self._whole.before(fact)
        if everything is not None:
            facts, repeats = everything
            return Near(fact, tuple(facts), whole=True, turns=False, repeats=tuple(repeats))
        front, pinned = self._pinned.before(fact)
        if pinned:
            return Near(fact, tuple(front), turns=False)
        return Near(fact, (*front, *self._nearest.before(fact, besides=front)))

    def chained(self, fact: Fact) -> bool:
        """Whether the fact is to be encoded behind all before it."""
        return self._whole.before(fact) is not None
