"""In which order memories are retrieved, and in which they are placed in a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from inferscale_memory.facts.search_result import Placement
from inferscale_memory.recall.retrieved import RetrievedMemory

BEST_LAST, CHRONOLOGICAL, SESSIONS = ORDERS = ("best_last", "chronological", "sessions")
"""The most relevant last; as they were said; each session together and as it was said, that of the most relevant
last."""


def by_relevance(memories: Sequence[RetrievedMemory]) -> tuple[RetrievedMemory, ...]:
    """The most relevant first; of equally relevant ones the newest. Pinned memories come before all others, as they
    are given, and so does a whole scope, which nothing was searched in.

    Scores are rounded, because those of two searches differ in their last digits: two facts that say the same would
    change places now and then, and the same question would get another prompt.
    """
    pinned = [memory for memory in memories if memory.pinned]
    others = [memory for memory in memories if not memory.pinned]
    if not _whole(others):
        others.sort(key=lambda memory: (-round(memory.score, 4), -memory.moment, memory.id))
    return (*pinned, *others)


def as_placed(memories: Sequence[RetrievedMemory], order: str) -> list[RetrievedMemory]:
    """`memories`, the most relevant first, in the order of the prompt. Pinned ones go in front and a whole scope goes
    as it was written, so that each is behind those it was encoded behind. `order` applies to all others."""
    pinned = [memory for memory in memories if memory.pinned]
    others = [memory for memory in reversed(memories) if not memory.pinned]
    if order == BEST_LAST or _whole(others):
        return pinned + others
    chronological = sorted(others, key=lambda memory: (memory.moment, memory.place))
    return pinned + (_by_session(chronological, others) if order == SESSIONS else chronological)


def _by_session(
    chronological: Sequence[RetrievedMemory], ranked: Sequence[RetrievedMemory]
) -> list[RetrievedMemory]:
    """A memory without a session is a session of its own. In `ranked` the most relevant is the last."""

    def session(memory: RetrievedMemory) -> int | str:
        return memory.id if memory.session is None else memory.session

    best = {session(memory): rank for rank, memory in enumerate(ranked)}
    return sorted(chronological, key=lambda memory: best[session(memory)])


def _whole(memories: Sequence[RetrievedMemory]) -> bool:
    return all(memory.placement is Placement.WHOLE for memory in memories)
