"""Nearest rows of a matrix. The exact search is FAISS's brute force, or numpy where FAISS is not installed.

A searcher owns its vectors and never approximates.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.errors import StoreError
from inferscale_memory.index.filters import Mask
from inferscale_memory.index.records import Floats

try:
    import faiss
except ImportError:
    faiss = None  # type: ignore[assignment]

Found = tuple[NDArray[np.int64], Floats]
"""Rows and cosines, `[queries, k]` each, best first. k may be less than was asked for."""

GPU_ROWS = 20_000
"""From here on a slab is searched on the GPU, if FAISS has one. A guess: never measured."""


class Searcher(Protocol):
    """Unit vectors in rows 0 to n - 1. Any thread may call it, one at a time."""

    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def append(self, vector: Floats) -> None: ...
    def replace(self, row: int, vector: Floats) -> None: ...
    def remove(self, row: int) -> None:
        """The last row takes the place of `row`."""

    def search(self, queries: Floats, k: int, mask: Mask) -> Found:
        """The nearest rows among those that `mask` allows. Queries are unit vectors `[queries, dims]`."""


def unit(vectors: Floats) -> Floats:
    """Rows scaled to length 1; a row of zeros stays, and is similar to nothing.

    Raises:
        StoreError: NaN or infinity among them.
    """
    if len(vectors) == 1 and 1e-30 < (square := float(np.dot(vectors[0], vectors[0]))) < 1e30:
        only: Floats = vectors * np.float32(
            1 / math.sqrt(square)
        )  # a query: all else is slower than the search
        return only
    wide = vectors.astype(np.float64)  # no float32 overflows when it is squared in these
    norms = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    if not np.isfinite(norms).all():
        raise StoreError("a vector holds NaN or infinity: the embedder is broken, or its text was too long")
    norms[norms == 0] = 1
    scaled: Floats = (wide / norms[:, None]).astype(np.float32)
    return scaled


class Brute:
    """The exact search, over one contiguous slab `[capacity, dims]`."""

    def __init__(self, vectors: Floats) -> None:
        """Takes unit vectors `[rows, dims]` over."""
        self._slab = np.ascontiguousarray(vectors, dtype=np.float32)
        self._rows = len(vectors)

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        return int(self._slab.nbytes)

    @property
    def vectors(self) -> Floats:
        """The rows in use, `[rows, dims]`."""
        return self._slab[: self._rows]

    def append(self, vector: Floats) -> None:
        if self._rows == len(self._slab):
            grown = np.empty((max(16, self._rows + self._rows // 2), vector.shape[0]), dtype=np.float32)
            grown[: self._rows] = self._slab
            self._slab = grown
        self._slab[self._rows] = vector
        self._rows += 1

    def replace(self, row: int, vector: Floats) -> None:
        self._slab[row] = vector

    def remove(self, row: int) -> None:
        self._rows -= 1
        self._slab[row] = self._slab[self._rows]

    def search(self, queries: Floats, k: int, mask: Mask) -> Found:
        if mask is None:
            return nearest(queries, self.vectors, k)
        allowed = np.flatnonzero(mask)
        rows, scores = nearest(queries, self.vectors[allowed], k)
        return allowed[rows], scores


def nearest(queries: Floats, vectors: Floats, k: int) -> Found:
    """The `k` rows of `vectors` with the largest inner products, exactly."""
    k = min(k, len(vectors))
    if k <= 0:
        return np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0), np.float32)
    if faiss is not None:
        scores, rows = faiss.knn(queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
        return rows, scores
    products = queries @ vectors.T
    rows = np.argpartition(-products, k - 1, axis=1)[:, :k]
    scores = np.take_along_axis(products, rows, axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)


class GpuBrute(Brute):
    """The exact search on a GPU, by faiss-gpu: a copy of the slab stays there until the slab changes.

    Written against FAISS's Python interface and tested with a stand-in; never run on a GPU. Filtered searches
    and small slabs stay on the CPU.
    """

    def __init__(self, vectors: Floats) -> None:
        super().__init__(vectors)
        self._resources = faiss.StandardGpuResources()
        self._copy: Any = None

    def append(self, vector: Floats) -> None:
        self._copy = None
        super().append(vector)

    def replace(self, row: int, vector: Floats) -> None:
        self._copy = None
        super().replace(row, vector)

    def remove(self, row: int) -> None:
        self._copy = None
        super().remove(row)

    def search(self, queries: Floats, k: int, mask: Mask) -> Found:
        if mask is not None or len(self) < GPU_ROWS:
            return super().search(queries, k, mask)
        if self._copy is None:
            self._copy = faiss.GpuIndexFlatIP(self._resources, self.vectors.shape[1])
            self._copy.add(self.vectors)
        scores, rows = self._copy.search(queries, min(k, len(self)))
        return rows, scores


def searcher(vectors: Floats) -> Searcher:
    """The exact searcher of this machine, over unit vectors."""
    on_gpu = faiss is not None and hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
    return GpuBrute(vectors) if on_gpu else Brute(vectors)
