"""What every benchmark runs on: an engine and an embedder, made alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferscale_memory.engine.base import Engine


@contextmanager
def engine(
    provider: str, model: Path | None, *, dtype: str, blob_bytes: int, **options: Any
) -> Iterator[Engine]:
    """An engine that ends with the block; the demo model unless one is named. The vLLM engine can return all
    log-probabilities of a place."""
    from inferscale_memory.fetch import demo_model

    folder = model or demo_model()
    running: Engine
    if provider == "vllm":
        from inferscale_memory.engine.vllm import VLLMEngine

        settings = {"enforce_eager": True, "max_logprobs": -1, "max_model_len": 8192, **options}
        running = VLLMEngine(folder, dtype=dtype, device_bytes=blob_bytes, **settings)
    else:
        from inferscale_memory.engine.transformers import TransformersEngine

        running = TransformersEngine(folder, dtype=dtype, blob_bytes=blob_bytes, **options)
    try:
        yield running
    finally:
        running.close()


def embedder() -> Any:
    """The local embedder, as a memory uses it."""
    from mem0.configs.embeddings.base import BaseEmbedderConfig

    from inferscale_memory.mem0_adapter.embedder import LocalEmbedder

    return LocalEmbedder(BaseEmbedderConfig(embedding_dims=384))
