"""A model behind a vLLM server, over one wire: requests as `/v1/completions` takes them, answers as it gives them.

A streamed answer has no place for what the connector says. So its request carries a receipt, and when the stream has
ended, one more request of one token asks what became of it: counts are the connector's own, never guessed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_hex
from typing import Any, TypeVar

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import Outcome
from inferscale_memory.engine.base import Chunk, Completion, SamplingOptions
from inferscale_memory.engine.connector_client import CHECK_TOKENS, Asking, completion, engine_seed
from inferscale_memory.engine.http import Wire
from inferscale_memory.errors import ConfigurationError, EngineError
from inferscale_memory.prompt.segments import Prompt

T = TypeVar("T")
COMPLETIONS = "/v1/completions"
GREETING = "The quick brown fox jumps over the lazy dog, 0123456789 times. "
"""Its token ids are those of the request on which the connector proves itself."""
PLAIN = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What the server would otherwise take from the model's generation_config.json: all engines draw alike."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a server says of itself.

    Attributes:
        model: name to ask for.
        root: where the server has it from: a folder, or a name at a hub.
        connected: whether our connector is there.
        fingerprint, unsupported, max_model_len: as `Asking` has them.
        greeting: token ids with which the server is met, and met again when it was started anew.
    """

    model: str
    root: str
    connected: bool
    fingerprint: str
    unsupported: str | None
    max_model_len: int
    greeting: tuple[int, ...]


async def meet(wire: Wire, url: str, model: str | None, secret: bytes) -> Told:
    """Ask a server who it is.

    Args:
        model: name of the model to ask for; None for the one it serves.

    Raises:
        ConfigurationError: it has no such model.
        EngineError: no server, no vLLM server, or one of another secret.
    """
    try:
        cards = {str(card["id"]): card for card in (await wire.get("/v1/models"))["data"]}
        own = next(name for name, card in cards.items() if not card.get("parent"))
        length = int(cards[own]["max_model_len"])
    except (KeyError, TypeError, StopIteration):
        raise EngineError(f"what answers at {url} is no vLLM server: correct base_url") from None
    name = own if model is None else model
    if name not in cards:
        raise ConfigurationError(f"{url} has no model {name!r}: pass one of {', '.join(map(repr, cards))}")
    told = Told(name, str(cards[name].get("root") or name), False, "", None, length, (0,))
    served = Served(secret, wire, url, told)
    ids = tuple((await served.tokenize(GREETING * CHECK_TOKENS))[:CHECK_TOKENS])
    reply = await served._introduce(ids)
    if "fingerprint" in reply:
        # Blobs of an adapter have salts that a client cannot know.
        adapter = "its LoRA adapters are served as text" if cards[name].get("parent") else None
        return Told(name, told.root, True, reply["fingerprint"], reply["unsupported"] or adapter, length, ids)
    if reply:
        raise EngineError(_wrong_secret(url, reply))
    # Not a connector's, but it names what is served all the same.
    named = blake2b("\0".join((url, name, told.root)).encode(), digest_size=16).hexdigest()
    reason = f"the server at {url} does not run our connector: start it with `inferscale serve`"
    return Told(name, told.root, False, named, reason, length, ids)


