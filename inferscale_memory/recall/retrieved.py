"""A search result as the prompt needs it. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from inferscale_memory.facts.text import Words
from inferscale_memory.recall.results import Recalled


@dataclass(frozen=True, slots=True)
class Found:
    """A memory that a search found, or that comes with every search.

    Attributes:
        owner, tag: whose it is, and the name by which it is forgotten.
        ids: token ids of its line.
        whole: it is one of all that the scope has.
        pinned: it stands in front, whatever is asked.
    """

    recalled: Recalled
    words: Words
    owner: str
    tag: str
    ids: tuple[int, ...]
    whole: bool = False
    pinned: bool = False
