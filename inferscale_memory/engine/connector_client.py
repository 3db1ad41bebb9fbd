"""What an engine asks of the connector, and what it makes of the answers, whatever carries them.

In process and over HTTP a request is the same: token ids, a cache salt, and parameters that say what is asked. Here
stands how each of them is made and read; an engine adds only how it is sent. It must never claim more than the
connector's answer and vLLM's own counts say.
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
"""Length of the request at start-up on which the connector proves itself: one token over half of it, then others."""
START_UP = "start-up"
"""Owner of that request."""


class Asking(ABC):
    """A served model, as far as it is asked by requests with parameters of ours.

    Attributes:
        fingerprint: of the model, as the connector names it; empty until it was asked.
        unsupported: why blobs cannot be used; None when they can.
        connected: whether a connector of ours is there, which knows what the prefix cache holds of a fact.
        max_model_len: most tokens of prompt and answer together.
        most_logprobs: most log-probabilities a token may be asked for; -1 for all, None where that is not known.
        some_token: any token id of the model: what a request consists of that only asks.
    """

    fingerprint: str = ""
    unsupported: str | None = None
    connected: bool = True
    max_model_len: int
    most_logprobs: int | None = None
    some_token: int

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    # -- what an engine adds ------------------------------------------------------------------------------------

    @abstractmethod
    async def _control(
        self, ask: protocol.Ask, ids: Sequence[int], salt: str, *, tokens: int = 1
    ) -> dict[str, Any]:
        """The connector's answer to a request that generates exactly `tokens`; empty when there was none."""

    @abstractmethod
    async def _all(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        """The results of all `calls`, made at the same time, in order."""

    # -- encoding, asking, forgetting ---------------------------------------------------------------------------

    async def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        """A result for each. Raises what the first raised if all of them failed to be asked: one that was not answered
        takes none of the others' blobs with it, which somebody must be told of."""
        results = await self._all([partial(self._tried, request) for request in requests])
        failed = [result for result in results if isinstance(result, Exception)]
        if failed and len(failed) == len(results):
            raise failed[0]
        return [
            EncodeResult((), first_line(result), answered=False) if isinstance(result, Exception) else result
            for result in results
        ]

    async def _tried(self, request: EncodeRequest) -> EncodeResult | Exception:
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
                    (), f"{count} {what} in one encode, {most} are possible: keep less in one"
                )
        spans = tuple((span.start, span.stop) for span in request.spans)
        base = tuple((ref.key, ref.tokens) for ref in request.base)
        nonce = uuid4().hex if base else ""
        ask = Encode(request.owner, spans, request.mentions, base, nonce)
        salt = protocol.encode_salt(self._secret, self.fingerprint, request.owner, base, nonce=nonce)
        # Two tokens: the reply must follow the workers' confirmation of the step that computed the last kept token.
        reply = await self._control(ask, request.ids, salt, tokens=2)
        refs = tuple(BlobRef(key, tokens) for key, tokens in reply.get("blobs", ()))
        error = reply.get("error") or (None if refs else "the engine gave no answer to an encode")
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
        """The answer to what must not go unheard: to forget in vain and not to say so would be a lie.

        Raises:
            EngineError: there is no `needed` in it.
        """
        reply = await self._control(ask, [self.some_token], self._salt(ask.owner))
        if needed not in reply:
            raise EngineError(
                f"the connector did not do what it was asked ({reply.get('error', 'no reply')}); "
                "is INFERSCALE_SECRET the same for the engine and its client?"
            )
        return reply

    async def _introduce(self, ids: Sequence[int]) -> dict[str, Any]:
        """What the connector says of itself. It proves itself on a prompt such as this request has.

        Args:
            ids: various tokens of the model; half of CHECK_TOKENS are used.
        """
        prompt = [ids[0]] * (CHECK_TOKENS // 2) + [*ids[: CHECK_TOKENS // 2]]
        # A salt of its own: what is in the prefix cache is not computed, and would prove nothing.
        return await self._control(Probe(START_UP), prompt, self._salt(START_UP, uuid4().hex), tokens=2)

    # -- prompts ------------------------------------------------------------------------------------------------

    def _transfer(self, prompt: Prompt, *, receipt: str = "") -> tuple[int, dict[str, Any] | None, str]:
        """(tokens asked to be injected, the request's parameters, its cache salt)."""
        parts = () if self.unsupported else prompt.composition[:MAX_ITEMS]
        composition = tuple((part.key, len(part.ids)) for part in parts if part.key is not None)
        mentions, position = [], 0
        for segment in prompt.segments:
            if segment.tag is not None:
                mentions.append((segment.tag, position))
            position += len(segment.ids)
        if (
            self.connected and len(mentions) > MAX_ITEMS
        ):  # they could not all be found when they are forgotten
            raise PromptError(
                f"the prompt holds {len(mentions)} memories, {MAX_ITEMS} are possible: recall less"
            )
        if not self.connected or not (composition or mentions):
            return 0, None, self._salt(prompt.owner, prompt.salt)
        # A prompt served as text names its facts too: they must be found in the prefix cache when forgotten.
        nonce = prompt.salt if composition else f"text:{prompt.salt}"
        ask = Inject(prompt.owner, composition, nonce, tuple(mentions), receipt if composition else "")
        salt = protocol.compose_salt(self._secret, self.fingerprint, prompt.owner, composition, nonce=nonce)
        asked = sum(tokens for _, tokens in composition)
        return asked, protocol.params(ask, self._secret), salt

    def _check(self, ids: Sequence[int], options: SamplingOptions, vocabulary: int | None = None) -> None:
        """Raises PromptError and ConfigurationError on what cannot be served. `vocabulary`: number of token ids, if it
        is known."""
        if not ids:
            raise PromptError("the prompt is empty; give at least one token")
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
        """Most tokens of the answer to a prompt that was checked."""
        return min(options.max_tokens, self.max_model_len - len(ids))

    def _salt(self, owner: str, nonce: str = "") -> str:
        return protocol.text_salt(self._secret, self.fingerprint, owner, nonce=nonce)


OUTSIDE_VOCABULARY = "the prompt holds token ids outside the model's vocabulary; is it its tokenizer?"


def engine_seed(options: SamplingOptions) -> int | None:
    """The seed as vLLM takes it: -1 would be no seed."""
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
        asked: tokens that were asked to be injected.
        known: tokens of the prompt that vLLM did not compute: injected ones and hits in its prefix cache. It counts
            those whose load failed too, which it has computed after all.
        reply: the connector's answer; empty when nothing was asked of it.
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
    """Why less was injected than asked, if it was; what the prefix cache already held needs no injection."""
    if asked <= max(injected, known) or asked - max(injected, known) == 1:
        return None
    reason = reply.get("refused") or reply.get("error")
    if reason is None and reply.get("missing"):
        reason = f"{len(reply['missing'])} blobs are not at hand"
    return str(reason) if reason else "not all blobs fit the device tier at once"


def _batches(items: Sequence[str], size: int = MAX_ITEMS) -> list[tuple[str, ...]]:
    """`items` in parts that one request takes."""
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]
