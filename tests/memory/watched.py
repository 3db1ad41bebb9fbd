"""A real engine that tells what it was asked, and can be made to fail or to wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

from inferscale_memory.engine.base import (
    DEFAULT_OPTIONS,
    Completion,
    EncodeRequest,
    EncodeResult,
    SamplingOptions,
)
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.prompt import PUBLIC_OWNER, Prompt


class WatchedEngine(TransformersEngine):
    """`TransformersEngine`, watched.

    Attributes:
        encoded: every encode request, in order.
        asked: every prompt it was to answer, with how, and the answer.
        forgotten: every call to `forget`, as (owner, keys, tags).
        refuse: decides which requests fail.
        before_return: called when an encode is done and before anybody hears of it.
        gate: encodes wait until it is set.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.encoded: list[EncodeRequest] = []
        self.asked: list[tuple[Prompt, SamplingOptions, Completion]] = []
        self.forgotten: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
        self.refuse: Callable[[EncodeRequest], bool] = lambda request: False
        self.before_return: Callable[[], None] = lambda: None
        self.gate = Event()
        self.gate.set()

    @property
    def encoded_facts(self) -> list[EncodeRequest]:
        """Encodes that were not of a preamble."""
        return [request for request in self.encoded if request.owner != PUBLIC_OWNER]

    def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        self.gate.wait(60)
        self.encoded += requests
        results = [
            EncodeResult((), "refused by the test") if self.refuse(request) else self._encode(request)
            for request in requests
        ]
        self.before_return()
        return results

    def generate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        completion = super().generate(prompt, options)
        self.asked.append((prompt, options, completion))
        return completion

    async def agenerate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        completion = await super().agenerate(prompt, options)
        self.asked.append((prompt, options, completion))
        return completion

    def forget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        self.forgotten.append((owner, tuple(keys), tuple(tags)))
        return super().forget(owner, keys, tags)

    def texts(self, request: EncodeRequest) -> list[str]:
        """What the kept spans of `request` say."""
        return [self.tokenizer.decode(request.ids[span.start : span.stop]) for span in request.spans]

    def text(self, request: EncodeRequest) -> str:
        return str(self.tokenizer.decode(request.ids))
