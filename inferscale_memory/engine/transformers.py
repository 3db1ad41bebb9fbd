"""An engine inside the process, on transformers: the default where vLLM is missing, and an oracle for tests.

One request at a time, no paged cache, no prefix cache. It must never inject what it has not verified (owner,
ids, its own fingerprint), and never fail because a blob is missing: those tokens are prefilled like any text.

The life of a prompt: its leading blobs are looked up, gathered from the arena and rotated to their places,
and become a `DynamicCache`; what is left of the prompt is prefilled behind them; tokens are drawn.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console
from transformers import DynamicCache

from inferscale_memory.engine.base import (
    DEFAULT_OPTIONS,
    BlobRef,
    Chunk,
    Completion,
    EncodeRequest,
    EncodeResult,
    SamplingOptions,
)
from inferscale_memory.engine.hf.decode import Detokenizer, Sampler
from inferscale_memory.engine.hf.families import AttentionLayers, refusal, token_shape
from inferscale_memory.engine.hf.grammar import Grammars
from inferscale_memory.engine.hf.model import (
    DTYPES,
    end_tokens,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from inferscale_memory.errors import (
    ClosedError,
    ConfigurationError,
    ContextOverflowError,
    EngineError,
    ForkedError,
    InferScaleError,
    PromptError,
    first_line,
)
from inferscale_memory.kv.arena import Arena
from inferscale_memory.kv.key import blob_key, digest_ids
from inferscale_memory.kv.store import BlobStore, Entry
from inferscale_memory.kv.tier import RowAllocator, Rows
from inferscale_memory.lifetime import close_at_exit, leave_behind, renew_after_fork
from inferscale_memory.model_files.fingerprint import model_fingerprint
from inferscale_memory.model_files.folder import model_folder
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from inferscale_memory.sharing import Shared

PREFILL_CHUNK = 1024
"""Most tokens of one forward: bounds the memory of attention scores."""


class TransformersEngine(Shared):
    """An `Engine` on a transformers model in this process. Many threads may call it; it loads on first use.

    Args:
        model: folder of a Hugging Face model with its tokenizer, or its id at the hub, from where it is fetched unless
            it is cached.
        dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
        device: such as "cuda" or "cpu"; None takes CUDA where there is any.
        blob_bytes: budget of the blobs, on that device; the least recently used give way.
        secret: at most 64 bytes that key the blob keys.

    Raises:
        ConfigurationError: no such folder, dtype or device, or a budget under one token.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str | None = None,
        blob_bytes: int = 1 << 30,
        secret: bytes = b"",
    ) -> None:
        self._folder = model_folder(model)
        self._config = load_config(self._folder)
        self._dtype = resolve_dtype(dtype, self._config)
        self._device = resolve_device(device)
        if len(secret) > 64:
            raise ConfigurationError(f"secret has {len(secret)} bytes: pass at most 64")
        self._secret = secret
        self._blob_bytes = blob_bytes
        self._unsupported = refusal(self._config)
        self._shape = None if self._unsupported else token_shape(self._config, DTYPES[self._dtype])
        if self._shape is not None and blob_bytes < self._shape.row_bytes:
            raise ConfigurationError(
                f"blob_bytes={blob_bytes} holds no token: one takes {self._shape.row_bytes} bytes, pass more"
            )
        # Two locks, in this order. `_lock` is held for one forward at a time, so that answers and encodes of many
        # threads take turns, and a stream that nobody reads blocks nobody. `_blobs_lock` guards arena and store, and
        # is held for moments only: who forgets, or asks what is at hand, waits for no forward.
        self._lock = threading.RLock()
        self._blobs_lock = threading.RLock()
        self._loaded: _Loaded | None = None
        self._closed = False
        self._forked = False
        renew_after_fork(self)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def model_folder(self) -> Path:
        """Where the model's files lie."""
        return self._folder

    @cached_property
    def fingerprint(self) -> str:
        return model_fingerprint(self._folder, dtype=self._dtype)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._folder)

    @property
    def max_model_len(self) -> int:
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        return int(positions or self.tokenizer.model_max_length)

    @property
    def unsupported(self) -> str | None:
        return self._unsupported

    encode_tokens = 1
    """Requests are computed one after the other."""

    # -- encoding --------------------------------------------------------------------------------------------

    def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        """Prefill and keep, one request after the other. A failed one carries its error and no refs.

        Raises:
            ClosedError: the engine was closed meanwhile.
            EngineError: the model cannot be loaded.
        """
        return self._encode_all(requests, Event())

    def _encode_all(self, requests: Sequence[EncodeRequest], left: Event) -> list[EncodeResult]:
        return [self._encode(request) for request in requests if not left.is_set()]

    def _encode(self, request: EncodeRequest) -> EncodeResult:
        self._still_open()
        if self._unsupported is not None:
            return EncodeResult((), self._unsupported)
        error = self._unusable_ids(request.ids) or request.unusable
        if error is not None:
            return EncodeResult((), error)
        loaded = self._load()
        try:
            return EncodeResult(self._keep(loaded, loaded.place_for_blobs(), request))
        except (ClosedError, ForkedError):
            raise
        except (InferScaleError, RuntimeError) as failure:  # torch raises RuntimeError: out of memory
            return EncodeResult((), first_line(failure))

    def _keep(self, loaded: _Loaded, blobs: _Blobs, request: EncodeRequest) -> tuple[BlobRef, ...]:
        """Blobs of the spans of `request`: computed together, unless every one of them is at hand already."""
        ids, base = request.ids, [(ref.key, ref.tokens) for ref in request.base]
        facts = [ids[span.start : span.stop] for span in request.spans]
        keys = [
            blob_key(self._secret, self.fingerprint, request.owner, ids[: span.start], fact, base)
            for span, fact in zip(request.spans, facts, strict=True)
        ]
        refs = tuple(BlobRef(key, len(fact)) for key, fact in zip(keys, facts, strict=True))
        wanted = sum(ref.tokens for ref in refs)
        store = blobs.store
        with self._blobs_lock:
            if all(key in store for key in keys):
                store.touch(keys)
                return refs
            rows = store.reserve(wanted)
        if rows is None:
            raise EngineError(
                f"{wanted} tokens do not fit a blob store of {store.tiers[0].capacity}: "
                "raise blob_bytes, or encode fewer tokens at once"
            )
        try:
            data = self._capture(loaded, blobs, request)
        except BaseException:
            with self._blobs_lock:
                store.release(rows)
            raise
        ends = np.cumsum([ref.tokens for ref in refs])[:-1]
        with self._blobs_lock:
            blobs.arena.write(rows, data)
            for ref, fact, places in zip(refs, facts, np.split(rows, ends), strict=True):
                store.commit(ref.key, request.owner, digest_ids(fact), places)
        return refs

    def _capture(self, loaded: _Loaded, blobs: _Blobs, request: EncodeRequest) -> torch.Tensor:
        """Keys before RoPE and values of all spans in a row: [layers, 2, tokens, kv_heads, head_dim].

        Raises:
            EngineError: a blob of the base is not at hand.
        """
        kept = np.concatenate([np.arange(span.start, span.stop) for span in request.spans])
        based = self._inject(loaded, _base_of(request), len(request.ids))
        if based.tokens < request.base_tokens:
            raise EngineError(f"the base is not whole ({based.refused}): encode it first")
        parts, start = [], based.tokens
        for chunk in _chunks(request.ids[start : request.spans[-1].stop]):
            here = kept[(start <= kept) & (kept < start + len(chunk))] - start
            with self._lock, blobs.layers.capture(torch.from_numpy(here).to(self._device)) as captured:
                self._forward(loaded, chunk, based.cache)
            parts.append(captured.data())
            start += len(chunk)
        return torch.cat(parts, dim=2)

    # -- answering -------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        """Answer `prompt`.

        Raises:
            PromptError: empty, too long, or with ids the model has not.
            ConfigurationError: options that cannot work.
        """
        return _last(self.stream(prompt, options))

    def stream(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Iterator[Chunk]:
        """Answer `prompt` token by token. Raises what `generate` does, at once."""
        return self._begin(prompt, options, Event())

    def _begin(self, prompt: Prompt, options: SamplingOptions, left: Event) -> Iterator[Chunk]:
        """The answer, as a stream that ends at the next forward once `left` is set: nobody waits for it any more."""
        called = time.perf_counter()
        ids = prompt.ids
        error = self._unusable_ids(ids)
        if error is not None:
            raise PromptError(error)
        if len(ids) >= self.max_model_len:
            raise ContextOverflowError(
                f"a prompt of {len(ids)} tokens leaves no room for an answer in the model's {self.max_model_len}: "
                "shorten it or lower k"
            )
        return self._answer(prompt, ids, options, called, left)

    def _answer(
        self, prompt: Prompt, ids: list[int], options: SamplingOptions, called: float, left: Event
    ) -> Iterator[Chunk]:
        loaded = self._load()
        within = None if options.schema is None else loaded.grammars.constraint(options.schema)
        injection = self._begun(loaded, prompt, ids)
        suffix, cache = ids[injection.tokens + injection.cached :], injection.cache
        for chunk in _chunks(suffix):
            if left.is_set():
                return
            logits = self._forward(loaded, chunk, cache)
        sampler = Sampler(options, self._device)
        text = Detokenizer(self.tokenizer, options.stop, special=options.special_tokens)
        most = min(options.max_tokens, self.max_model_len - len(ids))
        tokens: list[int] = []
        logprobs: list[dict[int, float]] = []
        ttft = 0.0
        while True:
            token = sampler.draw(logits if within is None else within.allowed(logits))
            if within is not None:
                within.accept(token)
            if not tokens:
                ttft = time.perf_counter() - called
            tokens.append(token)
            if options.logprobs is not None:
                logprobs.append(sampler.logprobs(logits, token))
            ended = token in loaded.end and not (options.ignore_eos and within is None)
            piece = "" if ended else text.push(token)
            if ended or text.stopped or len(tokens) == most:
                break
            yield Chunk(piece, (token,))
            if left.is_set():
                return
            logits = self._forward(loaded, [token], cache)
        piece += text.finish()
        completion = Completion(
            text=text.text,
            token_ids=tuple(tokens),
            finish_reason="stop" if ended or text.stopped else "length",
            prompt_tokens=len(ids),
            injected_tokens=injection.tokens,
            cached_tokens=injection.cached,
            prefilled_tokens=len(suffix),
            ttft_s=ttft,
            compose_s=injection.seconds,
            refused=injection.refused,
            logprobs=None if options.logprobs is None else tuple(logprobs),
        )
        yield Chunk(piece, (tokens[-1],), completion)

    def score(
        self, prompt: Prompt, answer: Sequence[int], *, key_scale: float = 1.0, own_tokens: int = 0
    ) -> Scored:
        """What the model thinks of `answer`, given token by token. For measurements.

        Args:
            key_scale: multiplies the keys of all facts in the prompt, injected or not, as a temperature of the
                attention to them.
            own_tokens: also answer, greedily, in one line of at most so many tokens.

        Raises:
            PromptError: no answer, or what `generate` raises.
        """
        ids = prompt.ids
        error = (
            self._unusable_ids([*ids, *answer]) if ids and answer else "no token ids: pass prompt and answer"
        )
        if error is not None:
            raise PromptError(error)
        loaded, began = self._load(), time.perf_counter()
        injection = self._inject(loaded, prompt, len(ids))
        cache, done = injection.cache, injection.tokens
        if key_scale != 1.0:
            end = len(ids) - len(prompt.segments[-1].ids)
            for chunk in _chunks(ids[done:end]):
                self._forward(loaded, chunk, cache)
            done = max(done, end)
            begin = len(prompt.segments[0].ids)
            with torch.inference_mode():
                for layer in cache.layers:
                    layer.keys[:, :, begin:end] *= key_scale
        for chunk in _chunks(ids[done:]):
            logits = self._forward(loaded, chunk, cache)
        seconds = time.perf_counter() - began
        said = self._line(loaded, logits, copy.deepcopy(cache), own_tokens) if own_tokens else None
        rows = [logits]
        if len(answer) > 1:
            with self._lock:
                rows += loaded.forward(answer[:-1], cache, last=len(answer) - 1).unbind()
        return Scored(torch.stack(rows).log_softmax(-1), injection.tokens, injection.refused, seconds, said)

    def _line(self, loaded: _Loaded, logits: torch.Tensor, cache: DynamicCache, most: int) -> str:
        """The likeliest continuation behind `cache`, up to the end of its line."""
        text = Detokenizer(self.tokenizer, ("\n",))
        for _ in range(most):
            token = int(logits.argmax())
            if token in loaded.end:
                break
            text.push(token)
            if text.stopped:
                break
            logits = self._forward(loaded, [token], cache)
        text.finish()
        return text.text

    def _forward(self, loaded: _Loaded, ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        with self._lock:
            self._still_open()
            return loaded.forward(ids, cache)[-1]

    def _begun(self, loaded: _Loaded, prompt: Prompt, ids: Sequence[int]) -> _Injection:
        """What of `ids`, those of `prompt`, needs no prefill."""
        return self._inject(loaded, prompt, len(ids))

    def _inject(self, loaded: _Loaded, prompt: Prompt, prompt_tokens: int) -> _Injection:
        """A cache that holds the leading blobs of `prompt`, verified; never the whole prompt."""
        nothing = DynamicCache(config=self._config)
        if not prompt.composition:
            return _Injection(nothing)
        if loaded.blobs is None:
            return _Injection(nothing, refused=self._unsupported)
        started = time.perf_counter()
        store, arena, layers = loaded.blobs.store, loaded.blobs.arena, loaded.blobs.layers
        with self._blobs_lock:
            entries, refused = _verified(store, prompt)
            store.touch(entry.key for entry in entries)
            rows = np.concatenate([_NO_ROWS, *(entry.rows[0] for entry in entries)])[: prompt_tokens - 1]
            if not len(rows):
                return _Injection(nothing, refused=refused)
            index = arena.index(rows)
            with torch.inference_mode():
                cache = layers.compose(
                    arena.keys[:, index].transpose(0, 1), arena.values[:, index].transpose(0, 1)
                )
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        return _Injection(cache, len(rows), refused, time.perf_counter() - started)

    def _unusable_ids(self, ids: Sequence[int]) -> str | None:
        if not ids:
            return "no token ids: pass a prompt that is not empty"
        if len(ids) > self.max_model_len:
            return f"{len(ids)} tokens exceed the model's {self.max_model_len}: shorten the prompt or lower k"
        vocabulary = self._config.get_text_config().vocab_size
        if min(ids) < 0 or max(ids) >= vocabulary:
            return f"token ids outside the model's vocabulary of {vocabulary}: use this engine's tokenizer"
        return None

    # -- blobs -----------------------------------------------------------------------------------------------

    def at_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that a prompt of `owner` could be injected with now."""
        blobs = self._blobs_held()
        if blobs is None:
            return set()
        with self._blobs_lock:
            return {key for key in keys if blobs.store.usable(owner, key) is not None}

    def forget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        """Drop those of `keys` that are blobs of `owner`; returns how many. No cached blocks hold `tags`."""
        blobs = self._blobs_held()
        if blobs is None:
            return 0
        with self._blobs_lock:
            return blobs.store.forget_of(owner, keys)

    def _blobs_held(self) -> _Blobs | None:
        """None where nothing is loaded: then there are none."""
        self._still_open()
        loaded = self._loaded
        return None if loaded is None else loaded.blobs

    # -- async twins -----------------------------------------------------------------------------------------

    async def aencode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        with _leaving() as left:
            return await asyncio.to_thread(self._encode_all, requests, left)

    async def agenerate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        with _leaving() as left:
            return await asyncio.to_thread(lambda: _last(self._begin(prompt, options, left)))

    async def astream(
        self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS
    ) -> AsyncIterator[Chunk]:
        with _leaving() as left:
            chunks = self._begin(prompt, options, left)
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                yield chunk

    async def aat_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        return await asyncio.to_thread(self.at_hand, owner, keys)

    async def aforget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        return await asyncio.to_thread(self.forget, owner, keys, tags)

    # -- lifetime --------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Load the model now instead of at the first use; returns itself."""
        self._load()
        return self

    def _load(self) -> _Loaded:
        self._still_open()
        with self._lock:
            self._still_open()
            if self._loaded is None:
                with Console(stderr=True).status(f"Loading {self._folder.name} on {self._device} ..."):
                    self._loaded = self._load_model()
                close_at_exit(self, engine=True)
            return self._loaded

    def _still_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed: make a new TransformersEngine")
        if self._forked:
            raise ForkedError(
                "the model was loaded before this process was forked, and its threads are the parent's: open the "
                "memory, or make the engine, in the process that uses it"
            )

    def _load_model(self) -> _Loaded:
        model = self._made_model()
        model.eval().requires_grad_(False).to(self._device)
        blobs = None
        if self._shape is not None:
            rows = self._blob_bytes // self._shape.row_bytes
            blobs = _Blobs(
                layers=AttentionLayers(model, self._shape),
                arena=Arena(self._shape, rows, self._device),
                store=BlobStore([RowAllocator("device", rows)], public_owner=PUBLIC_OWNER),
            )
        end = end_tokens(model, self.tokenizer)
        vocabulary = self._config.get_text_config().vocab_size
        return _Loaded(model, self._device, end, Grammars(self.tokenizer, vocabulary, end), blobs)

    def _made_model(self) -> Any:
        """The model as transformers makes it of the folder."""
        return load_model(self._folder, self._config, DTYPES[self._dtype])

    @property
    def forked(self) -> bool:
        """Whether the model was loaded by the parent of this process, before it was forked."""
        return self._forked

    def _renew(self) -> None:
        """In a forked child: torch's threads, and what they held, stayed with the parent."""
        free = self._lock.acquire(blocking=False)  # the forking thread may hold it itself
        self._forked = self._forked or self._loaded is not None or not free
        self._lock, self._blobs_lock = threading.RLock(), threading.RLock()
        leave_behind(self._loaded)
        self._loaded = None

    def close(self) -> None:
        """Give back model and blobs, after the forward under way. What needs them, begun or not, raises ClosedError
        from then on."""
        self._closed = True
        with self._lock:
            self._loaded = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_NO_ROWS: Rows = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Blobs:
    """Where blobs come from, lie, and are looked up."""

    layers: AttentionLayers
    arena: Arena
    store: BlobStore


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model in memory. `end`: tokens that end an answer. `grammars`: keep answers within JSON schemas. `blobs`:
    None where the model is unsupported."""

    model: Any
    device: torch.device
    end: frozenset[int]
    grammars: Grammars
    blobs: _Blobs | None

    def place_for_blobs(self) -> _Blobs:
        if self.blobs is None:
            raise EngineError("this model's blobs are unsupported: serve it as text")
        return self.blobs

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], cache: DynamicCache, last: int = 1) -> torch.Tensor:
        """Raw logits [last, vocab], float32, after the last of `ids`, which follow what `cache` holds and are added
        to it."""
        inputs = torch.tensor([ids], dtype=torch.long, device=self.device)
        output = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=last)
        logits: torch.Tensor = output.logits[0, -last:].float()
        return logits


@dataclass(frozen=True, slots=True)
class Scored:
    """What a model thinks of an answer.

    Attributes:
        logprobs: [answer tokens, vocab], float32: of every token in every place of the answer.
        injected_tokens: tokens of the prompt whose keys and values came from blobs.
        refused: why not all that were asked for.
        ttft_s: seconds until the first place of the answer was known.
        said: its own answer, if one was asked for.
    """

    logprobs: torch.Tensor
    injected_tokens: int
    refused: str | None
    ttft_s: float
    said: str | None = None


@dataclass(frozen=True, slots=True)
class _Injection:
    """A cache, how many tokens of the prompt were injected into it, why not more, and the seconds that took. `cached`:
    tokens it holds because an earlier prompt computed them."""

    cache: DynamicCache
    tokens: int = 0
    refused: str | None = None
    seconds: float = 0.0
    cached: int = 0


@contextmanager
def _leaving() -> Iterator[Event]:
    """An event that is set when the block is left, by cancellation too: a thread that works for it stops."""
    left = Event()
    try:
        yield left
    finally:
        left.set()


def _last(chunks: Iterator[Chunk]) -> Completion:
    """The completion that a stream ends with."""
    for chunk in chunks:
        if chunk.completion is not None:
            return chunk.completion
    raise EngineError("the answer was broken off: nobody waits for it any more")


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """`ids` in runs of at most one forward."""
    for start in range(0, len(ids), PREFILL_CHUNK):
        yield ids[start : start + PREFILL_CHUNK]


def _verified(store: BlobStore, prompt: Prompt) -> tuple[list[Entry], str | None]:
    """The entries of the leading segments of `prompt` that may be injected, and why not more of them."""
    composition, ids = prompt.composition, prompt.ids
    segments = [(segment.key or "", len(segment.ids)) for segment in composition]
    verified = store.verify(prompt.owner, segments, lambda start, stop: digest_ids(ids[start:stop]))
    number = len(verified.entries)
    if number == len(composition):
        return verified.entries, None
    key = composition[number].key
    if verified.mismatch:
        reason = f"blob {key} was made of other token ids than the prompt has here"
    else:
        reason = f"no blob {key} of owner {prompt.owner!r} is at hand"
    return verified.entries, f"segment {number}: {reason}"


def _base_of(request: EncodeRequest) -> Prompt:
    """What stands before the spans of `request`, as far as it comes from blobs."""
    segments, start = [], 0
    for ref in request.base:
        segments.append(Segment(request.ids[start : start + ref.tokens], ref.key))
        start += ref.tokens
    return Prompt(request.owner, tuple(segments))
