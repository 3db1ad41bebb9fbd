"""What the scheduler side remembers of each request that asks something of it, and what it reads in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.connector.protocol import NAME, Encode, Inject
from inferscale_memory.connector.residency import Name
from inferscale_memory.kv.key import digest_ids
from inferscale_memory.kv.store import Entry
from inferscale_memory.kv.tier import Rows

PARAMS = "kv_transfer_params"
"""Where vLLM carries them among the sampling parameters."""


@dataclass(slots=True)
class Encoding:
    """An encode under way. `keys` are those of the blobs it will make, one per span; `positions`, `arrived` and
    `rows` are per kept token, over all spans in order; `base` is what it begins with, if blobs are injected into it."""

    ask: Encode
    request: Any
    base: Injection | None
    keys: tuple[str, ...]
    positions: NDArray[np.int64]
    arrived: NDArray[np.bool_]
    rows: Rows | None = None
    error: str | None = None
    blobs: list[list[Any]] = field(default_factory=list)
    fresh: bool = False  # recompute everything: a prefix-cache hit reached into what is to be kept
    forgotten: set[Name] = field(default_factory=set)

    @property
    def open(self) -> bool:
        return self.error is None and not self.blobs

    @property
    def unreserved(self) -> int:
        """Tokens that it still needs room for on the device."""
        return len(self.positions) if self.open and self.rows is None else 0

    @property
    def based(self) -> int:
        """Tokens of the blobs that it begins with."""
        return sum(tokens for _, tokens in self.ask.segments)

    def mentions(self) -> list[tuple[Name, int]]:
        """What the prompt holds: the tags it names, the blobs it begins with, and those that are made of it."""
        starts = (start for start, _ in self.ask.spans)
        base = [] if self.base is None else self.base.mentions()
        return base + _names(self.ask, zip(self.keys, starts, strict=False))


@dataclass(frozen=True, slots=True)
class Match:
    """What `match` claimed: prompt positions `[cached, cached + external)` out of `entries`, the first of which
    stands at `offset`."""

    cached: int
    external: int
    offset: int
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class Injection:
    """A request with a composition. Counts are those of its first admission; of the `injected` tokens, `promoted`
    stood on a lower tier and were brought up for it; `lost` is how many vLLM still counts whose load has failed.
    `barred`: it is prefilled as text."""

    ask: Inject
    request: Any
    refused: str | None = None
    barred: bool = False
    missing: tuple[str, ...] = ()
    matched: Match | None = None
    admitted: bool = False
    injected: int = 0
    promoted: int = 0
    lost: int = 0
    compose_s: float = 0.0
    checked: int = 0  # leading segments that the prompt's ids are known to be those of
    stale: bool = False  # what it loads was computed by a model that may be another one now
    forgotten: set[Name] = field(default_factory=set)

    def mentions(self) -> list[tuple[Name, int]]:
        """What the prompt holds: the tags it names, and the blobs it is composed of."""
        starts = accumulate((tokens for _, tokens in self.ask.segments), initial=0)
        return _names(self.ask, zip((key for key, _ in self.ask.segments), starts, strict=False))


@dataclass(slots=True)
class Answer:
    """A request whose answer is known when it arrives."""

    reply: dict[str, Any]


def take_params(request: Any) -> Any:
    """What a request carries for connectors. What it carries for us is taken out of it: vLLM prints the parameters of
    requests into its logs and crash dumps, and there a token, an owner or a tag has no business."""
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
    """Why a prompt is not a run of text token ids, if it is not."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "prompts given as embeddings have no token ids to verify"
    if getattr(request, "mm_features", None):
        return "prompts with images or audio are served as they are"
    return None


def digest_of(request: Any, ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """What must be equal where a blob is encoded and where it is injected: the adapter and the token ids."""
    return digest_ids(ids) + adapter_of(request).encode()


def adapter_of(request: Any) -> str:
    """Its LoRA adapter, by all that tells it from another; empty for the model itself."""
    adapter = getattr(request, "lora_request", None)
    return f"{adapter.lora_name}:{adapter.lora_int_id}:{adapter.lora_path}" if adapter else ""


def _names(ask: Encode | Inject, keys: Iterable[tuple[str, int]]) -> list[tuple[Name, int]]:
    """The names under which a prompt's tags and blob keys are remembered, and where they begin."""
    return [*((("", tag), at) for tag, at in ask.mentions), *(((ask.owner, key), at) for key, at in keys)]
