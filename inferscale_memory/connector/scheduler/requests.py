"""The state of each request that asks something of the scheduler side, and what is read from a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.connector.protocol import NAME, Encode, Inject
from inferscale_memory.connector.scheduler.prefix_cache_index import Name
from inferscale_memory.kv.key import digest_ids
from inferscale_memory.kv.store import Entry
from inferscale_memory.kv.tier import Rows

PARAMS = "kv_transfer_params"
"""The name of the connector's parameters among vLLM's sampling parameters."""


@dataclass(slots=True)
class EncodeState:
    """An encode that has not ended.

    Attributes:
        request: vLLM's request.
        base: the injection of the blobs that the prompt begins with, if any. What is kept depends on them.
        keys: the keys of the blobs that will be made, one per span.
        positions, captured, rows: of each kept token, over all spans in order: its position in the prompt, whether all
            ranks have captured it, and its row on the device tier, once reserved.
        error: why nothing is kept.
        blobs: [key, tokens] of each blob that is stored.
        forgotten: names that were forgotten while the encode ran.
    """

    ask: Encode
    request: Any
    base: InjectState | None
    keys: tuple[str, ...]
    positions: NDArray[np.int64]
    captured: NDArray[np.bool_]
    rows: Rows | None = None
    error: str | None = None
    blobs: list[list[Any]] = field(default_factory=list)
    forgotten: set[Name] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether the encode has neither failed nor stored its blobs."""
        return self.error is None and not self.blobs

    @property
    def unreserved(self) -> int:
        """Tokens that still need rows on the device tier."""
        return len(self.positions) if self.open and self.rows is None else 0

    @property
    def base_tokens(self) -> int:
        """Tokens of the blobs that the prompt begins with."""
        return sum(tokens for _, tokens in self.ask.segments)

    def mentions(self) -> list[tuple[Name, int]]:
        """The names in the prompt: its tags, the blobs that it begins with, and those that are made of it."""
        starts = (start for start, _ in self.ask.spans)
        base = [] if self.base is None else self.base.mentions()
        return base + _names(self.ask, zip(self.keys, starts, strict=False))


@dataclass(frozen=True, slots=True)
class Match:
    """What `match` claimed: prompt positions `[cached, cached + external)`, which `entries` contain. The first entry
    begins at position `offset`."""

    cached: int
    external: int
    offset: int
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class InjectState:
    """A request with a composition that has not ended.

    Attributes:
        request: vLLM's request.
        refused: why less is injected than was asked for.
        as_text: nothing is injected any more; the prompt is prefilled as text.
        missing: keys whose blobs are not there.
        matched: what the last `match` claimed.
        admitted: whether vLLM has given the request its blocks once. The counts below are those of the first time.
        injected: tokens that were claimed.
        promoted: how many of them were promoted from a lower tier.
        lost: tokens that vLLM still counts as injected, although their load failed.
        compose_s: seconds that the loads took.
        checked: leading segments whose ids are known to be those of the prompt.
        stale: the load was ordered before a reset, so its blobs may be of other weights.
        forgotten: names that were forgotten while the request ran.
    """

    ask: Inject
    request: Any
    refused: str | None = None
    as_text: bool = False
    missing: tuple[str, ...] = ()
    matched: Match | None = None
    admitted: bool = False
    injected: int = 0
    promoted: int = 0
    lost: int = 0
    compose_s: float = 0.0
    checked: int = 0
    stale: bool = False
    forgotten: set[Name] = field(default_factory=set)

    def mentions(self) -> list[tuple[Name, int]]:
        """The names in the prompt: its tags, and the blobs that it is composed of."""
        starts = accumulate((tokens for _, tokens in self.ask.segments), initial=0)
        return _names(self.ask, zip((key for key, _ in self.ask.segments), starts, strict=False))


@dataclass(slots=True)
class Answer:
    """A request whose reply is known when it arrives."""

    reply: dict[str, Any]


State = EncodeState | InjectState | Answer


def take_params(request: Any) -> Any:
    """The connector parameters of a request. Ours are removed from the request, because vLLM prints parameters into
    its logs and crash dumps, which must not contain tokens, owners or tags."""
    raw = request.kv_transfer_params
    kept = {**raw} if isinstance(raw, dict) else None
    if kept is not None and NAME in kept:
        del kept[NAME]
    request.kv_transfer_params = kept
    sampling: Any = getattr(request, "sampling_params", None)
    extra = getattr(sampling, "extra_args", None)
    if isinstance(extra, dict) and PARAMS in extra:
        sampling.extra_args = {**extra, PARAMS: kept}
    return raw


def not_plain(request: Any) -> str | None:
    """Why a prompt is not just text token ids; None when it is."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "prompts given as embeddings have no token ids to verify"
    if getattr(request, "mm_features", None):
        return "prompts with images or audio are served without injecting"
    return None


def digest_of(request: Any, ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """The digest of token ids under the request's adapter. It must be the same where a blob is encoded and where it is
    injected."""
    return digest_ids(ids) + adapter_of(request).encode()


def adapter_of(request: Any) -> str:
    """The identity of a request's LoRA adapter; empty when it has none."""
    adapter = getattr(request, "lora_request", None)
    return f"{adapter.lora_name}:{adapter.lora_int_id}:{adapter.lora_path}" if adapter else ""


def _names(ask: Encode | Inject, keys: Iterable[tuple[str, int]]) -> list[tuple[Name, int]]:
    """The names of a prompt's tags and blob keys, and the positions where they begin."""
    return [*((("", tag), at) for tag, at in ask.mentions), *(((ask.owner, key), at) for key, at in keys)]
