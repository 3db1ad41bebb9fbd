"""In which order memories stand in a prompt.

Pinned ones stand in front, and a whole memory stands, as they were written: so each was encoded behind those before it.
The others stand as the configuration says. Relevance is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC

from inferscale_memory.facts.text import Words
from inferscale_memory.journal import Journal
from inferscale_memory.recall.retrieved import Found

BEST_LAST, CHRONOLOGICAL, SESSIONS = ORDERS = ("best_last", "chronological", "sessions")
"""The most relevant last; as they were said; each session together and as it was said, that of the most relevant
last."""


def arranged(ranked: Sequence[Found], order: str, journal: Journal) -> list[Found]:
    """`ranked`, of which the most relevant is the last, as they are to stand. The pinned one that was written first
    counts as the most relevant of all."""
    front = [memory for memory in reversed(ranked) if memory.pinned]
    behind = [memory for memory in ranked if not memory.pinned]
    as_said = order != BEST_LAST and not all(memory.whole for memory in behind)
    if as_said:
        places = journal.facts.places(memory.recalled.id for memory in behind)
        chronological = sorted(
            behind, key=lambda memory: (_moment(memory.words), places.get(memory.recalled.id, 0))
        )
        behind = _by_session(chronological, behind, journal) if order == SESSIONS else chronological
    return front + behind


def _by_session(chronological: Sequence[Found], ranked: Sequence[Found], journal: Journal) -> list[Found]:
    """What is of no session stands on its own."""
    known = journal.facts.get(memory.recalled.id for memory in ranked)

    def session(memory: Found) -> tuple[str, int | str]:
        fact = known.get(memory.recalled.id)
        if fact is None or fact.session is None:
            return "alone", memory.recalled.id
        return "session", fact.session

    best = {session(memory): rank for rank, memory in enumerate(ranked)}  # of several the highest
    return sorted(chronological, key=lambda memory: best[session(memory)])


def _moment(words: Words) -> float:
    """Seconds since the epoch; what has no date comes first, and what has no time zone is taken as UTC."""
    if words.when is None:
        return float("-inf")
    return (words.when if words.when.tzinfo else words.when.replace(tzinfo=UTC)).timestamp()
