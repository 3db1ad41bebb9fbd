"""Memories on a real mem0, a real store, a real journal and a real engine with a tiny random model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

os.environ.setdefault("MEM0_DIR", tempfile.mkdtemp(prefix="mem0-"))

# isort: split
from inferscale_memory.memory import Memory  # before mem0, whose telemetry it turns off

# isort: split
from mem0.utils.factory import EmbedderFactory

from tests.memory.hashing import DIMENSIONS
from tests.memory.watched import WatchedEngine
from tests.models import tiny_model


class OpenMemory(Protocol):
    """Opens a memory under the test's folder. `options` are merged into mem0's configuration."""

    def __call__(self, **options: Any) -> Memory: ...


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def engine(model: Path) -> Iterator[WatchedEngine]:
    with WatchedEngine(model, device="cpu", blob_bytes=1 << 26) as engine:
        yield engine
        engine.gate.set()


@pytest.fixture
def hashing_embedder(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """mem0's configuration of the test embedder, under a borrowed name: mem0 has a fixed list."""
    monkeypatch.setitem(
        EmbedderFactory.provider_to_class, "huggingface", "tests.memory.hashing.HashingEmbedder"
    )
    return {"provider": "huggingface", "config": {"model": "hashing", "embedding_dims": DIMENSIONS}}


@pytest.fixture
def open_memory(
    tmp_path: Path, engine: WatchedEngine, hashing_embedder: dict[str, Any]
) -> Iterator[OpenMemory]:
    opened: list[Memory] = []

    def open_(**options: Any) -> Memory:
        config = {"embedder": hashing_embedder, "engine": engine, "folder": tmp_path / "memory", **options}
        opened.append(Memory.from_config(config))
        return opened[-1]

    yield open_
    engine.gate.set()
    for memory in opened:
        memory.close()


@pytest.fixture
def memory(open_memory: OpenMemory) -> Memory:
    return open_memory()
