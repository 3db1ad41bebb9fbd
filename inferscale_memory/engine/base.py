"""The one way in which this library tokenizes, encodes and generates.

An engine turns token ids into blobs (`encode`) and prompts into text (`generate`, `stream`). It never sees a memory,
a template or a database. Sync and async faces of an engine are the same code under two names.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from inferscale_memory.errors import ConfigurationError
from inferscale_memory.prompt.segments import Prompt


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range `[start, stop)` of positions whose keys and values are kept."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob that an engine holds: its key, as the engine computed it, and its length in tokens."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Prefill `ids` once and keep one blob per span; everything outside the spans is context, thrown away.

    Attributes:
        owner: whose blobs these become.
        ids: encode preamble, window, neighbours and facts, as they stand.
        spans: what is kept: ordered, disjoint, not empty.
        mentions: (tag, position) of every fact in `ids`, kept or context: forgetting a tag evicts the cached blocks
            from that position on.
        base: blobs that are injected for the first of `ids` instead of prefilling them, in order. All of them or
            none: the encode fails when one is not at hand, because what is kept depends on them.
    """

    owner: str
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    mentions: tuple[tuple[str, int], ...] = ()
    base: tuple[BlobRef, ...] = ()

    @property
    def base_tokens(self) -> int:
        """How many of `ids` the base stands for."""
        return sum(ref.tokens for ref in self.base)

    @property
    def unusable(self) -> str | None:
        """What is wrong with spans and base, whatever the model; None when nothing is."""
        if not self.spans:
            return "no spans: name what is to be kept"
        edge = self.base_tokens
        for span in self.spans:
            if not edge <= span.start < span.stop <= len(self.ids):
                return (
                    f"{span} of {len(self.ids)} tokens: pass spans in order, disjoint, inside, not empty and behind "
                    f"the base of {self.base_tokens}"
                )
            edge = span.stop
        return None


@dataclass(frozen=True, slots=True)
class EncodeResult:
    """What became of one `EncodeRequest`.

    Attributes:
        refs: one per span, in order; empty when the encode failed.
        error: why it failed, for a person to read; None when it did not.
        answered: False where the engine could not be asked, or did not answer: the same may well succeed later.
    """

    refs: tuple[BlobRef, ...]
    error: str | None = None
    answered: bool = True


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are drawn.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: 0 is greedy.
        top_p: nucleus mass, in (0, 1].
        stop: strings that end the answer; they are not part of it.
        seed: makes sampling repeatable.
        logprobs: how many top log-probabilities to return per generated token; None for none, -1 for
            all of them (vLLM's `max_logprobs` must allow it).
        ignore_eos: go on past the end-of-sequence token (measurements).
        special_tokens: the answer's text shows special tokens, which some models begin a tool call with.
        json_schema: the answer is JSON of this schema, unless `max_tokens` cut it off. It is kept as text, so that
            options can be hashed, and so that nobody changes it while it is used.

    Raises:
        ConfigurationError: a schema that is no JSON object.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    special_tokens: bool = False
    json_schema: Mapping[str, Any] | str | None = None

    def __post_init__(self) -> None:
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))

    @property
    def schema(self) -> str | None:
        """The text of `json_schema`."""
        return None if self.json_schema is None else str(self.json_schema)


def _schema_text(schema: Mapping[str, Any] | str) -> str:
    """Keys in the order given: it is the order in which the answer has them."""
    try:
        read = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if isinstance(read, dict):
            return json.dumps(read, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"json_schema is not JSON ({error}): pass a JSON schema") from error
    raise ConfigurationError(
        f"json_schema is a {type(read).__name__}: pass a JSON schema, which is an object"
    )


DEFAULT_OPTIONS = SamplingOptions()


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer and what it cost.

    Attributes:
        text, token_ids: the answer.
        finish_reason: "stop" or "length".
        prompt_tokens: = injected + cached + prefilled.
        injected_tokens: tokens whose keys and values came from blobs.
        cached_tokens: tokens that hit the engine's own prefix cache.
        prefilled_tokens: tokens the engine computed.
        ttft_s: seconds from the call to the first token.
        compose_s: seconds the engine spent rotating and writing the injected tokens; 0.0 when none were.
        refused: why nothing, or less than asked, was injected; None when all was.
        logprobs: per generated token, {token id: log-probability}, when asked for.
        promoted_tokens: of the injected tokens, those whose blobs had to be brought to the device from a lower tier
            first.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    injected_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    ttft_s: float
    compose_s: float = 0.0
    refused: str | None = None
    logprobs: tuple[Mapping[int, float], ...] | None = None
    promoted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer; the last one carries the whole `Completion`."""

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None = None


@runtime_checkable
class Engine(Protocol):
    """What tokenizes, encodes and generates.

    Attributes:
        fingerprint: names weights, rope, dtype, tokenizer and template: blobs of another fingerprint are refused.
        tokenizer: the model's `transformers` tokenizer.
        max_model_len: most tokens of prompt and answer together.
        unsupported: why blobs cannot be used with this model; None when they can. Then everything is served as text.
    """

    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def unsupported(self) -> str | None: ...

    def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        """Prefill and keep; results in the order of `requests`. A failed one carries its error and no refs."""
        ...

    def generate(self, prompt: Prompt, options: SamplingOptions = ...) -> Completion: ...
    def stream(self, prompt: Prompt, options: SamplingOptions = ...) -> Iterator[Chunk]: ...
    def at_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that a prompt of `owner` could be injected with now."""
        ...

    def forget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        """Drop blobs from every tier, and cached blocks that hold them or mention `tags`; returns blobs dropped."""
        ...

    async def aencode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]: ...
    async def agenerate(self, prompt: Prompt, options: SamplingOptions = ...) -> Completion: ...
    def astream(self, prompt: Prompt, options: SamplingOptions = ...) -> AsyncIterator[Chunk]: ...
    async def aat_hand(self, owner: str, keys: Sequence[str]) -> set[str]: ...
    async def aforget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int: ...
    def start(self) -> Self:
        """Load the model, or meet the server, now instead of at the first use; returns itself."""
        ...

    def close(self) -> None: ...
