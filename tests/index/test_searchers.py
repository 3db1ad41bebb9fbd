"""The search on a GPU, which cannot run here, on a stand-in for faiss-gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from inferscale_memory.index import searcher
from inferscale_memory.index.searcher import GpuBrute, unit
from tests.index.facts import vector


def test_a_gpu_copy_is_made_again_when_the_slab_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []

    def gpu_index(resources: Any, dims: int) -> Any:
        copies.append(faiss.IndexFlatIP(dims))
        return copies[-1]

    gpu = SimpleNamespace(
        StandardGpuResources=object,
        get_num_gpus=lambda: 1,
        GpuIndexFlatIP=gpu_index,
        knn=faiss.knn,
        METRIC_INNER_PRODUCT=faiss.METRIC_INNER_PRODUCT,
    )
    monkeypatch.setattr(searcher, "faiss", gpu)
    monkeypatch.setattr(searcher, "GPU_ROWS", 10)
    vectors = unit(np.stack([vector(seed) for seed in range(30)]))
    found = searcher.searcher(vectors.copy())
    assert isinstance(found, GpuBrute)
    for row in (3, 4):
        assert found.search(vectors[row : row + 1], 1, None)[0].tolist() == [[row]]
    assert len(copies) == 1
    found.replace(3, vectors[5])
    found.remove(5)
    found.append(vectors[5])
    assert set(found.search(vectors[5:6], 2, None)[0][0].tolist()) == {3, 29}
    assert len(copies) == 2
    assert found.search(vectors[9:10], 1, np.arange(30) == 8)[0].tolist() == [[8]]
    assert len(copies) == 2
