"""Which blocks of vLLM's prefix cache were computed from which facts, so that forgetting reaches them.

A block is hit by its hash, and its hash chains over everything before it; so what must go when a fact is forgotten is
every cached block from the first that holds the fact to the end of each request that mentioned it. Hashes are
remembered, not block ids: an id is soon somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Name = tuple[str, str]
"""(owner, tag or blob key)."""


class PrefixCache(Protocol):
    """The part of vLLM's `BlockPool` that is needed."""

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Stay:
    """A finished request's block hashes, and the first block that holds the fact."""

    hashes: Sequence[Any]
    first: int


class Residency:
    """Remembers, per name, the block hashes of the requests that mentioned it."""

    def __init__(self, cache: PrefixCache, block_size: int, *, limit: int = 65_536) -> None:
        self._cache = cache
        self._block_size = block_size
        self._limit = limit
        self._stays: dict[Name, list[_Stay]] = {}
        self._count = 0

    def note(self, mentions: Iterable[tuple[Name, int]], hashes: Sequence[Any]) -> None:
        """A request with these block hashes mentioned names at positions (tokens)."""
        for name, position in mentions:
            first = position // self._block_size
            if first < len(hashes):
                self._stays.setdefault(name, []).append(_Stay(hashes, first))
                self._count += 1
        if self._count > self._limit:
            self._sweep()

    def evict(self, name: Name) -> None:
        """Take every block that was computed from `name` out of the prefix cache."""
        for stay in self._stays.pop(name, ()):
            self._count -= 1
            self.evict_hashes(stay.hashes[stay.first :])

    def evict_hashes(self, hashes: Iterable[Any]) -> None:
        """Take blocks with these hashes, and all their duplicates, out of the prefix cache."""
        for block_hash in hashes:
            while blocks := self._cache.get_cached_block(block_hash, [0]):
                self._cache.evict_blocks({block.block_id for block in blocks})

    def _sweep(self) -> None:
        """Forget stays of which nothing is cached any more; a name may not cost memory for ever."""
        for name in list(self._stays):
            kept = [stay for stay in self._stays[name] if self._is_cached(stay)]
            self._count -= len(self._stays[name]) - len(kept)
            if kept:
                self._stays[name] = kept
            else:
                del self._stays[name]
        self._limit = max(self._limit, 2 * self._count)

    def _is_cached(self, stay: _Stay) -> bool:
        return any(self._cache.get_cached_block(h, [0]) for h in stay.hashes[stay.first :])
