"""All that a scope remembers, while it fits a budget: then nothing need be searched, and what is injected is exact.

Facts stand in the order in which they were written, and each is encoded behind all before it, which are injected from
their blobs. So the composition holds what a prefill of the whole would have left, and a new fact costs its own tokens.
It must never leave a fact out silently: where not all fit, the question is served by search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from inferscale_memory.journal import Fact, Journal
from inferscale_memory.memory.scope import Scope
from inferscale_memory.memory.words import Words, payload_of, words_of

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

    def in_order(self, listed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """mem0's listing of a scope as its search would return it, the fact written last as the most relevant. None
        when not all of it fits."""
        lines = (words_of(payload_of(row)).line for row in listed)
        if len(listed) >= self.most_rows or not self._fit(lines):
            return None
        places = self._journal.places(str(row["id"]) for row in listed)
        written = sorted(listed, key=lambda row: (places.get(str(row["id"]), 0), str(row["id"])))
        rows = [{**row, "score": rank / len(written)} for rank, row in enumerate(written, 1)]
        return rows[::-1]

    def before(self, fact: Fact) -> list[Fact] | None:
        """All facts that were written before `fact` and carry its ids, in order. None when they do not fit with it."""
        scope = Scope.read(fact.scope)
        names = self._journal.facts_within(lambda key: scope.covers(Scope.read(key)))
        places = self._journal.places(names)
        earlier = [name for name in names if places[name] < places.get(fact.fact, 0)]
        if len(earlier) >= self.most_rows:
            return None
        known = self._journal.facts(earlier)
        facts = [known[name] for name in sorted(known, key=places.__getitem__)]
        facts = [other for other in facts if other.owner == fact.owner]
        lines = (Words(other.text, other.speaker, other.when).line for other in (*facts, fact))
        return facts if self._fit(lines) else None

    def _fit(self, lines: Iterable[str]) -> bool:
        left = self.budget
        for line in lines:
            left -= len(self._line_ids(line))
            if left < 0:
                return False
        return True
