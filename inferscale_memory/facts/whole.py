"""All that a scope remembers, while it fits a budget: then nothing need be searched, and what is injected is exact.

Facts stand in the order in which they were written, and each is encoded behind all before it, which are injected from
their blobs. So the composition holds what a prefill of the whole would have left, and a new fact costs its own tokens.
It must never leave a fact out silently: where not all fit, the question is served by search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from inferscale_memory.facts.expiry import is_expired
from inferscale_memory.facts.repeats import facts_once, lines_once
from inferscale_memory.facts.scope import Scope
from inferscale_memory.facts.search_result import Placement, SearchResult
from inferscale_memory.facts.text import Words, payload_of, words_of
from inferscale_memory.journal import Fact, Journal

_SHORTEST = 4
"""Hardly a line has fewer tokens: so many rows more than fit need not be looked at."""


class Whole:
    """Decides whether everything fits.

    Args:
        line_ids: token ids of a fact's line.
        budget: most tokens; 0 where nothing is to be taken whole.
    """

    def __init__(self, journal: Journal, line_ids: Callable[[str], tuple[int, ...]], budget: int) -> None:
        self._journal = journal
        self._line_ids = line_ids
        self.budget = budget

    @property
    def most_rows(self) -> int:
        """With as many rows a scope cannot fit."""
        return self.budget // _SHORTEST + 1

    def in_order(self, listed: Sequence[Mapping[str, Any]]) -> list[SearchResult] | None:
        """Of all that mem0 lists of a scope, expired or not, what has not expired: the fact written last comes first.
        None if not all of it fits, or if not all of it may have been listed."""
        if len(listed) >= self.most_rows:
            return None
        living = [row for row in listed if not is_expired(payload_of(row))]
        places = self._journal.facts.places(str(row["id"]) for row in living)
        written = lines_once(sorted(living, key=lambda row: (places.get(str(row["id"]), 0), str(row["id"]))))
        if not self._fit(words_of(payload_of(row)).line for row in written):
            return None
        return [SearchResult(row, Placement.WHOLE, score=1.0) for row in reversed(written)]

    def before(self, fact: Fact) -> tuple[list[Fact], list[Fact]] | None:
        """All facts that were written before `fact` and carry its ids, in order, and apart from them those that repeat
        one of them, which stand in no prompt. None when they do not fit with it, or nothing is taken whole."""
        if not self.budget:
            return None
        scope = Scope.read(fact.scope)
        earlier = self._journal.facts.before(
            fact.fact, lambda key: scope.covers(Scope.read(key)), self.most_rows
        )
        if earlier is None:
            return None
        facts, repeats = facts_once([other for other in earlier if other.owner == fact.owner])
        lines = (Words(other.text, other.speaker, other.when).line for other in (*facts, fact))
        return (facts, repeats) if self._fit(lines) else None

    def _fit(self, lines: Iterable[str]) -> bool:
        left = self.budget
        for line in lines:
            left -= len(self._line_ids(line))
            if left < 0:
                return False
        return True
