"""Who holds how much of one tier, and whose blob gives way where room is short.

Blobs of owners that have been idle for a while go first, the least recently used before all others. Among owners that
are in use the one that holds most gives way, its least recently used blob first: however much one of them recalls,
the others keep their share of the tier.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

IDLE_S = 600.0
"""Seconds after which an owner whose blobs nobody used is idle: about as long as somebody thinks between questions."""


@dataclass(slots=True)
class _Share:
    blobs: OrderedDict[str, int] = field(
        default_factory=OrderedDict
    )  # key -> tokens, least recently used first
    tokens: int = 0
    used: float = 0.0


class Shares:
    """The blobs on one tier by owner. Every operation takes O(log owners), and a step over what is pinned."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: OrderedDict[str, _Share] = OrderedDict()  # least recently used first
        self._largest: list[
            tuple[int, str]
        ] = []  # a heap of (-tokens, owner), with entries that are out of date

    def __len__(self) -> int:
        """Owners with blobs here."""
        return len(self._owners)

    def tokens(self, owner: str) -> int:
        """Tokens of this owner's blobs here."""
        share = self._owners.get(owner)
        return share.tokens if share is not None else 0

    def add(self, owner: str, key: str, tokens: int) -> None:
        """A blob stands here now, used just now."""
        share = self._owners.setdefault(owner, _Share())
        share.blobs[key] = tokens
        share.tokens += tokens
        self._use(owner, share)
        self._rank(owner, share)

    def remove(self, owner: str, key: str) -> None:
        """A blob stands here no more."""
        share = self._owners[owner]
        share.tokens -= share.blobs.pop(key)
        if share.blobs:
            self._rank(owner, share)
        else:
            del self._owners[owner]

    def touch(self, owner: str, key: str) -> None:
        """A blob was used just now, if it stands here."""
        share = self._owners.get(owner)
        if share is not None and key in share.blobs:
            share.blobs.move_to_end(key)
            self._use(owner, share)

    def victim(self, pinned: Collection[str]) -> str | None:
        """The key of the blob that gives way first; None when all are pinned."""
        idle = self._clock() - IDLE_S
        for share in self._owners.values():
            if share.used > idle:
                break
            if key := _first(share, pinned):
                return key
        return self._of_largest(pinned)

    def _of_largest(self, pinned: Collection[str]) -> str | None:
        full: list[tuple[int, str]] = []  # of these everything is pinned
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
