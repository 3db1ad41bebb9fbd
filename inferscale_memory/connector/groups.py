"""vLLM's prefix cache where the model has several KV cache groups: layers with a window, or with a recurrent state.

Nothing is injected into such a model yet. But facts are served as text there and cached, so forgetting has to reach
the blocks of every group.
"""

from __future__ import annotations

from typing import Any

from inferscale_memory.connector.scheduler.prefix_cache_index import PrefixCache


class CacheOfGroups:
    """A `PrefixCache` that stands for all groups: a block hash is cached where any group has it.

    vLLM hashes prompts in the finest pieces that any group needs. A larger block has the hash of its last piece, so
    each of its hashes is among the prompt's.
    """

    def __init__(self, cache: PrefixCache, groups: int) -> None:
        self._cache = cache
        self._groups = range(groups)

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None:
        found: list[Any] = []
        for group in self._groups:
            found += self._cache.get_cached_block(block_hash, [group]) or ()
        return found or None

    def evict_blocks(self, block_ids: set[int]) -> None:
        self._cache.evict_blocks(block_ids)
