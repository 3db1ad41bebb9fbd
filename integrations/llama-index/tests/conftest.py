"""Real parts: mem0, a store, a journal, a transformers engine with a tiny random model, LlamaIndex's own classes.

Run from the repository root: `pytest integrations/llama-index/tests`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

os.environ.setdefault("MEM0_DIR", tempfile.mkdtemp(prefix="mem0-"))
from inferscale_memory import (
    AsyncMemory,
    Memory,
    SamplingOptions,
)
from inferscale_memory.engine.base import DEFAULT_OPTIONS, Chunk, Completion
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.prompt import Prompt
from mem0.utils.factory import EmbedderFactory
from tests.memory.hashing import DIMENSIONS
from tests.memory.watched import WatchedEngine
from tests.models import tiny_model

from llama_index.llms.inferscale import InferScaleLLM
from llama_index.memory.inferscale import InferScaleMemory

ADA, BEN = {"user_id": "ada"}, {"user_id": "ben"}
FACTS = ("My cat is called Miso", "I moved to Porto", "My sister is a nurse")
SECRET = "My cat is called Zorro, and the password of the safe is 4711"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


class ListeningEngine(WatchedEngine):
    """Which tells what it was asked in streams, too: every answer is one inside."""

    def generate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        return TransformersEngine.generate(self, prompt, options)

    async def agenerate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        return await TransformersEngine.agenerate(self, prompt, options)

    def _begin(self, prompt: Prompt, options: SamplingOptions, left: Event) -> Iterator[Chunk]:
        def listened(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
            for chunk in chunks:
                if chunk.completion is not None:
                    self.asked.append((prompt, options, chunk.completion))
                yield chunk

        return listened(super()._begin(prompt, options, left))


@pytest.fixture(scope="session")
def no_weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder that can be configured and not started: its weights are missing."""
    folder = tmp_path_factory.mktemp("model") / "no-weights"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.fixture
def engine(model: Path) -> Iterator[WatchedEngine]:
    with ListeningEngine(model, device="cpu", blob_bytes=1 << 26) as engine:
        yield engine


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: WatchedEngine) -> dict[str, Any]:
    """mem0's configuration with the test embedder under a borrowed name, and the engine."""
    monkeypatch.setitem(
        EmbedderFactory.provider_to_class, "huggingface", "tests.memory.hashing.HashingEmbedder"
    )
    embedder = {"provider": "huggingface", "config": {"model": "hashing", "embedding_dims": DIMENSIONS}}
    return {"embedder": embedder, "engine": engine, "folder": tmp_path / "memory"}


@pytest.fixture
def client(config: dict[str, Any]) -> Iterator[Memory]:
    """Ada and Ben, who both have a cat."""
    with Memory.from_config(config) as memory:
        add(memory, *FACTS)
        add(memory, SECRET, **BEN)
        memory.flush()
        yield memory


@pytest.fixture(params=["sync", "async"])
def either_client(request: pytest.FixtureRequest, config: dict[str, Any]) -> Iterator[Any]:
    """The same over each face of the memory."""
    with Memory.from_config(config) as memory:
        add(memory, *FACTS)
        add(memory, SECRET, **BEN)
        memory.flush()
        if request.param == "sync":
            yield memory
            return
    client = AsyncMemory.from_config(config)
    yield client
    client.close()


@pytest.fixture
def llm(client: Memory) -> InferScaleLLM:
    """One LLM for everybody."""
    return InferScaleLLM(memory=client, max_tokens=4)


@pytest.fixture
def remembering(client: Memory) -> Callable[..., InferScaleMemory]:
    """Makes memories of conversations, Ada's by default. The user's own words are kept: a random model draws no facts
    out of anything."""

    def make(context: dict[str, str] = ADA, **fields: Any) -> InferScaleMemory:
        return InferScaleMemory.from_defaults(client, context, **{"infer": False, **fields})

    return make


def add(memory: Memory, *texts: str, **ids: str) -> None:
    said = [{"role": "user", "content": text} for text in texts]
    memory.add(said, infer=False, timestamp="2024-05-12T10:00:00", **(ids or ADA))
