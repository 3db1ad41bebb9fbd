"""Which blocks of vLLM's prefix cache were computed from which facts, so that forgetting a fact finds them.

vLLM finds a cached block by its hash, which covers everything before it. So hashes form a tree, and forgetting a fact
evicts the whole subtree under the first block that contains it. The index remembers hashes and not block ids, because
vLLM reuses ids for other contents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

Name = tuple[str, str]
"""(owner, blob key), or ("", tag): as text, a fact may be in the prompts of every owner who may read it."""

TOKENS_PER_NAME = 4
"""At most one name is remembered for so many cached tokens. Beyond that, blocks are evicted with their names."""


class PrefixCache(Protocol):
    """The part of vLLM's `BlockPool` that the index uses."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


@dataclass(slots=True)
class _Block:
    """One block hash: the hash before it, those after it, and the names that begin in its block."""

    before: Any | None
    following: set[Any] = field(default_factory=set)
    names: set[Name] = field(default_factory=set)


class PrefixCacheIndex:
    """Remembers the first blocks that contain each name, and the blocks that follow each block.

    Invariants:
    - A hash is remembered as long as a hash that follows it.
    - Beyond `limit` hashes and names, each new one makes the index look at two old ones and drop what is no longer
      cached. So memory is bounded by what the cache contains, and no request waits for a sweep over the whole index.
    """

    def __init__(self, cache: PrefixCache, block_size: int, *, limit: int = 4096) -> None:
        self._cache = cache
        self._block_size = block_size
        self._limit = limit
        self._blocks: OrderedDict[Any, _Block] = OrderedDict()
        self._first: OrderedDict[Name, set[Any]] = OrderedDict()
        self._pairs = 0  # (name, block hash)

    def __len__(self) -> int:
        """How many block hashes are remembered."""
        return len(self._blocks)

    @property
    def names(self) -> int:
        """How many names are remembered. A name counts once for every block in which it begins."""
        return self._pairs

    def note(self, mentions: Iterable[tuple[Name, int]], hashes: Sequence[Any]) -> None:
        """Enter a request with these block hashes, whose prompt contains names at positions (in tokens)."""
        firsts = [(name, at // self._block_size) for name, at in mentions]
        firsts = [(name, first) for name, first in firsts if first < len(hashes)]
        if not firsts:
            return
        new = self._enter(hashes)
        for name, first in firsts:
            new += self._name(name, hashes[first])
        if len(self._blocks) + self._pairs > self._limit:
            self._examine(2 * new + 2)
            self._give_up()

    def evict_all(self, names: Set[Name]) -> None:
        """Evict every block that was computed from any of `names`."""
        for name in names & self._first.keys():
            self.evict(name)

    def evict(self, name: Name) -> None:
        """Evict every block that was computed from `name`."""
        unseen = list(self._first.get(name, ()))
        for block_hash in unseen:
            self._unname(name, block_hash)
        while unseen:
            block_hash = unseen.pop()
            if block := self._blocks.get(block_hash):
                unseen += block.following
            self.evict_hashes((block_hash,))

    def evict_hashes(self, hashes: Iterable[Any]) -> None:
        """Evict the blocks with these hashes, and all their duplicates."""
        for block_hash in hashes:
            while blocks := self._cache.get_cached_block(block_hash, [0]):
                self._cache.evict_blocks({block.block_id for block in blocks})

    def _enter(self, hashes: Sequence[Any]) -> int:
        """Remember a request's hashes. Returns how many are new: all hashes before a known one are known."""
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
        blocks = self._first[name]
        blocks.discard(block_hash)
        self._pairs -= 1
        if not blocks:
            del self._first[name]

    def _examine(self, count: int) -> None:
        """Look at the `count` hashes that were last looked at longest ago. Drop those that are not cached and that no
        remembered hash follows."""
        for _ in range(min(count, len(self._blocks))):
            block_hash = next(iter(self._blocks))
            self._blocks.move_to_end(block_hash)
            while block_hash is not None:
                block = self._blocks[block_hash]
                if block.following or self._cache.get_cached_block(block_hash, [0]):
                    break
                block_hash = self._drop(block_hash, block)

    def _drop(self, block_hash: Any, block: _Block) -> Any | None:
        """Drop a hash that no other follows. Returns the one before it, which may have no follower now."""
        for name in list(block.names):
            self._unname(name, block_hash)
        del self._blocks[block_hash]
        if block.before is not None:
            self._blocks[block.before].following.discard(block_hash)
        return block.before

    def _give_up(self) -> None:
        """Evict the blocks of the oldest names while there are too many names for the blocks: the same prompt may be
        repeated with new names every time."""
        while self._pairs > self._limit + len(self._blocks) * self._block_size // TOKENS_PER_NAME:
            self.evict(next(iter(self._first)))