class Served(Asking):
    """The server as one face reaches it."""

    def __init__(self, secret: bytes, wire: Wire, url: str, told: Told) -> None:
        super().__init__(secret)
        self._wire = wire
        self._url = url
        self.told = told
        self.fingerprint = told.fingerprint
        self.unsupported = told.unsupported
        self.connected = told.connected
        self.max_model_len = told.max_model_len
        self.some_token = told.greeting[0]

    async def tokenize(self, text: str) -> list[int]:
        """The server's own token ids of `text`; special tokens are not added, and read where they stand."""
        body = {"model": self.told.model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in (await self._wire.post("/tokenize", body))["tokens"]]

    async def recognize(self) -> None:
        """Something was refused: is it still the server that was met? Raises EngineError if not."""
        if not self.told.connected:
            return
        # A connector that was started anew has to prove itself again.
        reply = await self._introduce(self.told.greeting)
        if reply and "fingerprint" not in reply:
            raise EngineError(_wrong_secret(self._url, reply))
        if reply.get("fingerprint") != self.fingerprint:
            raise EngineError(
                f"the server at {self._url} was started anew, with another model or without our connector: make a new "
                "engine"
            )

    async def generate(self, prompt: Prompt, options: SamplingOptions) -> Completion:
        began = time.perf_counter()
        asked, body = self._body(prompt, options)
        answer = await self._wire.post(COMPLETIONS, body)
        took = time.perf_counter() - began
        choice = answer["choices"][0]
        # What came after the first token, by the server's own clock.
        decoding = (answer.get("metrics") or {}).get("generation_time_ms") or 0.0
        return completion(
            text=choice["text"],
            token_ids=choice["token_ids"],
            finish_reason=self._finished(choice["finish_reason"]),
            prompt_tokens=len(body["prompt"]),
            asked=asked,
            known=_cached(answer["usage"]),
            reply=_reply(answer),
            ttft_s=max(0.0, took - decoding / 1000),
            logprobs=None if options.logprobs is None else _logprobs(choice),
        )

    async def stream(self, prompt: Prompt, options: SamplingOptions) -> AsyncGenerator[Chunk, None]:
        """Pieces as they come; the last one has no text, and the completion."""
        began = time.perf_counter()
        receipt = token_hex(16)
        asked, body = self._body(prompt, options, receipt=receipt)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text, finish_reason, first = "", None, None
        tokens: list[int] = []
        logprobs: list[Mapping[int, float]] = []
        usage: Mapping[str, Any] = {}
        async with aclosing(self._wire.events(COMPLETIONS, body)) as events:
            async for event in events:
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    piece = tuple(choice.get("token_ids") or ())
                    if first is None and piece:
                        first = time.perf_counter() - began
                    text += choice["text"]
                    tokens += piece
                    logprobs += _logprobs(choice)
                    finish_reason = self._finished(choice.get("finish_reason")) or finish_reason
                    yield Chunk(choice["text"], piece)
        done = completion(
            text=text,
            token_ids=tokens,
            finish_reason=finish_reason,
            prompt_tokens=len(body["prompt"]),
            asked=asked,
            known=_cached(usage),
            reply=await self._outcome(prompt.owner, receipt) if asked else {},
            ttft_s=first if first is not None else time.perf_counter() - began,
            logprobs=None if options.logprobs is None else logprobs,
        )
        yield Chunk("", (), done)

    # -- inside -------------------------------------------------------------------------------------------------

    async def _all(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        return await self._wire.all(calls)

    async def _control(
        self, ask: protocol.Ask, ids: Sequence[int], salt: str, *, tokens: int = 1
    ) -> dict[str, Any]:
        body = {
            "model": self.told.model,
            "prompt": list(ids),
            "cache_salt": salt,
            "kv_transfer_params": protocol.params(ask, self._secret),
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        return _reply(await self._wire.post(COMPLETIONS, body))

    async def _outcome(self, owner: str, receipt: str) -> dict[str, Any]:
        """What the connector says became of a streamed request. The answer itself is complete: that it cannot be
        said is no reason to lose it."""
        try:
            reply = await self._control(Outcome(owner, receipt), [self.some_token], self._salt(owner))
        except EngineError:
            reply = {}
        unknown = {"refused": reply.get("refused") or "the server cannot say what became of the blobs"}
        return reply.get("outcome") or unknown

    def _body(
        self, prompt: Prompt, options: SamplingOptions, *, receipt: str = ""
    ) -> tuple[int, dict[str, Any]]:
        """(tokens asked to be injected, the request)."""
        ids = prompt.ids
        self._check(ids, options)
        asked, transfer, salt = self._transfer(prompt, receipt=receipt)
        body: dict[str, Any] = {
            "model": self.told.model,
            "prompt": ids,
            "cache_salt": salt,
            "max_tokens": self._answer_tokens(ids, options),
            "temperature": options.temperature,
            "top_p": options.top_p,
            "ignore_eos": options.ignore_eos,
            "skip_special_tokens": not options.special_tokens,
            "return_token_ids": True,
            **PLAIN,
        }
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        if options.stop:
            body["stop"] = list(options.stop)
        if options.seed is not None:
            body["seed"] = engine_seed(options)
        if options.logprobs is not None:
            body |= {"logprobs": options.logprobs, "return_tokens_as_token_ids": True}
        if options.schema is not None:
            body["structured_outputs"] = {"json": options.schema}
        return asked, body

    def _finished(self, reason: str | None) -> str | None:
        """Raises EngineError where an answer ended for neither of the two good reasons."""
        if reason in (None, "stop", "length"):
            return reason
        raise EngineError(f"the server at {self._url} ended an answer early ({reason}); its log may say why")


def _wrong_secret(url: str, reply: Mapping[str, Any]) -> str:
    return (
        f"the connector at {url} does not believe this client ({reply.get('error', 'no reply')}): both need the same "
        "INFERSCALE_SECRET, or, on one machine, the same INFERSCALE_HOME"
    )


def _reply(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The connector's part of an answer; empty when there is none."""
    return dict((answer.get("kv_transfer_params") or {}).get(protocol.NAME) or {})


def _cached(usage: Mapping[str, Any]) -> int:
    """Prompt tokens that were not computed; 0 from a server without --enable-prompt-tokens-details."""
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _logprobs(choice: Mapping[str, Any]) -> list[Mapping[int, float]]:
    """Per token, {token id: log-probability}: tokens are named as "token_id:17"."""
    found = (choice.get("logprobs") or {}).get("top_logprobs") or ()
    return [{int(name.rpartition(":")[2]): value for name, value in (step or {}).items()} for step in found]
