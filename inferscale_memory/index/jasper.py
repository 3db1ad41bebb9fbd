"""Approximate search on a GPU with Jasper's graph, for owners with very many facts. Only when asked for.

Written against Jasper's Python interface as it is described: `Graph.build(vectors)`, `search(queries, k)`,
`append(vectors)` and `mark_deleted(ids)`, on torch tensors in float16 on CUDA. Tested with a stand-in module; never
run for real. So everything Jasper says is taken as a proposal: only its ids are used, and their scores are
computed here, in float32.

It must never answer a filtered search from the graph: filters come before top-k, and the graph knows none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.errors import StoreError
from inferscale_memory.index.filters import Mask
from inferscale_memory.index.records import Floats
from inferscale_memory.index.searcher import Brute, Found

GRAPH_ROWS = 50_000
"""Below this the exact search is at least as quick, so no graph is built. A guess: never measured."""


class Jasper(Brute):
    """A graph beside the exact slab. A vector that is replaced gets a new id in the graph.

    Invariant: `_ids[row]` is the row's id in the graph, and `_row_of[id]` leads back, or is -1.
    """

    def __init__(self, vectors: Floats) -> None:
        try:
            import jasper  # type: ignore[import-not-found]
            import torch
        except ImportError as error:
            raise StoreError(
                f'the searcher "jasper" needs {error.name}, which is not installed: install it, or use "exact"'
            ) from error
        super().__init__(vectors)
        self._jasper, self._torch = jasper, torch
        self._graph: Any = None
        self._ids: list[int] = []
        self._row_of: list[int] = []

    def append(self, vector: Floats) -> None:
        super().append(vector)
        if self._graph is not None:
            self._ids.append(self._enter(len(self) - 1, vector))

    def replace(self, row: int, vector: Floats) -> None:
        super().replace(row, vector)
        if self._graph is not None:
            self._leave(row)
            self._ids[row] = self._enter(row, vector)

    def remove(self, row: int) -> None:
        super().remove(row)
        if self._graph is not None:
            self._leave(row)
            last = self._ids.pop()
            if row < len(self._ids):
                self._ids[row] = last
                self._row_of[last] = row

    def search(self, queries: Floats, k: int, mask: Mask) -> Found:
        if mask is not None or len(self) < GRAPH_ROWS:
            return super().search(queries, k, mask)
        if self._graph is None:
            self._graph = self._jasper.Graph.build(self._on_device(self.vectors))
            self._ids = list(range(len(self)))
            self._row_of = list(range(len(self)))
        k = min(k, len(self))
        found = self._graph.search(self._on_device(queries), k)
        ids = found[0] if isinstance(found, tuple) else found
        proposals: NDArray[np.int64] = np.asarray(ids.cpu(), dtype=np.int64)
        rows = np.take(np.asarray(self._row_of, dtype=np.int64), proposals)
        scores = np.einsum("qd,qkd->qk", queries, self.vectors[rows]).astype(np.float32)
        if (rows < 0).any():  # a deleted fact came back
            return super().search(queries, k, mask)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)

    def _enter(self, row: int, vector: Floats) -> int:
        self._graph.append(self._on_device(vector[None]))
        self._row_of.append(row)
        return len(self._row_of) - 1

    def _leave(self, row: int) -> None:
        gone = self._ids[row]
        self._row_of[gone] = -1
        self._graph.mark_deleted(self._torch.tensor([gone], device=self._device))

    def _on_device(self, vectors: Floats) -> Any:
        return self._torch.from_numpy(vectors).to(device=self._device, dtype=self._torch.float16)

    @property
    def _device(self) -> str:
        return "cuda" if self._torch.cuda.is_available() else "cpu"
