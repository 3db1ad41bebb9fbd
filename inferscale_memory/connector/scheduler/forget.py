"""Forgetting: drops blobs, and evicts from vLLM's prefix cache every block that was computed from a forgotten fact.

A forget takes effect when it arrives. Requests that contain the fact may still be running: their encodes fail, and what
they add to the prefix cache is evicted when they end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

from inferscale_memory.connector.protocol import Forget
from inferscale_memory.connector.scheduler.encode import Encoder
from inferscale_memory.connector.scheduler.prefix_cache_index import Name, PrefixCache, PrefixCacheIndex
from inferscale_memory.connector.scheduler.requests import EncodeState, InjectState, State
from inferscale_memory.connector.scheduler.running import Running
from inferscale_memory.kv.store import BlobStore


class Forgetter:
    """Knows which requests and which cached blocks contain which facts, and forgets facts in all of them.

    Attributes:
        running: the facts of unfinished requests.
        index: the facts of cached blocks; None until vLLM has made its prefix cache.
    """

    def __init__(self, store: BlobStore, encoder: Encoder, block_size: int) -> None:
        self.running = Running()
        self.index: PrefixCacheIndex | None = None
        self._store = store
        self._encoder = encoder
        self._block_size = block_size

    def bind_cache(self, cache: PrefixCache) -> None:
        """Take vLLM's prefix cache, once it exists."""
        self.index = PrefixCacheIndex(cache, self._block_size)

    def began(self, name: str, state: EncodeState | InjectState) -> None:
        """A request has arrived."""
        self.running.add(name, state.mentions())

    def ended(self, name: str, state: EncodeState | InjectState) -> None:
        """A request has ended. Remember where its facts are cached. Evict those that were forgotten while it ran."""
        names = self.running.remove(name)
        if self.index is not None:
            self.index.note(names.items(), state.request.block_hashes)
            self.index.evict_all(state.forgotten)

    def forget(self, ask: Forget, requests: Mapping[str, State]) -> int:
        """Drop blobs and cached blocks now, and make sure that running requests leave none behind. Returns how many
        blobs were dropped."""
        names: set[Name] = {*zip(repeat(ask.owner), ask.keys), *zip(repeat(""), ask.tags)}
        for name, found in self.running.holding(names).items():
            state = requests.get(name)
            if isinstance(state, EncodeState | InjectState):
                self._forget_running(state, found)
        if self.index is not None:
            self.index.evict_all(names)
        return self._store.forget_of(ask.owner, ask.keys)

    def evict(self, block_hashes: Iterable[Any]) -> None:
        """Evict blocks with these hashes from the prefix cache."""
        if self.index is not None:
            self.index.evict_hashes(block_hashes)

    def _forget_running(self, state: EncodeState | InjectState, found: Mapping[Name, int]) -> None:
        """Forget names that a running request contains, each from its first position."""
        state.forgotten |= found.keys()
        if isinstance(state, EncodeState) and state.error is None:
            self._encoder.fail(state, "one of its facts was forgotten in the meantime")
        first = min(found.values()) // self._block_size
        self.evict(list(state.request.block_hashes)[first:])
