"""The searchers that cannot run here, on stand-ins for what they need."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from inferscale_memory.errors import StoreError
from inferscale_memory.index import Collection, jasper, searcher
from inferscale_memory.index.searcher import Brute, GpuBrute, unit
from tests.index.facts import DIMS, fact, vector


class Graph:
    """Jasper as its interface is described; it proposes the nearest, in any order, and its own scores."""

    built = 0

    def __init__(self, vectors: Any) -> None:
        Graph.built += 1
        assert str(vectors.dtype) == "torch.float16"
        self.vectors, self.deleted = vectors.float().numpy(), set[int]()

    @classmethod
    def build(cls, vectors: Any) -> Graph:
        return cls(vectors)

    def search(self, queries: Any, k: int) -> tuple[Any, None]:
        import torch

        scores = queries.float().numpy() @ self.vectors.T
        scores[:, sorted(self.deleted)] = -np.inf
        return torch.from_numpy(np.argsort(-scores, axis=1)[:, :k][:, ::-1].copy()), None

    def append(self, vectors: Any) -> None:
        self.vectors = np.concatenate([self.vectors, vectors.float().numpy()])

    def mark_deleted(self, ids: Any) -> None:
        self.deleted |= set(ids.tolist())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("jasper")
    module.Graph = Graph  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jasper", module)
    monkeypatch.setattr(jasper, "GRAPH_ROWS", 20)
    monkeypatch.setattr(Graph, "built", 0)


def test_jasper_follows_every_change_and_scores_are_exact(stand_in: None) -> None:
    draw = np.random.default_rng(3)
    graph, exact = jasper.Jasper(np.empty((0, DIMS), "f4")), Brute(np.empty((0, DIMS), "f4"))
    for step in range(400):
        made = unit(draw.standard_normal((1, DIMS)).astype("f4"))[0]
        choice = draw.random() if len(exact) else 0
        row = int(draw.integers(len(exact))) if len(exact) else 0
        for one in (graph, exact):
            if choice < 0.5:
                one.append(made)
            elif choice < 0.75:
                one.replace(row, made)
            else:
                one.remove(row)
        if not len(exact):
            continue
        query = unit(draw.standard_normal((2, DIMS)).astype("f4"))
        mask = draw.random(len(exact)) < 0.5 if step % 3 == 0 else None
        (rows, scores), (_, cosines) = graph.search(query, 3, mask), exact.search(query, 3, mask)
        # In float16 the graph may take the next best; what it says of it is exact all the same.
        np.testing.assert_allclose(scores, cosines, atol=2e-3)
        np.testing.assert_allclose(scores, np.einsum("qd,qkd->qk", query, exact.vectors[rows]), atol=1e-6)
        assert mask is None or mask[rows].all()
    assert Graph.built == 1


def test_a_deleted_fact_that_the_graph_proposes_is_searched_for_exactly(
    stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Graph, "mark_deleted", lambda self, ids: None)
    vectors = unit(np.stack([vector(seed) for seed in range(30)]))
    graph = jasper.Jasper(vectors)
    graph.search(vectors[:1], 1, None)
    graph.remove(4)
    rows, _ = graph.search(vectors[4:5], 2, None)
    assert rows.tolist() == Brute(graph.vectors.copy()).search(vectors[4:5], 2, None)[0].tolist()


def test_jasper_is_used_only_when_it_is_asked_for(stand_in: None, tmp_path: Path) -> None:
    rows = ([str(n) for n in range(30)], [vector(n) for n in range(30)], [fact("t") for _ in range(30)])
    for kind, built in (("exact", 0), ("jasper", 1)):
        facts = Collection(tmp_path / kind, "facts", kind=kind)
        facts.put(*rows)
        assert [hit.id for hit in facts.search([vector(7)], 1)[0]] == ["7"]
        assert Graph.built == built


def test_a_searcher_that_is_not_there_is_said_when_the_store_is_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r'"jasper" needs jasper, which is not installed'):
        Collection(tmp_path / "f", "facts", kind="jasper")
    with pytest.raises(StoreError, match="no searcher 'annoy': use exact or jasper"):
        Collection(tmp_path / "f", "facts", kind="annoy")


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
    found = searcher.searcher("exact", vectors.copy())
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
