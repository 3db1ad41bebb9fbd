"""Which blocks of vLLM's prefix cache were computed from which facts, so that forgetting reaches them.

A block is hit by its hash, and its hash chains over everything before it; so hashes form a tree, and what
must go when a fact is forgotten is the whole subtree under the first block that holds it. Hashes are
remembered, not block ids: an id is soon somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

Name = tuple[str, str]
"""(owner, blob key), or ("", tag): a fact may stand as text in the prompts of any owner that may read it."""


class PrefixCache(Protocol):
    """The part of vLLM's `BlockPool` that is needed."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


class Residency:
    """Remembers, per name, the first blocks that hold it, and of every block which ones follow it.

    Invariant: a hash is entered before any that follows it. A request that was seen before adds nothing, and
    what is no longer cached is dropped once `limit` hashes are known: memory is bounded by what the cache holds.
    """

    def __init__(self, cache: PrefixCache, block_size: int, *, limit: int = 65_536) -> None:
        self._cache = cache
        self._block_size = block_size
        self._limit = limit
        self._following: dict[Any, set[Any]] = {}
        self._first: dict[Name, set[Any]] = {}

    def __len__(self) -> int:
        """Block hashes remembered."""
        return len(self._following)

    def note(self, mentions: Iterable[tuple[Name, int]], hashes: Sequence[Any]) -> None:
        """A request with these block hashes mentioned names at positions (tokens)."""
        held = [(name, at // self._block_size) for name, at in mentions]
        held = [(name, first) for name, first in held if first < len(hashes)]
        for name, first in held:
            self._first.setdefault(name, set()).add(hashes[first])
        if held:
            self._enter(hashes)
        if len(self) > self._limit:
            self._sweep()

    def evict(self, name: Name) -> None:
        """Take every block that was computed from `name` out of the prefix cache."""
        unseen = list(self._first.pop(name, ()))
        while unseen:
            block_hash = unseen.pop()
            unseen += self._following.get(block_hash, ())
            self.evict_hashes((block_hash,))

    def evict_hashes(self, hashes: Iterable[Any]) -> None:
        """Take blocks with these hashes, and all their duplicates, out of the prefix cache."""
        for block_hash in hashes:
            while blocks := self._cache.get_cached_block(block_hash, [0]):
                self._cache.evict_blocks({block.block_id for block in blocks})

    def _enter(self, hashes: Sequence[Any]) -> None:
        before = None
        for block_hash in hashes:
            self._following.setdefault(block_hash, set())
            if before is not None:
                self._following[before].add(block_hash)
            before = block_hash

    def _sweep(self) -> None:
        """Drop what is not cached and leads to nothing that is; a name may not cost memory for ever."""
        for block_hash in reversed(list(self._following)):
            kept = self._following[block_hash] & self._following.keys()
            if kept or self._cache.get_cached_block(block_hash, [0]):
                self._following[block_hash] = kept
            else:
                del self._following[block_hash]
        for name, hashes in list(self._first.items()):
            hashes &= self._following.keys()
            if not hashes:
                del self._first[name]
        self._limit = max(self._limit, 2 * len(self))
