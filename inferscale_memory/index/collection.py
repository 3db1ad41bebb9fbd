"""One collection: the file, and the slabs of the owners that were asked for last.

A write is durable before a slab learns of it, and before it returns. A search looks at what has been acknowledged,
by this process or another: a slab that is behind the file is loaded again. It must never hold a fact that the file
does not.

Locks, always taken in this order: `_writing` from a transaction until the slabs have followed it; `_lock` around the
slabs. So searches go on while a write waits for the disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import numpy as np

from inferscale_memory.errors import StoreError
from inferscale_memory.index import filters as conditions
from inferscale_memory.index.file import FactFile
from inferscale_memory.index.filters import Condition
from inferscale_memory.index.records import Floats, Hit
from inferscale_memory.index.scope import pinned
from inferscale_memory.index.searcher import unit
from inferscale_memory.index.slab import Slab
from inferscale_memory.index.work import Changes

CACHE_BYTES = 512 << 20
_MOST_PLANS = 10_000
_LONGEST_PLAN = 1_000
"""Of the filters that are remembered as they were read, how many there are and how long they are at most."""
Filters = Mapping[str, Any] | None
_T = TypeVar("_T")


@dataclass(slots=True)
class _Plan:
    """Filters as they were read, and the owners they lead to at a version of the file."""

    condition: Condition
    ids: tuple[str, list[str]] | None
    known: tuple[int, list[int]] = (-1, [])


class Collection:
    """Facts with vectors, in one collection of one file. Any number of threads may call it."""

    def __init__(
        self,
        path: str | Path,
        name: str,
        *,
        dims: int | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Open a collection.

        Args:
            path: the file; made where there is none.
            dims: the length of the vectors; None takes what is there, or what comes first.
            cache_bytes: about how much memory all slabs may take; one slab is always kept.

        Raises:
            StoreError: a foreign file, or vectors of another length.
        """
        self.file = FactFile(Path(path), name, dims)
        self._cache_bytes = cache_bytes
        self._slabs: OrderedDict[int, Slab] = OrderedDict()
        self._plans: dict[str, _Plan] = {}
        self._held = 0
        self._lock = RLock()
        self._writing = RLock()

    def close(self) -> None:
        """Close the file and drop the slabs. Closing twice is harmless."""
        with self._writing, self._lock:
            self._drop_all()
            self.file.close()

    # -- writing ---------------------------------------------------------------------------------------------

    def put(self, ids: Sequence[str], vectors: Any, payloads: Sequence[Mapping[str, Any]]) -> None:
        """Write facts; what had one of these ids is replaced. All of them are durable when this returns, or
        none is.

        Raises:
            StoreError: vectors of another length, with NaN or infinities, or not as many as ids and payloads.
        """
        if not (len(ids) == len(vectors) == len(payloads)):
            raise StoreError(
                f"{len(ids)} ids, {len(vectors)} vectors and {len(payloads)} payloads: pass one each"
            )
        if len(ids) == 0:
            return
        matrix = _matrix(vectors)
        unit(matrix)  # refuses what cannot be compared
        with self._writing:
            self._follow(self.file.put(ids, matrix, payloads))

    def update(self, id: str, vector: Any = None, payload: Mapping[str, Any] | None = None) -> None:
        """Give a fact another vector, another payload, or both.

        Raises:
            StoreError: there is no such fact, or the vector cannot be taken.
        """
        floats = None if vector is None else self._matrix([vector])[0]
        if floats is not None:
            unit(floats[None])  # refuses what cannot be compared
        with self._writing:
            self._follow(self.file.update(id, floats, payload))

    def delete(self, ids: Sequence[str]) -> None:
        """Delete facts. Their bytes are gone from the disk when this returns; one call for many costs little
        more than for one."""
        with self._writing:
            self._follow(self.file.delete(ids))

    def clear(self) -> None:
        """Delete all facts, and the collection."""
        with self._writing:
            self.file.clear()
            with self._lock:
                self._drop_all()

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, id: str) -> Hit | None:
        """A fact, as it is on the disk."""
        payload = self.file.get(id)
        return None if payload is None else Hit(id, None, payload)

    def search(self, vectors: Any, k: int, filters: Filters = None) -> list[list[Hit]]:
        """For each vector the `k` nearest facts among those that match, by cosine, best first.

        Raises:
            StoreError: a vector or a filter that cannot be taken.
        """
        plan = self._plan(filters)
        queries = unit(self._matrix(vectors))
        found = list(self._each_owner(plan, lambda slab: slab.search(queries, k, plan.condition)))
        if len(found) == 1:
            return found[0]
        return [_best([one[query] for one in found], k) for query in range(len(queries))]

    def search_words(self, query: str, k: int, filters: Filters = None) -> list[Hit]:
        """The `k` facts among those that match which fit the words of `query` best, by BM25."""
        plan = self._plan(filters)
        return _best(
            list(self._each_owner(plan, lambda slab: slab.search_words(query, k, plan.condition))), k
        )

    def first(self, k: int | None = None, filters: Filters = None) -> list[Hit]:
        """The first `k` facts that match: owner by owner, oldest first."""
        plan = self._plan(filters)
        found = self._each_owner(plan, lambda slab: slab.first(k, plan.condition))
        return list(islice((hit for hits in found for hit in hits), k))  # no more owners than it takes

    def _matrix(self, vectors: Any) -> Floats:
        matrix = _matrix(vectors)
        if self.file.dims is not None and matrix.shape[1] != self.file.dims:
            raise StoreError(
                f"a vector of {matrix.shape[1]} numbers cannot be compared with those of "
                f"{self.file.collection!r}, which have {self.file.dims}: use the embedder they were made with"
            )
        return matrix

    # -- slabs -----------------------------------------------------------------------------------------------

    def _plan(self, filters: Filters) -> _Plan:
        """Reading a filter takes a tenth of a search, and most searches repeat one."""
        text = repr(filters)
        plan = self._plans.get(text)
        if plan is None:
            plan = _Plan(conditions.read(filters), pinned(filters))
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            if len(text) <= _LONGEST_PLAN:
                self._plans[text] = plan
        return plan

    def _each_owner(self, plan: _Plan, work: Callable[[Slab], _T]) -> Iterator[_T]:
        """`work` on the slab of every owner whose facts the plan can reach."""
        version = self.file.version()
        known, owners = plan.known
        if known != version:
            owners = self.file.owners(plan.ids)
            plan.known = (version, owners)
        for owner in owners:
            found = self._on(owner, work, version)
            if found is not None:
                yield found

    def _on(self, owner: int, work: Callable[[Slab], _T], version: int) -> _T | None:
        with self._lock:
            slab = self._slabs.get(owner)
            if slab is not None and self._is_current(owner, slab, version):
                self._slabs.move_to_end(owner)
                return work(slab)
        with self._writing, self._lock:  # a write of ours that the slab has yet to follow ends first
            slab = self._slabs.get(owner)
            if slab is None or not self._is_current(owner, slab, self.file.version()):
                slab = self._load(owner)
            return None if slab is None else work(slab)

    def _is_current(self, owner: int, slab: Slab, version: int) -> bool:
        if slab.checked != version:
            if slab.changes != self.file.changes(owner):
                return False
            slab.checked = version
        return True

    def _load(self, owner: int) -> Slab | None:
        self._drop(owner)
        found = self.file.load(owner)
        if found is None:
            return None
        slab = self._slabs[owner] = Slab(*found)
        self._held += slab.nbytes
        self._evict()
        return slab

    def _follow(self, changes: Changes) -> None:
        with self._lock:
            for owner, change in changes.items():
                slab = self._slabs.get(owner)
                if slab is None or slab.changes == change.after:
                    continue
                if change.after is None or slab.changes != change.before:
                    self._drop(owner)
                    continue
                del self._slabs[owner]  # a slab that fails halfway is not looked at again
                self._held -= slab.nbytes
                slab.follow(change)
                self._slabs[owner] = slab
                self._held += slab.nbytes
            self._evict()

    def _evict(self) -> None:
        while self._held > self._cache_bytes and len(self._slabs) > 1:
            self._drop(next(iter(self._slabs)))

    def _drop(self, owner: int) -> None:
        slab = self._slabs.pop(owner, None)
        if slab is not None:
            self._held -= slab.nbytes
            slab.close()

    def _drop_all(self) -> None:
        for owner in list(self._slabs):
            self._drop(owner)


def _matrix(vectors: Any) -> Floats:
    """Vectors `[n, dims]` as float32."""
    try:
        with np.errstate(over="ignore"):
            matrix = np.ascontiguousarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise StoreError(f"these are no vectors of one length: {error}") from error
    if matrix.ndim != 2 or matrix.shape[1] == 0:
        raise StoreError(f"a vector is a list of numbers: these have the shape {matrix.shape[1:]}")
    return matrix


def _best(found: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
    if len(found) == 1:
        return list(found[0][:k])
    return nlargest(k, (hit for hits in found for hit in hits), key=lambda hit: hit.score or 0.0)
