"""The one way in which this library tokenizes, encodes and generates.

An engine turns token ids into blobs (`encode`) and prompts into text (`generate`, `stream`). It never sees a memory,
a template or a database. Sync and async faces of an engine are the same code under two names.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

from inferscale_memory.arguments import as_count, as_number, refusal, repaired
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.prompt.json_schema import kept, read_schema
from inferscale_memory.prompt.segments import Prompt

MOST_TEMPERATURE = 2.0
"""As vLLM has it."""
MOST_STOPS = 128
"""Most stop strings of one request; a server that `inferscale serve` starts takes as many."""


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
        max_tokens: most tokens to generate. It is an upper bound: no answer is longer than what the prompt leaves of
            the model's context.
        temperature: 0 is greedy; at most 2.
        top_p: nucleus mass, in (0, 1].
        stop: strings that end the answer; they are not part of it. At most 128, none of them empty; one alone may be
            passed as it is.
        seed: makes sampling repeatable; 64 bits.
        logprobs: how many top log-probabilities to return per generated token; None for none, -1 for
            all of them (vLLM's `max_logprobs` must allow it).
        ignore_eos: go on past the end-of-sequence token (measurements).
        special_tokens: the answer's text shows special tokens, which some models begin a tool call with.
        json_schema: the answer is JSON of this schema, unless `max_tokens` cut it off. It is kept as text, so that
            options can be hashed, and so that nobody changes it while it is used.

    What no engine could do is refused here, so that all of them refuse the same.

    Raises:
        ConfigurationError: a value that cannot work, or a schema that no answer can be kept within.
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
        checked: dict[str, Any] = {
            "max_tokens": as_count(self.max_tokens, "max_tokens", least=1),
            "temperature": as_number(self.temperature, "temperature", least=0, most=MOST_TEMPERATURE),
            "top_p": as_number(self.top_p, "top_p", least=0, most=1),
            "stop": _as_stop(self.stop),
        }
        if not checked["top_p"]:
            raise refusal("top_p", self.top_p, "a number of more than 0 and at most 1")
        if self.seed is not None:
            checked["seed"] = as_count(self.seed, "seed", least=-(2**63), most=2**63 - 1)
        if self.logprobs is not None:
            checked["logprobs"] = as_count(self.logprobs, "logprobs", least=-1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", read_schema(self.json_schema))

    @property
    def schema(self) -> str | None:
        """`json_schema` in the form that every engine keeps exactly; see `prompt.json_schema`."""
        return None if self.json_schema is None else kept(str(self.json_schema))


def _as_stop(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise refusal("stop", stop, "strings that are not empty")
    if len(stop) > MOST_STOPS:
        raise ConfigurationError(f"stop has {len(stop)} strings: pass at most {MOST_STOPS}")
    return tuple(repaired(text) for text in stop)


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
