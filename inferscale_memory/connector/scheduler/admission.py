"""Checks what a request asks for: it has the right salt, stays within its prompt, and leaves room for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import Encode, Inject
from inferscale_memory.connector.scheduler.requests import EncodeState, InjectState, adapter_of, not_plain
from inferscale_memory.kv.key import blob_keys

ENCODE_SHARE = 4
"""An encode keeps at most 1/ENCODE_SHARE of the device tier, because its rows are reserved until it ends."""


@dataclass(slots=True)
class Admission:
    """The checks of one engine.

    Attributes:
        fingerprint: the fingerprint of its model.
        capacity: tokens that fit on the device tier.
        unsupported: why blobs cannot be used; None when they can, or when that is not known yet.
    """

    secret: bytes
    fingerprint: str
    capacity: int
    unsupported: str | None

    def encode(self, request: Any, ask: Encode) -> EncodeState:
        """The state of an encode. A refused one has an error and keeps nothing."""
        ids = request.prompt_token_ids
        problem = self.unsupported or not_plain(request) or self._encode_problem(request, ask)
        if problem is not None:
            # The prompt is prefilled all the same, so its mentions must be found in the prefix cache.
            nothing = replace(ask, spans=(), segments=())
            none = np.empty(0, dtype=np.int64)
            return EncodeState(nothing, request, None, (), none, none.astype(np.bool_), error=problem)
        keys = blob_keys(self.secret, self._model(request), ask.owner, ids, ask.spans, ask.segments)
        positions = _positions(ask.spans)
        captured = np.zeros(len(positions), dtype=np.bool_)
        base = InjectState(Inject(ask.owner, ask.segments), request) if ask.segments else None
        return EncodeState(ask, request, base, tuple(keys), positions, captured)

    def inject(self, request: Any, ask: Inject) -> InjectState:
        """The state of a request with a composition. A refused one is prefilled as text."""
        problem = self.unsupported or not_plain(request)
        if problem is None and not self._under(protocol.compose_salt, request, ask):
            problem = "a request is injected only under the salt of its composition"
        if problem is None and sum(tokens for _, tokens in ask.segments) > len(request.prompt_token_ids):
            problem = "the composition is longer than the prompt"
        if problem is not None:  # the prompt contains its mentions as text, and no blobs
            return InjectState(replace(ask, segments=()), request, refused=problem, as_text=True)
        return InjectState(ask, request)

    def _encode_problem(self, request: Any, ask: Encode) -> str | None:
        length = len(request.prompt_token_ids)
        if not self._under(protocol.encode_salt, request, ask):
            return (
                "an encode runs only under the encode salt of its owner and of the blobs that it depends on"
            )
        if ask.spans[-1][1] > length:
            return f"a span ends at {ask.spans[-1][1]}, the prompt has {length} tokens"
        based = sum(tokens for _, tokens in ask.segments)
        if ask.spans[0][0] < based:
            return f"a span begins at {ask.spans[0][0]}, within the {based} tokens that are injected"
        kept = sum(stop - start for start, stop in ask.spans)
        if kept > self.capacity // ENCODE_SHARE:
            return (
                f"{kept} tokens are more than one encode may keep, which is {_part(ENCODE_SHARE)} of the device tier "
                f"of {self.capacity} tokens: raise device_bytes or keep fewer in one encode"
            )
        return None

    def _under(self, salt: Callable[..., str], request: Any, ask: Encode | Inject) -> bool:
        """Whether the request's salt is the one that `salt` computes for what it asks."""
        lora = adapter_of(request)
        needed = salt(self.secret, self.fingerprint, ask.owner, ask.segments, lora=lora, nonce=ask.nonce)
        return protocol.same_text(request.cache_salt, needed)

    def _model(self, request: Any) -> str:
        """The model that a blob belongs to. A LoRA adapter makes it a different model."""
        lora = adapter_of(request)
        return f"{self.fingerprint}+{lora}" if lora else self.fingerprint


def _part(share: int) -> str:
    return {1: "all", 2: "half", 4: "a quarter"}.get(share, f"1/{share}")


def _positions(spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """All positions within ordered spans: [tokens]."""
    edges = np.asarray(spans, dtype=np.int64)
    lengths = edges[:, 1] - edges[:, 0]
    before = np.cumsum(lengths) - lengths  # positions of earlier spans
    positions: NDArray[np.int64] = np.repeat(edges[:, 0] - before, lengths)
    return positions + np.arange(len(positions), dtype=np.int64)
