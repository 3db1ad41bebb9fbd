"""Memories on a real mem0, a real store, a real journal and a real engine with a tiny random model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

os.environ.setdefault("MEM0_DIR", tempfile.mkdtemp(prefix="mem0-"))
from mem0.utils.factory import EmbedderFactory

from inferscale_memory.memory import Memory
from tests.memory.faces import MEM0S, OURS, Loop, Settled
from tests.memory.hashing import DIMENSIONS
from tests.memory.watched import WatchedEngine
from tests.models import tiny_model


class OpenMemory(Protocol):
    """Opens a memory under the test's folder. `options` are merged into mem0's configuration."""

    def __call__(self, **options: Any) -> Memory: ...


class OpenFace(Protocol):
    """The same for a memory of either face."""

    def __call__(self, **options: Any) -> Settled: ...


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


def opening(
    make: Callable[[dict[str, Any]], Any], folder: Path, engine: WatchedEngine, embedder: dict[str, Any]
) -> Iterator[Any]:
    """A function that opens memories under the test's folder, and closes them all in the end."""
    opened: list[Any] = []

    def open_(**options: Any) -> Any:
        opened.append(make({"embedder": embedder, "engine": engine, "folder": folder / "memory", **options}))
        return opened[-1]

    yield open_
    engine.gate.set()
    for memory in opened:
        memory.close()


@pytest.fixture
def open_memory(
    tmp_path: Path, engine: WatchedEngine, hashing_embedder: dict[str, Any]
) -> Iterator[OpenMemory]:
    yield from opening(Memory.from_config, tmp_path, engine, hashing_embedder)


@pytest.fixture
def memory(open_memory: OpenMemory) -> Memory:
    return open_memory()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(params=["sync", "async"])
def face(request: pytest.FixtureRequest) -> str:
    """Name of a face: a test that asks for it runs for both."""
    return str(request.param)


@pytest.fixture
def open_face(
    face: str, loop: Loop, tmp_path: Path, engine: WatchedEngine, hashing_embedder: dict[str, Any]
) -> Iterator[OpenFace]:
    def make(config: dict[str, Any]) -> Settled:
        return Settled(OURS[face].from_config(config), loop.run)

    yield from opening(make, tmp_path, engine, hashing_embedder)


@pytest.fixture
def either(open_face: OpenFace) -> Settled:
    """A memory of each face in turn."""
    return open_face()


@pytest.fixture
def mem0s_own(face: str, loop: Loop, tmp_path: Path, hashing_embedder: dict[str, Any]) -> Iterator[Settled]:
    """mem0's own memory of that face, configured as `either` is."""
    store = {"path": str(tmp_path / "mem0" / "qdrant"), "embedding_model_dims": DIMENSIONS}
    config = {
        "embedder": hashing_embedder,
        "vector_store": {"provider": "qdrant", "config": store},
        "llm": {"provider": "openai", "config": {"api_key": "none"}},
        "history_db_path": str(tmp_path / "mem0" / "history.db"),
    }
    memory = Settled(MEM0S[face].from_config(config), loop.run)
    yield memory
    memory.close()
    memory.vector_store.client.close()
