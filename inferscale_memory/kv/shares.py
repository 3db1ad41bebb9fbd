"""How much of one tier each owner holds, and which blob is evicted when room is short.

Blobs of idle owners are evicted first, those of the least recently used owner before all others. Otherwise the owner
that holds most loses its least recently used blob. So however much one owner recalls, the others keep their share of
the tier.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

IDLE_S = 600.0
"""Seconds without use after which an owner counts as idle: about the longest time people think between questions."""


@dataclass(slots=True)
class _Share:
    # key -> tokens, least recently used first
    blobs: OrderedDict[str, int] = field(default_factory=OrderedDict)
    tokens: int = 0
    used: float = 0.0


class Shares:
    """The blobs of one tier by owner. Every operation takes O(log owners), plus one step per pinned blob."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: OrderedDict[str, _Share] = OrderedDict()  # least recently used first
        # A heap of (-tokens, owner). Entries that are out of date are skipped.
        self._largest: list[tuple[int, str]] = []

    def __len__(self) -> int:
        """How many owners have blobs on this tier."""
        return len(self._owners)

    def tokens(self, owner: str) -> int:
        """Tokens of this owner's blobs on this tier."""
        share = self._owners.get(owner)
        return share.tokens if share is not None else 0

    def add(self, owner: str, key: str, tokens: int) -> None:
        """Enter a blob that is on this tier now. It counts as just used."""
        share = self._owners.setdefault(owner, _Share())
        share.blobs[key] = tokens
        share.tokens += tokens
        self._use(owner, share)
        self._rank(owner, share)

    def remove(self, owner: str, key: str) -> None:
        """Remove a blob that has left this tier."""
        share = self._owners[owner]
        share.tokens -= share.blobs.pop(key)
        if share.blobs:
            self._rank(owner, share)
        else:
            del self._owners[owner]

    def touch(self, owner: str, key: str) -> None:
        """Mark a blob as just used, if it is on this tier."""
        share = self._owners.get(owner)
        if share is not None and key in share.blobs:
            share.blobs.move_to_end(key)
            self._use(owner, share)

    def victim(self, pinned: Collection[str]) -> str | None:
        """The key of the blob to evict first; None when all are pinned."""
        idle = self._clock() - IDLE_S
        for share in self._owners.values():
            if share.used > idle:
                break
            if key := _first(share, pinned):
                return key
        return self._of_largest(pinned)

    def _of_largest(self, pinned: Collection[str]) -> str | None:
        full: list[tuple[int, str]] = []  # owners whose blobs are all pinned
        found: str | None = None
        while found is None and self._largest:
            entry = self._largest[0]
            share = self._owners.get(entry[1])
            if share is None or share.tokens != -entry[0]:
                heapq.heappop(self._largest)
                continue
            found = _first(share, pinned)
            if found is None:
                full.append(heapq.heappop(self._largest))
        for entry in full:
            heapq.heappush(self._largest, entry)
        return found

    def _use(self, owner: str, share: _Share) -> None:
        share.used = self._clock()
        self._owners.move_to_end(owner)

    def _rank(self, owner: str, share: _Share) -> None:
        heapq.heappush(self._largest, (-share.tokens, owner))
        if len(self._largest) > 4 * len(self._owners) + 64:
            self._largest = [(-share.tokens, owner) for owner, share in self._owners.items()]
            heapq.heapify(self._largest)


def _first(share: _Share, pinned: Collection[str]) -> str | None:
    return next((key for key in share.blobs if key not in pinned), None)
