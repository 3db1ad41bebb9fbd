"""The directory of blobs: which exist, whose they are, on which tiers they lie, and what must be moved.

The store decides and never touches a tensor: it returns `Move`s, which whoever holds the arenas carries out in order.
That lets it live in vLLM's scheduler while the tensors live in the workers.

Invariants:
- A key is in the directory only when its tensors are complete on at least one tier.
- A copy in a lower tier stays when a blob is promoted, so most evictions move nothing. Where room is short such copies
  go first: no blob is lost while a tier has room for all that stands on no faster one, and for what is being promoted.
- What is pinned is neither evicted nor demoted, on any tier, until `unpin_all`.
- Moves are to be executed in the order of `take_moves`, before anything else of their step, and then its wipes.
- Rows that are given back are wiped in the next step that is ordered, before anything else is written to them: what a
  forgotten or evicted blob held is nowhere any more, whoever has its rows next.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from inferscale_memory.kv.arena import Rows
from inferscale_memory.kv.shares import Shares
from inferscale_memory.kv.tier import Tier


@dataclass(slots=True)
class Entry:
    """One blob in the directory. `rows` maps the number of a tier to the blob's places there."""

    key: str
    owner: str
    ids_digest: bytes
    tokens: int
    rows: dict[int, Rows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Move:
    """Copy rows of one tier into rows of another. Tiers are numbered from the fastest, 0."""

    source: int
    source_rows: Rows
    target: int
    target_rows: Rows


@dataclass(frozen=True, slots=True)
class Wipe:
    """Fill rows of one tier with zeros."""

    tier: int
    rows: Rows


class BlobStore:
    """Blobs over tiers, fastest first, each with a budget. Where room is short, `Shares` says who gives way."""

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float] = time.monotonic) -> None:
        if not tiers:
            raise ValueError("a blob store needs at least one tier")
        self.tiers = tuple(tiers)
        self._entries: dict[str, Entry] = {}
        self._shares = tuple(Shares(clock) for _ in tiers)
        self._copies: tuple[OrderedDict[str, None], ...] = tuple(OrderedDict() for _ in tiers)
        self._stored = [0] * len(tiers)  # tokens of blobs, by tier
        self._pinned: set[str] = set()
        self._moves: list[Move] = []
        self._unwiped = [np.zeros(tier.capacity, dtype=np.bool_) for tier in tiers]
        self._given_back = [False] * len(tiers)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str) -> Entry | None:
        """The entry of `key` if its blob is at hand on any tier. Changes nothing."""
        return self._entries.get(key)

    def known(self, keys: Iterable[str]) -> list[str]:
        """Those of `keys` whose blobs are at hand, in order. Changes nothing."""
        return list(filter(self._entries.__contains__, keys))

    def touch(self, keys: Iterable[str]) -> None:
        """Mark as used just now, in order."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            for number in entry.rows:
                self._shares[number].touch(entry.owner, key)
                if key in self._copies[number]:
                    self._copies[number].move_to_end(key)

    def touch_composition(self, keys: Iterable[str]) -> None:
        """Mark blobs that are injected behind each other as used just now. The last one gives way first: nothing is
        injected behind one that is missing."""
        self.touch(reversed(list(keys)))

    def pin(self, keys: Iterable[str]) -> None:
        """Keep these where they are until `unpin_all`."""
        self._pinned.update(keys)

    def unpin_all(self) -> None:
        self._pinned.clear()

    def take_moves(self) -> list[Move]:
        """Copies to be carried out, in order; each is returned once."""
        moves, self._moves = self._moves, []
        return moves

    def take_wipes(self) -> list[Wipe]:
        """Rows to be wiped behind the moves of the same step; each is returned once."""
        wipes = []
        for number, unwiped in enumerate(self._unwiped):
            if self._given_back[number]:
                self._given_back[number] = False
                if len(rows := np.flatnonzero(unwiped)):
                    wipes.append(Wipe(number, rows))
                    unwiped[rows] = False
        return wipes

    # -- writing ------------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> Rows | None:
        """Places on the fastest tier for a blob that is about to be written, evicting as needed.

        They belong to the caller until `commit` or `release`. None when even eviction cannot make room.
        """
        if not self._make_room(0, tokens):
            return None
        return self.tiers[0].take(tokens)

    def reservable(self, tokens: int) -> bool:
        """Whether `reserve` would find room now. Changes nothing."""
        return tokens <= self._room(0)

    def release(self, rows: Rows) -> None:
        """Give back what `reserve` handed out and nobody committed."""
        self._give(0, rows)

    def commit(self, key: str, owner: str, ids_digest: bytes, rows: Rows) -> Entry:
        """Enter a blob whose tensors now stand complete in `rows`. A key that is known keeps its first blob."""
        known = self._entries.get(key)
        if known is not None:
            self.release(rows)
            self.touch((key,))
            return known
        entry = self._entries[key] = Entry(key, owner, ids_digest, len(rows))
        self._place(entry, 0, rows)
        return entry

    def forget(self, key: str) -> bool:
        """Drop a blob from every tier; whether it was there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._pinned.discard(key)
        for number in list(entry.rows):
            self._displace(entry, number)
        return True

    def clear(self) -> None:
        """Drop every blob. What is reserved stays reserved."""
        for key in list(self._entries):
            self.forget(key)
        self._moves.clear()

    # -- reading ------------------------------------------------------------------------------------------------

    def promotable(self, entries: Sequence[Entry], beside: int = 0) -> int:
        """How many of the leading `entries` can stand on the fastest tier at once, with `beside` tokens still to be
        reserved. Changes nothing."""
        room = self._room(0) - beside
        seen: set[str] = set()
        for count, entry in enumerate(entries):
            stays = 0 in entry.rows and entry.key in self._pinned
            if not stays and entry.key not in seen:
                room -= entry.tokens
                if room < 0:
                    return count
            seen.add(entry.key)
        return len(entries)

    def holds(self, entries: Sequence[Entry], beside: int = 0) -> bool:
        """Whether all `entries` could stand on the fastest tier at once if nothing were pinned, with `beside` tokens
        reserved. Changes nothing."""
        tokens = {entry.key: entry.tokens for entry in entries}
        return sum(tokens.values()) + beside <= self.tiers[0].free + self._stored[0]

    def promote(self, entries: Sequence[Entry]) -> bool:
        """Bring all `entries` to the fastest tier, pin and touch them. False, and nothing moved, if they do not fit."""
        if self.promotable(entries) < len(entries):
            return False
        self.pin(entry.key for entry in entries)
        # Now, so that what is pinned is last to be looked at, and when all have their places.
        self.touch_composition(entry.key for entry in entries)
        for entry in entries:
            if 0 not in entry.rows:
                self._bring_up(entry)
        self.touch_composition(entry.key for entry in entries)
        return True

    # -- inside -------------------------------------------------------------------------------------------------

    def _bring_up(self, entry: Entry) -> None:
        self._make_room(0, entry.tokens)
        self._copy(entry, min(entry.rows), 0)

    def _copy(self, entry: Entry, source: int, target: int) -> None:
        """Have a blob copied to another tier, where there is room for it."""
        rows = self.tiers[target].take(entry.tokens)
        assert rows is not None, "there was room"
        self._unwiped[target][rows] = False  # they are written whole
        self._moves.append(Move(source, entry.rows[source], target, rows))
        self._place(entry, target, rows)

    def _make_room(self, number: int, tokens: int) -> bool:
        """Evict from a tier until `tokens` are free: first copies of what stands on a faster one, then as `Shares` has
        it. False if they cannot be."""
        if tokens > self._room(number):
            return False
        while self.tiers[number].free < tokens:
            key = next((key for key in self._copies[number] if key not in self._pinned), None)
            key = key or self._shares[number].victim(self._pinned)
            assert key is not None, "_room() counted what may be evicted"
            self._evict(number, self._entries[key])
        return True

    def _room(self, number: int) -> int:
        """Tokens of a tier that are free, or held by blobs that may be evicted."""
        pinned = sum(
            entry.tokens for key in self._pinned if (entry := self._entries.get(key)) and number in entry.rows
        )
        return self.tiers[number].free + self._stored[number] - pinned

    def _place(self, entry: Entry, number: int, rows: Rows) -> None:
        entry.rows[number] = rows
        self._shares[number].add(entry.owner, entry.key, entry.tokens)
        self._stored[number] += entry.tokens
        self._tell_copies(entry)

    def _displace(self, entry: Entry, number: int) -> None:
        self._give(number, entry.rows.pop(number))
        self._shares[number].remove(entry.owner, entry.key)
        self._copies[number].pop(entry.key, None)
        self._stored[number] -= entry.tokens
        self._tell_copies(entry)

    def _give(self, number: int, rows: Rows) -> None:
        self.tiers[number].give(rows)
        self._unwiped[number][rows] = True
        self._given_back[number] = True

    def _tell_copies(self, entry: Entry) -> None:
        """Which of its places are not the fastest it has."""
        for number in entry.rows:
            if number > min(entry.rows):
                self._copies[number].setdefault(entry.key)
            else:
                self._copies[number].pop(entry.key, None)

    def _evict(self, number: int, entry: Entry) -> None:
        """Drop a blob's copy on one tier, keeping it on the next where there is no other copy and there is room."""
        below = number + 1
        if len(entry.rows) == 1 and below < len(self.tiers) and self._make_room(below, entry.tokens):
            self._copy(entry, number, below)
        self._displace(entry, number)
        if not entry.rows:
            del self._entries[entry.key]
