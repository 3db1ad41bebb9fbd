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
        """Take back what `take` handed out.

        Raises:
            ValueError: some of it is not out. Taken back twice, it would be handed to two blobs.
        """
        ...


class RowTier:
    """Rows of an arena. Any free row serves any token, so room never fragments."""

    def __init__(self, name: str, capacity: int) -> None:
        self._name = name
        self._stack: Rows = np.arange(capacity, dtype=np.int64)
        self._free = capacity
        self._out = np.zeros(capacity, dtype=np.bool_)

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
        rows = self._stack[self._free : self._free + tokens].copy()
        self._out[rows] = True
        return rows

    def give(self, rows: Rows) -> None:
        distinct = np.unique(rows)
        inside = not len(rows) or (distinct[0] >= 0 and distinct[-1] < self.capacity)
        if not inside or len(distinct) < len(rows) or not self._out[distinct].all():
            raise ValueError(f"tier {self.name}: rows given back that were not taken")
        self._out[rows] = False
        self._stack[self._free : self._free + len(rows)] = rows
        self._free += len(rows)
