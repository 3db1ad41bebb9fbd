"""`inferscale migrate --reembed`: the vectors of a memory made anew by the embedder that its configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from mem0.utils.factory import EmbedderFactory

from inferscale_memory.errors import ConfigurationError
from inferscale_memory.extraction.engine_llm import PROVIDER
from inferscale_memory.index.file import FactFile
from inferscale_memory.index.reembed import reembed
from inferscale_memory.mem0_adapter.private import entity_collection_name
from inferscale_memory.memory.config import Settings
from inferscale_memory.memory.opening import embedder_name


class Reembedded:
    """The files of one memory that hold vectors, and the embedder that is to make them.

    Raises:
        ConfigurationError: there are none, or they are not in a store of this library.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._mem0 = Settings.read(config).mem0
        store = self._mem0.vector_store
        if store.provider != PROVIDER:
            raise ConfigurationError(
                f"a {store.provider} store cannot be embedded anew in place: copy its memories into a new one with "
                "--from and --to, which embeds them"
            )
        self._path = Path(store.config.path)
        if not self._path.exists():
            raise ConfigurationError(f"there are no memories at {self._path}: correct the path")
        name = store.config.collection_name
        self._collections = (name, entity_collection_name(store.provider, name))

    def count(self) -> int:
        """How many vectors there are."""
        total = 0
        for name in self._collections:
            with closing(FactFile(self._path, name, None)) as file:
                total += file.count()
        return total

    def run(self, *, batch: int, step: Callable[[int], None]) -> tuple[int, str]:
        """Make them all; how many were made now, and by which model. Interrupted, it goes on where it was."""
        part = self._mem0.embedder
        embedder = EmbedderFactory.create(part.provider, part.config, self._mem0.vector_store.config)
        model = embedder_name(embedder) or type(embedder).__name__
        done = 0
        for name in self._collections:
            with closing(FactFile(self._path, name, None)) as file:
                done += reembed(
                    file,
                    model,
                    lambda texts: list(embedder.embed_batch(list(texts), "add")),
                    batch=batch,
                    step=step,
                )
        return done, model
