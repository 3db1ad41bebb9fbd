"""The local embedder: mem0's own for Hugging Face models, kept to one thread and loaded when it is first used.

A question is one short sentence. On several threads it waits for the slowest of them, which on a busy host
made one sentence take a second instead of 40 ms. Only the calling thread is limited, and only while it
embeds: the engine must keep its threads. A model that lies in a folder must never make anybody ask the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from mem0.embeddings.base import EmbeddingBase
from mem0.embeddings.huggingface import HuggingFaceEmbedding
from rich.console import Console
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from transformers.utils import logging as hf_logging

from inferscale_memory import fetch
from inferscale_memory.lifetime import renew_after_fork


class LocalEmbedder(EmbeddingBase):  # type: ignore[misc]  # mem0 has no types
    """mem0's embedder interface. Without a model it is the one this library fetches."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._renew()
        renew_after_fork(self)
        if self.config.embedding_dims is None:  # a model of the user's: only it knows
            _ = self._inner

    def _renew(self) -> None:
        """A forked child goes on with the weights that are loaded. Nobody there holds the lock of the parent."""
        self._lock = Lock()

    @property
    def _inner(self) -> Any:
        with self._lock:
            return self._loaded

    @cached_property
    def _loaded(self) -> Any:
        if self.config.model is None:
            self.config.model = str(fetch.embedder())
        bars = hf_logging.is_progress_bar_enabled()
        hf_logging.disable_progress_bar()
        try:
            with Console(stderr=True).status("Loading the embedder ..."):
                return HuggingFaceEmbedding(self.config)
        finally:
            if bars:
                hf_logging.enable_progress_bar()

    @cached_property
    def _threads(self) -> ThreadpoolController:
        return ThreadpoolController()  # made when torch's libraries are loaded, or it would not see them

    def embed(self, text: str, memory_action: Any = None) -> Any:
        inner = self._inner
        with self._threads.limit(limits=1, user_api="openmp"):
            return inner.embed(text, memory_action)

    def embed_batch(self, texts: Sequence[str], memory_action: Any = "add") -> Any:
        inner = self._inner
        with self._threads.limit(limits=1, user_api="openmp"):
            return inner.embed_batch(texts, memory_action)
