"""A memory on its way from a search through the prompt to the reply. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from inferscale_memory.facts.search_result import Placement
from inferscale_memory.journal import Epoch


@dataclass(frozen=True, slots=True)
class RetrievedMemory:
    """A memory that a question retrieved.

    Attributes:
        id: mem0's id. Two memories are equal when id, text, score and `injected` are.
        text: what it says.
        score: relevance, as mem0's search gave it; 1.0 where nothing was searched, because the memory is pinned or the
            scope is taken whole.
        injected: whether its keys and values were placed in the cache; otherwise it was prefilled as text.
        line: what the prompt says of it, with date and speaker.
        digest: of `line`.
        when: its date.
        ids: token ids of `line`.
        owner: whose it is.
        tag: the name by which the engine forgets it.
        key: key of its blob; None where it is prefilled as text.
        placement: why it was retrieved.
        place: a number that grows in the order of writing; 0 where the journal does not know the memory.
        session: the session it was said in, if any.
        foreign: another program wrote it so, and the journal does not know these words yet.
    """

    id: str
    text: str
    score: float
    injected: bool = False
    line: str = field(default="", repr=False, compare=False)
    digest: str = field(default="", repr=False, compare=False)
    when: datetime | None = field(default=None, repr=False, compare=False)
    ids: tuple[int, ...] = field(default=(), repr=False, compare=False)
    owner: str = field(default="", repr=False, compare=False)
    tag: str = field(default="", repr=False, compare=False)
    key: str | None = field(default=None, repr=False, compare=False)
    placement: Placement = field(default=Placement.NEAREST, repr=False, compare=False)
    place: int = field(default=0, repr=False, compare=False)
    session: int | None = field(default=None, repr=False, compare=False)
    foreign: bool = field(default=False, repr=False, compare=False)

    @property
    def pinned(self) -> bool:
        """Whether it goes in front of all others and is left out last."""
        return self.placement is Placement.PINNED

    @property
    def moment(self) -> float:
        """Its date in seconds since the epoch, read as UTC without a time zone; minus infinity without a date."""
        if self.when is None:
            return float("-inf")
        return (self.when if self.when.tzinfo else self.when.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What a search found.

    Attributes:
        memories: the most relevant first.
        epoch: the journal's epoch when it was asked about them.
    """

    memories: tuple[RetrievedMemory, ...]
    epoch: Epoch | None
