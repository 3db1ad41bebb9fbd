"""The client side of the connector's protocol, shared by the vLLM engine and the remote engine.

A request is the same in process and over HTTP: token ids, a cache salt, and parameters that name the operation. This
module builds requests and reads replies; an engine only adds how a request is sent. The counts in a completion come
from the connector's reply and from vLLM, never from an estimate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import MAX_ITEMS, Encode, Forget, Inject, Probe
from inferscale_memory.engine.base import (
    BlobRef,
    Completion,
    EncodeRequest,
    EncodeResult,
    SamplingOptions,
)
from inferscale_memory.errors import (
    ConfigurationError,
    ContextOverflowError,
    EngineError,
    PromptError,
    first_line,
)
from inferscale_memory.prompt.segments import Prompt

T = TypeVar("T")
CHECK_TOKENS = 32
"""Length of the start-up request on which the connector checks itself: half of it repeats one token."""
START_UP = "start-up"
"""The owner of that request."""


class ConnectorClient(ABC):
    """Encodes, probes, forgets and prepares prompts by requests to a model that runs our connector.

    Attributes:
        fingerprint: of the model, as the connector reports it; empty until it has answered.
        unsupported: why blobs cannot be used; None if they can.
        connected: whether the model runs our connector, which tracks the facts in the prefix cache.
        max_model_len: the most tokens of prompt and answer together.
        most_logprobs: the most log-probabilities per token; -1 for all, None if that is not known.
        some_token: any token id of the model. Requests that only query the connector consist of it.
    """

    fingerprint: str = ""
    unsupported: str | None = None
    connected: bool = True
    max_model_len: int
    most_logprobs: int | None = None
    some_token: int

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    # -- for the engine to implement------------------------------------------------------------------------------

    @abstractmethod
    async def _control(
        self, ask: protocol.Ask, ids: Sequence[int], salt: str, *, tokens: int = 1
    ) -> dict[str, Any]:
        """The connector's reply to a request that generates exactly `tokens` tokens; empty if it gave none."""

    @abstractmethod
    async def _all(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        """Run `calls` concurrently; their results in order."""

    # -- encoding, probing, forgetting--------------------------------------------------------------------------

    async def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        """A result for each request. A request that fails is reported in its result, so that the blobs of the others
        are not lost. If every request fails, the first error is raised."""
        results = await self._all([partial(self._encode_or_error, request) for request in requests])
        failed = [result for result in results if isinstance(result, Exception)]
        if failed and len(failed) == len(results):
            raise failed[0]
        return [
            EncodeResult((), first_line(result), answered=False) if isinstance(result, Exception) else result
            for result in results
        ]

    async def _encode_or_error(self, request: EncodeRequest) -> EncodeResult | Exception:
        try:
            return await self._encode(request)
        except Exception as error:
            return error

    async def _encode(self, request: EncodeRequest) -> EncodeResult:
        if self.unsupported:
            return EncodeResult((), self.unsupported)
        if request.unusable:
            return EncodeResult((), request.unusable)
        if len(request.ids) + 2 > self.max_model_len:
            return EncodeResult((), f"{len(request.ids)} tokens do not fit the model's {self.max_model_len}")
        most = min(MAX_ITEMS, len(request.ids))
        blobs = len(request.spans) + len(request.base)
        for what, count in (("blobs", blobs), ("mentions", len(request.mentions))):
            if count > most:
                return EncodeResult(
                    (), f"{count} {what} in one encode, but {most} is the limit: encode fewer at a time"
                )
        spans = tuple((span.start, span.stop) for span in request.spans)
        base = tuple((ref.key, ref.tokens) for ref in request.base)
        nonce = uuid4().hex if base else ""
        ask = Encode(request.owner, spans, request.mentions, base, nonce)
        salt = protocol.encode_salt(self._secret, self.fingerprint, request.owner, base, nonce=nonce)
        # Two tokens: with one, the reply could precede the workers' confirmation of the last kept token.
        reply = await self._control(ask, request.ids, salt, tokens=2)
        refs = tuple(BlobRef(key, tokens) for key, tokens in reply.get("blobs", ()))
        error = reply.get("error") or (None if refs else "the engine did not answer an encode request")
        return EncodeResult(refs, error)

    async def at_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for part in _batches(keys):
            reply = await self._answer(Probe(owner, part), "at_hand")
            found.update(reply["at_hand"])
        return found

    async def forget(self, owner: str, keys: Sequence[str], tags: Sequence[str]) -> int:
        dropped = 0
        for part in _batches(keys) or [()]:
            dropped += (await self._answer(Forget(owner, part), "dropped"))["dropped"]
        for part in _batches(tags):
            await self._answer(Forget(owner, (), part), "dropped")
        return dropped

    async def _answer(self, ask: Probe | Forget, needed: str) -> dict[str, Any]:
        """The connector's reply, which must contain `needed`: a probe or forget that was not done is an error.

        Raises:
            EngineError: the reply lacks `needed`.
        """
        reply = await self._control(ask, [self.some_token], self._salt(ask.owner))
        if needed not in reply:
            raise EngineError(
                f"the connector did not carry out a request ({reply.get('error', 'no reply')}); "
                "is INFERSCALE_SECRET the same for the engine and its client?"
            )
        return reply

    async def _identify(self, ids: Sequence[int]) -> dict[str, Any]:
        """Ask the connector for the model's fingerprint. It runs its start-up check on this request's prompt.

        Args:
            ids: at least CHECK_TOKENS / 2 different token ids of the model.
        """
        prompt = [ids[0]] * (CHECK_TOKENS // 2) + [*ids[: CHECK_TOKENS // 2]]
        # A fresh salt keeps the prompt out of the prefix cache: tokens that are not computed prove nothing.
        return await self._control(Probe(START_UP), prompt, self._salt(START_UP, uuid4().hex), tokens=2)

    # -- prompts ------------------------------------------------------------------------------------------------

    def _transfer(self, prompt: Prompt, *, receipt: str = "") -> tuple[int, dict[str, Any] | None, str]:
        """(number of tokens to inject, the request's parameters, its cache salt)."""
        parts = () if self.unsupported else prompt.composition[:MAX_ITEMS]
        composition = tuple((part.key, len(part.ids)) for part in parts if part.key is not None)
        mentions, position = [], 0
        for segment in prompt.segments:
            if segment.tag is not None:
                mentions.append((segment.tag, position))
            position += len(segment.ids)
        # The connector finds a fact in the prefix cache by its mention, so forgetting needs all of them.
        if self.connected and len(mentions) > MAX_ITEMS:
            raise PromptError(
                f"the prompt holds {len(mentions)} memories, but {MAX_ITEMS} is the limit: recall less"
            )
        if not self.connected or not (composition or mentions):
            return 0, None, self._salt(prompt.owner, prompt.salt)
        # A prompt served as text also mentions its facts: forgetting has to find them in the prefix cache.
        nonce = prompt.salt if composition else f"text:{prompt.salt}"
        ask = Inject(prompt.owner, composition, nonce, tuple(mentions), receipt if composition else "")
        salt = protocol.compose_salt(self._secret, self.fingerprint, prompt.owner, composition, nonce=nonce)
        asked = sum(tokens for _, tokens in composition)
        return asked, protocol.params(ask, self._secret), salt

    def _check(self, ids: Sequence[int], options: SamplingOptions, vocabulary: int | None = None) -> None:
        """Raises PromptError or ConfigurationError if the request cannot be served. `vocabulary`: number of token ids,
        if known."""
        if not ids:
            raise PromptError("the prompt is empty: pass at least one token")
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ContextOverflowError(
                f"the prompt has {len(ids)} tokens, the model takes {self.max_model_len} with the answer; "
                "recall less or raise max_model_len"
            )
        if not all(token >= 0 and (vocabulary is None or token < vocabulary) for token in ids):
            raise PromptError(OUTSIDE_VOCABULARY)
        most, wanted = self.most_logprobs, options.logprobs
        if wanted is not None and most is not None and most >= 0 and not 0 <= wanted <= most:
            raise ConfigurationError(
                f"logprobs={wanted} is more than this engine's {most}: ask for fewer, or start it with a larger "
                "max_logprobs"
            )

    def _answer_tokens(self, ids: Sequence[int], options: SamplingOptions) -> int:
        """The most tokens of the answer to a prompt that has passed `_check`."""
        return min(options.max_tokens, self.max_model_len - len(ids))

    def _salt(self, owner: str, nonce: str = "") -> str:
        return protocol.text_salt(self._secret, self.fingerprint, owner, nonce=nonce)


OUTSIDE_VOCABULARY = "the prompt holds token ids outside the model's vocabulary: use its own tokenizer"


def engine_seed(options: SamplingOptions) -> int | None:
    """The seed for vLLM, which reads -1 as no seed."""
    return None if options.seed is None else options.seed % 2**63


def completion(
    *,
    text: str,
    token_ids: Sequence[int],
    finish_reason: str | None,
    prompt_tokens: int,
    asked: int,
    known: int,
    reply: Mapping[str, Any],
    ttft_s: float,
    logprobs: Sequence[Mapping[int, float]] | None,
) -> Completion:
    """An answer and what it cost.

    Args:
        asked: number of tokens that the request wanted to inject.
        known: prompt tokens that vLLM counts as not computed: injected tokens and hits in its prefix cache. vLLM also
            counts tokens whose load failed, although it computed those afterwards.
        reply: the connector's reply; empty if the request had no parameters for it.
    """
    injected = int(reply.get("injected", 0))
    known = max(0, known - int(reply.get("lost", 0)))
    return Completion(
        text=text,
        token_ids=tuple(token_ids),
        finish_reason=finish_reason or "stop",
        prompt_tokens=prompt_tokens,
        injected_tokens=injected,
        cached_tokens=max(0, known - injected),
        prefilled_tokens=prompt_tokens - max(known, injected),
        ttft_s=ttft_s,
        compose_s=float(reply.get("compose_s", 0.0)),
        refused=_refusal(reply, asked, injected, known),
        logprobs=None if logprobs is None else tuple(logprobs),
        promoted_tokens=int(reply.get("promoted", 0)),
    )


def _refusal(reply: Mapping[str, Any], asked: int, injected: int, known: int) -> str | None:
    """Why fewer tokens were injected than requested; None if none are missing. Prefix-cache hits need no injection."""
    if asked <= max(injected, known) or asked - max(injected, known) == 1:
        return None
    reason = reply.get("refused") or reply.get("error")
    if reason is None and reply.get("missing"):
        reason = f"{len(reply['missing'])} blobs are not at hand"
    return str(reason) if reason else "not all blobs fit the device tier at once"


def _batches(items: Sequence[str], size: int = MAX_ITEMS) -> list[tuple[str, ...]]:
    """Split `items` into parts that fit one request."""
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]
