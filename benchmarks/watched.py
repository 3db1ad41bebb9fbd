"""An engine seen through a window: what it is asked to encode is noted, prompts get the salt of the moment, and
encoding can be held back. The engine's work is its own; this must never change an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any

from inferscale_memory.engine.base import (
    DEFAULT_OPTIONS,
    Chunk,
    Completion,
    EncodeRequest,
    EncodeResult,
    SamplingOptions,
)
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt


class Watched:
    """An `Engine` that hands everything on.

    Attributes:
        salt: put before the salt of every prompt.
        encodes: the batches it was asked to encode since it was last emptied, without preambles.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._may_encode = Event()
        self._may_encode.set()
        self.salt = ""
        self.encodes: list[tuple[EncodeRequest, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block encodes of facts wait: an app without blobs makes none."""
        self._may_encode.clear()
        try:
            yield
        finally:
            self._may_encode.set()

    def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        if any(request.owner != PUBLIC_OWNER for request in requests):
            self._may_encode.wait()
            self.encodes.append(tuple(requests))
        results: list[EncodeResult] = self._engine.encode(requests)
        return results

    def generate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        completion: Completion = self._engine.generate(self._salted(prompt), options)
        return completion

    def stream(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Iterator[Chunk]:
        chunks: Iterator[Chunk] = self._engine.stream(self._salted(prompt), options)
        return chunks

    async def agenerate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        completion: Completion = await self._engine.agenerate(self._salted(prompt), options)
        return completion

    def astream(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> AsyncIterator[Chunk]:
        chunks: AsyncIterator[Chunk] = self._engine.astream(self._salted(prompt), options)
        return chunks

    def _salted(self, prompt: Prompt) -> Prompt:
        return prompt.salted(f"{self.salt} {prompt.salt}") if self.salt else prompt
