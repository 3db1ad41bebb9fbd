"""The blobs that an engine is known to hold, so that a question need not query the engine.

The record may be out of date, because engines evict silently. That is safe: an engine verifies every blob before it
injects it, and callers drop the keys of a refused prompt, so that the next question queries the engine again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

from inferscale_memory.bounded import Bounded
from inferscale_memory.engine.base import EncodeRequest, Engine, Span

_PREAMBLES = 256
"""The most preambles whose keys are remembered."""
_MOST = 100_000
"""The most keys that are remembered; about any other key the engine is queried."""


class KnownBlobs:
    """Keys of the blobs that the engine held when it last reported on them. Safe to use from many threads."""

    def __init__(self) -> None:
        self._keys: Bounded[str, None] = Bounded(_MOST)
        self._lock = Lock()

    def confirm(self, engine: Engine, owner: str, keys: Iterable[str]) -> set[str]:
        """The subset of `keys` that the engine holds. The engine is queried only about keys that are not known."""
        wanted = set(keys)
        with self._lock:
            found = wanted & self._keys.keys()
        if unknown := wanted - found:
            more = set(engine.at_hand(owner, sorted(unknown)))
            self.add(more)
            found |= more
        return found

    def add(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._keys[key] = None

    def drop(self, keys: Iterable[str]) -> None:
        """Forget `keys`: their blobs are gone, or may be."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)


class Preambles:
    """Encodes each preamble once, and again when the engine has lost its blob."""

    def __init__(self, blobs: KnownBlobs) -> None:
        self._blobs = blobs
        self._keys: OrderedDict[tuple[str, tuple[int, ...]], str] = OrderedDict()
        self._lock = Lock()

    def key(self, engine: Engine, owner: str, ids: Sequence[int]) -> str | None:
        """The key of the blob of the preamble `ids` of `owner`, encoded now if necessary; None if that fails."""
        name = (owner, tuple(ids))
        with self._lock:
            known = self._keys.get(name)
            if known is not None:
                self._keys.move_to_end(name)
        if known is not None and self._blobs.confirm(engine, owner, [known]):
            return known
        [result] = engine.encode([EncodeRequest(owner, name[1], (Span(0, len(name[1])),))])
        if not result.refs:
            return None
        key = result.refs[0].key
        self._blobs.add([key])
        with self._lock:
            self._keys[name] = key
            while len(self._keys) > _PREAMBLES:
                self._keys.popitem(last=False)
        return key
