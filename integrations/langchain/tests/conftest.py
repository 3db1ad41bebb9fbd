"""Real engines, a real mem0 and real LangChain. The small ones are random, and answer anything at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("MEM0_DIR", tempfile.mkdtemp(prefix="mem0-"))
from langchain_inferscale import ChatInferScale
from mem0.utils.factory import EmbedderFactory

from inferscale_memory import AsyncMemory, Memory
from integrations.langchain.tests.saying import FACTS, SECRET
from tests.memory.hashing import DIMENSIONS
from tests.memory.watched import WatchedEngine
from tests.models import tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture
def engine(model_folder: Path) -> Iterator[WatchedEngine]:
    with WatchedEngine(model_folder, device="cpu", blob_bytes=1 << 26) as engine:
        yield engine


@pytest.fixture
def embedder(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """mem0's configuration of the test embedder, under a borrowed name: mem0 has a fixed list."""
    monkeypatch.setitem(
        EmbedderFactory.provider_to_class, "huggingface", "tests.memory.hashing.HashingEmbedder"
    )
    return {"provider": "huggingface", "config": {"model": "hashing", "embedding_dims": DIMENSIONS}}


@pytest.fixture
def open_memory(
    tmp_path: Path, engine: WatchedEngine, embedder: dict[str, Any]
) -> Iterator[Callable[..., Any]]:
    """Opens memories of either face under the test's folder, and closes them all in the end."""
    opened: list[Any] = []

    def open_(face: Any = Memory, **options: Any) -> Any:
        opened.append(
            face.from_config(
                {"embedder": embedder, "engine": engine, "folder": tmp_path / "memory", **options}
            )
        )
        return opened[-1]

    yield open_
    for memory in opened:
        memory.close()


@pytest.fixture
def memory(open_memory: Callable[..., Memory]) -> Memory:
    return open_memory()


@pytest.fixture(params=[Memory, AsyncMemory], ids=["sync-memory", "async-memory"])
def either(request: pytest.FixtureRequest, open_memory: Callable[..., Any]) -> Any:
    """A memory of each face in turn."""
    return open_memory(request.param)


@pytest.fixture
def filled(memory: Memory) -> Memory:
    """Ada's three facts and Ben's secret, all of them encoded."""
    for fact in FACTS:
        memory.add(fact, user_id="ada", infer=False)
    memory.add(SECRET, user_id="ben", infer=False)
    memory.flush()
    return memory


@pytest.fixture
def model(filled: Memory) -> ChatInferScale:
    return ChatInferScale(memory=filled, max_tokens=8)
