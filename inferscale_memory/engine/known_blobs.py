"""Which blobs the engine has, as far as this process knows, so that it need not be asked on every question.

It may believe too much (the engine evicts silently) and must never matter when it does: an engine verifies
what it injects, and what it refuses is asked about again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

from inferscale_memory.bounded import Bounded
from inferscale_memory.engine.base import EncodeRequest, Engine, Span

_PREAMBLES = 256
_MOST = 100_000
"""So many keys are remembered; the engine is asked about all others."""


class AtHand:
    """Blob keys that were at hand when last heard of."""

    def __init__(self) -> None:
        self._keys: Bounded[str, None] = Bounded(_MOST)
        self._lock = Lock()

    def confirm(self, engine: Engine, owner: str, keys: Iterable[str]) -> set[str]:
        """Those of `keys` that are at hand; the engine is asked about those never heard of."""
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
        """These are gone, or doubtful."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)


class Preambles:
    """Blobs of preambles: one encode for each that is new, or that the engine has lost."""

    def __init__(self, at_hand: AtHand) -> None:
        self._at_hand = at_hand
        self._keys: OrderedDict[tuple[str, tuple[int, ...]], str] = OrderedDict()
        self._lock = Lock()

    def key(self, engine: Engine, owner: str, ids: Sequence[int]) -> str | None:
        """Key of the blob of `ids` as a preamble of `owner`; encoded now if need be. None when that fails."""
        name = (owner, tuple(ids))
        with self._lock:
            known = self._keys.get(name)
            if known is not None:
                self._keys.move_to_end(name)
        if known is not None and self._at_hand.confirm(engine, owner, [known]):
            return known
        [result] = engine.encode([EncodeRequest(owner, name[1], (Span(0, len(name[1])),))])
        if not result.refs:
            return None
        key = result.refs[0].key
        self._at_hand.add([key])
        with self._lock:
            self._keys[name] = key
            while len(self._keys) > _PREAMBLES:
                self._keys.popitem(last=False)
        return key
