"""One tier of the blob store, as the store sees it: rows that can be taken and given back."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
"""Row numbers of one tier, [tokens]: where each token of a blob is kept."""


class Tier(Protocol):
    """Room for blobs. A tier keeps no directory; it only hands out rows.

    The device and the host tier are `RowAllocator`s.
    """

    @property
    def name(self) -> str: ...
    @property
    def capacity(self) -> int:
        """Tokens that fit into the empty tier."""
        ...

    @property
    def free(self) -> int:
        """Tokens that are not handed out."""
        ...

    def take(self, tokens: int) -> Rows | None:
        """Rows for `tokens` tokens, or None when fewer are free."""
        ...

    def give(self, rows: Rows) -> None:
        """Take back rows that `take` handed out.

        Raises:
            ValueError: some of the rows are not handed out. The tier would later hand them to two blobs.
        """
        ...


class RowAllocator:
    """Hands out the rows of an arena. Any free row fits any token, so the arena never fragments."""

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
            raise ValueError(f"tier {self.name}: rows were given back that are not handed out")
        self._out[rows] = False
        self._stack[self._free : self._free + len(rows)] = rows
        self._free += len(rows)
