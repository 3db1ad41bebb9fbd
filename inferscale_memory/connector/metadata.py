"""What the two sides tell each other. They share nothing else: they may live on different machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.kv.store import Move, Wipe
from inferscale_memory.kv.tier import Rows

Slots = NDArray[np.int64]
Piece = tuple[str, int, int]
"""(request id, start, stop): positions of one request."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bring arena rows into a request's paged cache.

    Attributes:
        rows, positions, slots: per token, [tokens]: where it lies, where it stands in the prompt, where it goes.
        blocks: the request's blocks that these slots are in, reported when the load fails.
        ahead: the request waits for it, and its forward comes in a later step; else it comes in this one.
        broken: it could not be planned, so it has failed already.
    """

    request: str
    rows: Rows
    positions: NDArray[np.int64]
    slots: Slots
    blocks: tuple[int, ...]
    ahead: bool = False
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Capture:
    """Keep positions `[start, stop)`-within-spans of an encode, computed in this step.

    Attributes:
        piece: what is reported when all layers arrived.
        slots, rows: per kept token, [tokens]: the slot it is written to in this step, the arena row it goes to.
    """

    piece: Piece
    slots: Slots
    rows: Rows


@dataclass(frozen=True, slots=True)
class Orders:
    """Everything the worker side has to do in one step: moves first, then wipes, captures in the forward, and loads
    before it or, where no request of the step needs them, behind it.

    Attributes:
        repeated: slots of one token repeated from the beginning of its prompt: evidence for the start-up check, which
            is made in this step unless it was made before. None where there is no such prompt, or no need.
    """

    moves: Sequence[Move] = ()
    loads: Sequence[Load] = ()
    captures: Sequence[Capture] = ()
    repeated: Slots | None = None
    wipes: Sequence[Wipe] = ()


@dataclass(slots=True)
class Report:
    """What a worker did in one step.

    Attributes:
        captured: pieces whose keys and values arrived from every layer of this rank.
        lost: request id -> why its capture failed.
        loaded: request id -> seconds its load took (host time; on a GPU the copies may still run).
        failed_loads: request ids whose load failed.
        status: None before the start-up check, "" when it passed, else why blobs cannot be used.
    """

    captured: set[Piece] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, float] = field(default_factory=dict)
    failed_loads: set[str] = field(default_factory=set)
    status: str | None = None

    def __bool__(self) -> bool:
        return bool(self.captured or self.lost or self.loaded or self.failed_loads or self.status is not None)

    def merge(self, other: Report) -> Report:
        """What several ranks did together: kept is what all kept, failed what any failed."""
        failed = self.failed_loads | other.failed_loads
        statuses = [status for status in (self.status, other.status) if status is not None]
        return Report(
            captured=self.captured & other.captured,
            lost=self.lost | other.lost,
            loaded={
                name: max(self.loaded.get(name, 0.0), other.loaded.get(name, 0.0))
                for name in (self.loaded.keys() | other.loaded.keys()) - failed
            },
            failed_loads=failed,
            status=next((s for s in statuses if s), "") if statuses else None,
        )
