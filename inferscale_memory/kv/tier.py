"""One level of the blob store, as the store sees it: room that can be taken and given back."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from inferscale_memory.kv.arena import Rows


class Tier(Protocol):
    """Room for blobs. A tier keeps no directory; it only hands out places.

    `device` and `host` are `RowTier`s. A disk or shared tier hands out places of its own kind by the same two calls.
    """

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int:
        """Tokens in all."""
        ...

    @property
    def free(self) -> int:
        """Tokens not handed out."""
        ...

    def take(self, tokens: int) -> Rows | None:
        """Places for `tokens` tokens, or None when there are not that many."""
        ...

    def give(self, rows: Rows) -> None:
        """Take back what `take` handed out."""
        ...


class RowTier:
    """Rows of an arena. Any free row serves any token, so room never fragments."""

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self._stack: Rows = np.arange(capacity, dtype=np.int64)
        self._free = capacity

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity(self) -> int:
        return len(self._stack)

    @property
    def free(self) -> int:
        return self._free

    def take(self, tokens: int) -> Rows | None:
        if tokens > self._free:
            return None
        self._free -= tokens
        return self._stack[self._free : self._free + tokens].copy()

    def give(self, rows: Rows) -> None:
        if self._free + len(rows) > self.capacity:
            raise ValueError(f"tier {self.name}: more rows given back than were taken")
        self._stack[self._free : self._free + len(rows)] = rows
        self._free += len(rows)
