"""Which blocks of vLLM's prefix cache were computed from which facts, so that forgetting reaches them.

A block is hit by its hash, and its hash chains over everything before it; so hashes form a tree, and what
must go when a fact is forgotten is the whole subtree under the first block that holds it. Hashes are
remembered, not block ids: an id is soon somebody else's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

Name = tuple[str, str]
"""(owner, blob key), or ("", tag): a fact may stand as text in the prompts of any owner that may read it."""

TOKENS_A_NAME = 4
"""At most one name is remembered for so many cached tokens. Beyond it cached blocks are given up with their names."""


class PrefixCache(Protocol):
    """The part of vLLM's `BlockPool` that is needed."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


@dataclass(slots=True)
class _Block:
    """What is remembered of a block hash: the hash before it, those after it, and the names that begin in it."""

    before: Any | None
    following: set[Any] = field(default_factory=set)
    names: set[Name] = field(default_factory=set)


class Residency:
    """Remembers, per name, the first blocks that hold it, and of every block which ones follow it.

    Invariants: a hash is remembered as long as one that follows it is. Beyond `limit` hashes and names, every new one
    pays for a look at two old ones, and what is no longer cached is dropped: memory is bounded by what the cache
    holds, and no request waits for a sweep over all of it.
    """

    def __init__(self, cache: PrefixCache, block_size: int, *, limit: int = 4096) -> None:
        self._cache = cache
        self._block_size = block_size
        self._limit = limit
        self._blocks: OrderedDict[Any, _Block] = OrderedDict()
        self._first: OrderedDict[Name, set[Any]] = OrderedDict()
        self._pairs = 0  # (name, block hash)

    def __len__(self) -> int:
        """Block hashes remembered."""
        return len(self._blocks)

    @property
    def names(self) -> int:
        """Names remembered, each as often as there are blocks in which it begins."""
        return self._pairs

    def note(self, mentions: Iterable[tuple[Name, int]], hashes: Sequence[Any]) -> None:
        """A request with these block hashes mentioned names at positions (tokens)."""
        held = [(name, at // self._block_size) for name, at in mentions]
        held = [(name, first) for name, first in held if first < len(hashes)]
        if not held:
            return
        new = self._enter(hashes)
        for name, first in held:
            new += self._name(name, hashes[first])
        if len(self._blocks) + self._pairs > self._limit:
            self._examine(2 * new + 2)
            self._give_up()

    def evict_all(self, names: Set[Name]) -> None:
        """`evict` for each of these."""
        for name in names & self._first.keys():
            self.evict(name)

    def evict(self, name: Name) -> None:
        """Take every block that was computed from `name` out of the prefix cache."""
        unseen = list(self._first.get(name, ()))
        for block_hash in unseen:
            self._unname(name, block_hash)
        while unseen:
            block_hash = unseen.pop()
            if block := self._blocks.get(block_hash):
                unseen += block.following
            self.evict_hashes((block_hash,))

    def evict_hashes(self, hashes: Iterable[Any]) -> None:
        """Take blocks with these hashes, and all their duplicates, out of the prefix cache."""
        for block_hash in hashes:
            while blocks := self._cache.get_cached_block(block_hash, [0]):
                self._cache.evict_blocks({block.block_id for block in blocks})

    def _enter(self, hashes: Sequence[Any]) -> int:
        """Remember a request's hashes; how many of them are new. Those before one that is known are known."""
        known = len(hashes)
        while known and hashes[known - 1] not in self._blocks:
            known -= 1
        for index in range(known, len(hashes)):
            before = hashes[index - 1] if index else None
            self._blocks[hashes[index]] = _Block(before)
            if before is not None:
                self._blocks[before].following.add(hashes[index])
        return len(hashes) - known

    def _name(self, name: Name, block_hash: Any) -> int:
        names = self._blocks[block_hash].names
        if name in names:
            return 0
        names.add(name)
        self._first.setdefault(name, set()).add(block_hash)
        self._pairs += 1
        return 1

    def _unname(self, name: Name, block_hash: Any) -> None:
        self._blocks[block_hash].names.discard(name)
        held = self._first[name]
        held.discard(block_hash)
        self._pairs -= 1
        if not held:
            del self._first[name]

    def _examine(self, count: int) -> None:
        """Look at the `count` hashes that were not looked at for longest; drop those that are not cached and lead to
        none that is."""
        for _ in range(min(count, len(self._blocks))):
            block_hash = next(iter(self._blocks))
            self._blocks.move_to_end(block_hash)
            while block_hash is not None:
                block = self._blocks[block_hash]
                if block.following or self._cache.get_cached_block(block_hash, [0]):
                    break
                block_hash = self._drop(block_hash, block)

    def _drop(self, block_hash: Any, block: _Block) -> Any | None:
        """Forget a hash that leads nowhere; the one before it, which may lead nowhere now."""
        for name in list(block.names):
            self._unname(name, block_hash)
        del self._blocks[block_hash]
        if block.before is not None:
            self._blocks[block.before].following.discard(block_hash)
        return block.before

    def _give_up(self) -> None:
        """Evict the blocks of the oldest names, where one prompt is asked again and again with ever new ones."""
        while self._pairs > self._limit + len(self._blocks) * self._block_size // TOKENS_A_NAME:
            self.evict(next(iter(self._first)))
