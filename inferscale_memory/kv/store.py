"""The directory of blobs: which blobs exist, who owns them, on which tiers they are, and what must be moved.

The store decides and never touches a tensor. It returns `Move`s and `Wipe`s, and the holder of the arenas carries them
out in order. So the store can live in vLLM's scheduler while the tensors live in the workers.

Invariants:
- The directory contains a key only when its tensors are complete on at least one tier.
- A blob is injected only after `verify`: it belongs to the prompt's owner or to everybody, and it was made of the token
  ids that the prompt has in its place.
- Promoting a blob leaves its copy on the lower tier, so most evictions move nothing. When room is short such copies are
  evicted first: no blob is lost while its tier has room for the blobs that are on no faster tier and for those being
  promoted.
- A pinned blob is neither evicted nor demoted, on any tier, until `unpin_all`.
- Moves are carried out in the order of `take_moves`, before anything else in their step, and wipes right after them.
- Rows that are given back are wiped in the next step, before anything else is written to them. So the contents of a
  forgotten or evicted blob do not survive in rows that another blob gets.
"""

from __future__ import annotations

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from inferscale_memory.kv.shares import Shares
from inferscale_memory.kv.tier import Rows, Tier


@dataclass(slots=True)
class Entry:
    """One blob in the directory. `rows` maps the number of a tier to the blob's rows there."""

    key: str
    owner: str
    ids_digest: bytes
    tokens: int
    rows: dict[int, Rows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Move:
    """An order to copy rows of one tier into rows of another. Tiers are numbered from the fastest, 0."""

    source: int
    source_rows: Rows
    target: int
    target_rows: Rows


@dataclass(frozen=True, slots=True)
class Wipe:
    """An order to fill rows of one tier with zeros."""

    tier: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class Verified:
    """The leading blobs of a composition that may be injected. `mismatch`: the next blob was made of other token ids
    than the prompt has in its place; otherwise it is missing, or there is no next one."""

    entries: list[Entry]
    mismatch: bool = False


class BlobStore:
    """Blobs on several tiers, fastest first, each with a budget. When room is short, `Shares` chooses what to evict.

    Args:
        public_owner: the owner whose blobs every owner's prompts may use; None when there is no such owner.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        clock: Callable[[], float] = time.monotonic,
        *,
        public_owner: str | None = None,
    ) -> None:
        if not tiers:
            raise ValueError("a blob store needs at least one tier")
        self.tiers = tuple(tiers)
        self._public_owner = public_owner
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
        """The entry of `key`, if its blob is on any tier. Changes nothing."""
        return self._entries.get(key)

    def known(self, keys: Iterable[str]) -> list[str]:
        """Those of `keys` whose blobs are on any tier, in order. Changes nothing."""
        return list(filter(self._entries.__contains__, keys))

    # -- what may be injected -----------------------------------------------------------------------------------

    def usable(self, owner: str, key: str) -> Entry | None:
        """The entry of `key`, if its blob belongs to `owner` or to everybody. Another owner's blob and a missing one
        look the same. Changes nothing."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.owner in (owner, self._public_owner) else None

    def verify(
        self,
        owner: str,
        segments: Sequence[tuple[str, int]],
        digest_of: Callable[[int, int], bytes],
        *,
        checked: int = 0,
    ) -> Verified:
        """The leading blobs of a composition that may be injected into a prompt of `owner`. Changes nothing.

        Args:
            segments: (key, tokens) of the blobs, in the order of the prompt.
            digest_of: the digest of the prompt's own token ids at positions [start, stop), made in the same way as the
                blob's own digest.
            checked: how many leading segments of this prompt passed before. Their ids are not hashed again, because a
                key always names the same ids.
        """
        entries: list[Entry] = []
        start = 0
        for number, (key, tokens) in enumerate(segments):
            entry = self.usable(owner, key)
            if entry is None:
                break
            stop = start + tokens
            if number >= checked and (
                entry.tokens != tokens or not hmac.compare_digest(entry.ids_digest, digest_of(start, stop))
            ):
                return Verified(entries, mismatch=True)
            entries.append(entry)
            start = stop
        return Verified(entries)

    # -- what was used, and what must be moved ------------------------------------------------------------------

    def touch(self, keys: Iterable[str]) -> None:
        """Mark blobs as just used, in order."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            for number in entry.rows:
                self._shares[number].touch(entry.owner, key)
                if key in self._copies[number]:
                    self._copies[number].move_to_end(key)

    def touch_composition(self, keys: Iterable[str]) -> None:
        """Mark blobs that follow each other in a prompt as just used. The last one is evicted first, because a blob can
        be injected only if all blobs before it are there."""
        self.touch(reversed(list(keys)))

    def pin(self, keys: Iterable[str]) -> None:
        """Keep these blobs where they are until `unpin_all`."""
        self._pinned.update(keys)

    def unpin_all(self) -> None:
        self._pinned.clear()

    def take_moves(self) -> list[Move]:
        """The moves to carry out, in order. Each is returned once."""
        moves, self._moves = self._moves, []
        return moves

    def take_wipes(self) -> list[Wipe]:
        """The rows to wipe after the moves of the same step. Each is returned once."""
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
        """Rows of the fastest tier for a blob that is about to be written; other blobs are evicted as needed.

        The rows belong to the caller until `commit` or `release`. None when even eviction cannot make room.
        """
        if not self._make_room(0, tokens):
            return None
        return self.tiers[0].take(tokens)

    def reservable(self, tokens: int) -> bool:
        """Whether `reserve` would find room now. Changes nothing."""
        return tokens <= self._room(0)

    def release(self, rows: Rows) -> None:
        """Give back rows that `reserve` handed out and that were not committed."""
        self._give(0, rows)

    def commit(self, key: str, owner: str, ids_digest: bytes, rows: Rows) -> Entry:
        """Enter a blob whose tensors are complete in `rows`. A key that is already known keeps its first blob."""
        known = self._entries.get(key)
        if known is not None:
            self.release(rows)
            self.touch((key,))
            return known
        entry = self._entries[key] = Entry(key, owner, ids_digest, len(rows))
        self._place(entry, 0, rows)
        return entry

    def forget(self, key: str) -> bool:
        """Drop a blob from every tier. Returns whether there was one."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._pinned.discard(key)
        for number in list(entry.rows):
            self._displace(entry, number)
        return True

    def forget_of(self, owner: str, keys: Iterable[str]) -> int:
        """Drop those of `keys` that are blobs of `owner`. Returns how many there were."""
        theirs = [key for key in self.known(keys) if self._entries[key].owner == owner]
        return sum(map(self.forget, theirs))

    def clear(self) -> None:
        """Drop every blob. Reserved rows stay reserved."""
        for key in list(self._entries):
            self.forget(key)
        self._moves.clear()

    # -- reading ------------------------------------------------------------------------------------------------

    def promotable(self, entries: Sequence[Entry], beside: int = 0) -> int:
        """How many of the leading `entries` fit on the fastest tier at once, when `beside` more tokens are to be
        reserved there. Changes nothing."""
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
        """Whether all `entries` and `beside` reserved tokens would fit on the fastest tier at once if nothing were
        pinned. Changes nothing."""
        tokens = {entry.key: entry.tokens for entry in entries}
        return sum(tokens.values()) + beside <= self.tiers[0].free + self._stored[0]

    def promote(self, entries: Sequence[Entry]) -> bool:
        """Bring all `entries` to the fastest tier, pin and touch them. Returns False, and moves nothing, if they do
        not fit."""
        if self.promotable(entries) < len(entries):
            return False
        self.pin(entry.key for entry in entries)
        # Touched before, so that a search for something to evict meets pinned blobs last, and again when all are there.
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
        """Order a copy of a blob on another tier, which has room for it."""
        rows = self.tiers[target].take(entry.tokens)
        assert rows is not None, "there was room"
        self._unwiped[target][rows] = False  # the move overwrites them
        self._moves.append(Move(source, entry.rows[source], target, rows))
        self._place(entry, target, rows)

    def _make_room(self, number: int, tokens: int) -> bool:
        """Evict from a tier until `tokens` are free: first copies of blobs that are on a faster tier, then what
        `Shares` chooses. Returns False if there cannot be so many."""
        if tokens > self._room(number):
            return False
        while self.tiers[number].free < tokens:
            key = next((key for key in self._copies[number] if key not in self._pinned), None)
            key = key or self._shares[number].victim(self._pinned)
            assert key is not None, "_room() counted what may be evicted"
            self._evict(number, self._entries[key])
        return True

    def _room(self, number: int) -> int:
        """Tokens of a tier that are free or belong to blobs that may be evicted."""
        pinned = sum(
            entry.tokens for key in self._pinned if (entry := self._entries.get(key)) and number in entry.rows
        )
        return self.tiers[number].free + self._stored[number] - pinned

    def _place(self, entry: Entry, number: int, rows: Rows) -> None:
        entry.rows[number] = rows
        self._shares[number].add(entry.owner, entry.key, entry.tokens)
        self._stored[number] += entry.tokens
        self._note_copies(entry)

    def _displace(self, entry: Entry, number: int) -> None:
        self._give(number, entry.rows.pop(number))
        self._shares[number].remove(entry.owner, entry.key)
        self._copies[number].pop(entry.key, None)
        self._stored[number] -= entry.tokens
        self._note_copies(entry)

    def _give(self, number: int, rows: Rows) -> None:
        self.tiers[number].give(rows)
        self._unwiped[number][rows] = True
        self._given_back[number] = True

    def _note_copies(self, entry: Entry) -> None:
        """Note on which tiers a blob is only a copy, because it is on a faster one as well."""
        for number in entry.rows:
            if number > min(entry.rows):
                self._copies[number].setdefault(entry.key)
            else:
                self._copies[number].pop(entry.key, None)

    def _evict(self, number: int, entry: Entry) -> None:
        """Drop a blob from one tier. If that was its only copy, move it to the next tier if there is room."""
        below = number + 1
        if len(entry.rows) == 1 and below < len(self.tiers) and self._make_room(below, entry.tokens):
            self._copy(entry, number, below)
        self._displace(entry, number)
        if not entry.rows:
            del self._entries[entry.key]
