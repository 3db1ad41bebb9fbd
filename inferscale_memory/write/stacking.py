"""In which order facts are encoded that stand on each other's blobs.

A neighbour that has a blob is injected into the encode of a fact, so that hardly more than the fact's own tokens is
computed. So of facts that are encoded together, those go first that others of them stand on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inferscale_memory.journal import Fact


@dataclass(frozen=True, slots=True)
class Near:
    """A fact and its neighbours, the nearest last.

    Attributes:
        whole: the neighbours are all facts before it, in the order in which they were written.
        turns: whether turns of its session may stand between them and it; not in a chain.
        repeats: facts that are left out because neighbours say the same. When one of them changes, the fact is encoded
            anew.
    """

    fact: Fact
    neighbours: tuple[Fact, ...] = ()
    whole: bool = False
    turns: bool = True
    repeats: tuple[Fact, ...] = ()


def waves(facts: Iterable[Near]) -> Iterator[list[Near]]:
    """Every one of `facts` once, behind all those of its neighbours that are among them. Neighbours of a fact were
    there before it, so there is no circle; if there were one, its facts would come last, together."""
    waiting = list(facts)
    while waiting:
        names = {near.fact.fact for near in waiting}
        free = [near for near in waiting if all(other.fact not in names for other in near.neighbours)]
        ready = free or waiting
        yield ready
        done = {near.fact.fact for near in ready}
        waiting = [near for near in waiting if near.fact.fact not in done]
