"""Whether what a request asks is let in: under its own salt, within its prompt, and no larger than others can bear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import Encode, Inject
from inferscale_memory.connector.requests import Encoding, Injection, adapter_of, not_plain
from inferscale_memory.kv.key import blob_keys

ENCODE_SHARE = 4
"""An encode keeps at most one part in so many of the device tier: what it keeps is held until it ends."""


@dataclass(slots=True)
class Admission:
    """What is let in by one engine.

    Attributes:
        fingerprint: of its model.
        capacity: tokens of the device tier.
        unsupported: why blobs cannot be used; None when they can, or it is not known yet.
    """

    secret: bytes
    fingerprint: str
    capacity: int
    unsupported: str | None

    def encode(self, request: Any, ask: Encode) -> Encoding:
        ids = request.prompt_token_ids
        problem = self.unsupported or not_plain(request) or self._encode_problem(request, ask)
        if problem is not None:
            # It is prefilled all the same: what it mentions has to be found in the prefix cache. Nothing else is kept.
            nothing = replace(ask, spans=(), segments=())
            none = np.empty(0, dtype=np.int64)
            return Encoding(nothing, request, None, (), none, none.astype(np.bool_), error=problem)
        keys = blob_keys(self.secret, self._model(request), ask.owner, ids, ask.spans, ask.segments)
        positions = _positions(ask.spans)
        arrived = np.zeros(len(positions), dtype=np.bool_)
        base = Injection(Inject(ask.owner, ask.segments), request) if ask.segments else None
        return Encoding(ask, request, base, tuple(keys), positions, arrived)

    def inject(self, request: Any, ask: Inject) -> Injection:
        problem = self.unsupported or not_plain(request)
        if problem is None and not self._under(protocol.compose_salt, request, ask):
            problem = "a request is injected only under the salt of its composition"
        if problem is None and sum(tokens for _, tokens in ask.segments) > len(request.prompt_token_ids):
            problem = "the composition is longer than the prompt"
        if problem is not None:  # what it mentions stands in the prompt; no blob does
            return Injection(replace(ask, segments=()), request, refused=problem, barred=True)
        return Injection(ask, request)

    def _encode_problem(self, request: Any, ask: Encode) -> str | None:
        length = len(request.prompt_token_ids)
        if not self._under(protocol.encode_salt, request, ask):
            return "an encode runs only under the encode salt of its owner and of what it begins with"
        if ask.spans[-1][1] > length:
            return f"a span ends at {ask.spans[-1][1]}, the prompt has {length} tokens"
        based = sum(tokens for _, tokens in ask.segments)
        if ask.spans[0][0] < based:
            return f"a span begins at {ask.spans[0][0]}, within the {based} tokens that are injected"
        kept = sum(stop - start for start, stop in ask.spans)
        if kept > self.capacity // ENCODE_SHARE:
            return (
                f"{kept} tokens are more than one encode may keep, a {_part(ENCODE_SHARE)} of the device tier of "
                f"{self.capacity}: raise its budget (device_bytes) or keep less in one encode"
            )
        return None

    def _under(self, salt: Callable[..., str], request: Any, ask: Encode | Inject) -> bool:
        """Whether a request has the salt that `salt` makes of what it asks."""
        lora = adapter_of(request)
        needed = salt(self.secret, self.fingerprint, ask.owner, ask.segments, lora=lora, nonce=ask.nonce)
        return protocol.same_text(request.cache_salt, needed)

    def _model(self, request: Any) -> str:
        """The model a blob belongs to: an adapter makes it another one."""
        lora = adapter_of(request)
        return f"{self.fingerprint}+{lora}" if lora else self.fingerprint


def _part(share: int) -> str:
    return {1: "whole", 2: "half", 4: "quarter"}.get(share, f"{share}th part")


def _positions(spans: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """All positions within spans that are in order: [tokens]."""
    edges = np.asarray(spans, dtype=np.int64)
    lengths = edges[:, 1] - edges[:, 0]
    before = np.cumsum(lengths) - lengths  # positions of earlier spans
    positions: NDArray[np.int64] = np.repeat(edges[:, 0] - before, lengths)
    return positions + np.arange(len(positions), dtype=np.int64)
