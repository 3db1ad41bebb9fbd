"""A model behind a vLLM server: builds requests for `/v1/completions` and reads the answers.

A streamed answer has no room for the connector's reply. Its request therefore carries a receipt, and after the stream
one more request of one token fetches the outcome for that receipt. The counts are always the connector's own.
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
from inferscale_memory.engine.connector_client import CHECK_TOKENS, ConnectorClient, completion, engine_seed
from inferscale_memory.engine.http import Transport
from inferscale_memory.errors import ConfigurationError, EngineError
from inferscale_memory.prompt.segments import Prompt

T = TypeVar("T")
COMPLETIONS = "/v1/completions"
GREETING = "The quick brown fox jumps over the lazy dog, 0123456789 times. "
"""Text whose token ids make up the request on which the connector proves itself."""
PLAIN = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling options that a server would otherwise read from generation_config.json. All engines sample alike."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server reports about itself in the handshake.

    Attributes:
        model: name of the model in requests.
        root: where the server loaded it from: a folder, or an id at the hub.
        connected: whether the server runs our connector.
        fingerprint, unsupported, max_model_len: see `ConnectorClient`.
        greeting: token ids of the request on which the connector proves itself, now and after a restart.
    """

    model: str
    root: str
    connected: bool
    fingerprint: str
    unsupported: str | None
    max_model_len: int
    greeting: tuple[int, ...]


async def handshake(transport: Transport, url: str, model: str | None, secret: bytes) -> ServerInfo:
    """Ask a server which model it serves, and let its connector prove itself.

    Args:
        model: name of the model to use; None for the one it serves.

    Raises:
        ConfigurationError: the server has no such model.
        EngineError: no server answers, it is not vLLM, or its secret is another one.
    """
    try:
        cards = {str(card["id"]): card for card in (await transport.get("/v1/models"))["data"]}
        own = next(name for name, card in cards.items() if not card.get("parent"))
        length = int(cards[own]["max_model_len"])
    except (KeyError, TypeError, StopIteration):
        raise EngineError(f"what answers at {url} is not a vLLM server: correct base_url") from None
    name = own if model is None else model
    if name not in cards:
        raise ConfigurationError(f"{url} has no model {name!r}: pass one of {', '.join(map(repr, cards))}")
    info = ServerInfo(name, str(cards[name].get("root") or name), False, "", None, length, (0,))
    remote = RemoteModel(secret, transport, url, info)
    ids = tuple((await remote.tokenize(GREETING * CHECK_TOKENS))[:CHECK_TOKENS])
    reply = await remote._identify(ids)
    if "fingerprint" in reply:
        # The connector salts blobs of an adapter with the adapter's identity, which a client cannot know.
        adapter = "its LoRA adapters are served as text" if cards[name].get("parent") else None
        return ServerInfo(
            name, info.root, True, reply["fingerprint"], reply["unsupported"] or adapter, length, ids
        )
    if reply:
        raise EngineError(_wrong_secret(url, reply))
    # Without a connector no fingerprint is reported; this one still identifies the model.
    named = blake2b("\0".join((url, name, info.root)).encode(), digest_size=16).hexdigest()
    reason = f"the server at {url} does not run our connector: start it with `inferscale serve`"
    return ServerInfo(name, info.root, False, named, reason, length, ids)


class RemoteModel(ConnectorClient):
    """The model of a server, reached over one transport."""

    def __init__(self, secret: bytes, transport: Transport, url: str, info: ServerInfo) -> None:
        super().__init__(secret)
        self._transport = transport
        self._url = url
        self.info = info
        self.fingerprint = info.fingerprint
        self.unsupported = info.unsupported
        self.connected = info.connected
        self.max_model_len = info.max_model_len
        self.some_token = info.greeting[0]

    async def tokenize(self, text: str) -> list[int]:
        """The token ids that the server gives `text`. Special tokens in it are recognized, none are added."""
        body = {"model": self.info.model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in (await self._transport.post("/tokenize", body))["tokens"]]

    async def check_identity(self) -> None:
        """Check after a refusal that the server is still that of the handshake. Raises EngineError if it is not."""
        if not self.info.connected:
            return
        # A connector that was restarted has to prove itself again.
        reply = await self._identify(self.info.greeting)
        if reply and "fingerprint" not in reply:
            raise EngineError(_wrong_secret(self._url, reply))
        if reply.get("fingerprint") != self.fingerprint:
            raise EngineError(
                f"the server at {self._url} was restarted, with another model or without our connector: make a new "
                "engine"
            )

    async def generate(self, prompt: Prompt, options: SamplingOptions) -> Completion:
        began = time.perf_counter()
        asked, body = self._body(prompt, options)
        answer = await self._transport.post(COMPLETIONS, body)
        took = time.perf_counter() - began
        choice = answer["choices"][0]
        # The time after the first token, by the server's clock.
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
        """The chunks as they arrive. The last one has no text and carries the completion."""
        began = time.perf_counter()
        receipt = token_hex(16)
        asked, body = self._body(prompt, options, receipt=receipt)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text, finish_reason, first = "", None, None
        tokens: list[int] = []
        logprobs: list[Mapping[int, float]] = []
        usage: Mapping[str, Any] = {}
        async with aclosing(self._transport.events(COMPLETIONS, body)) as events:
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
        return await self._transport.all(calls)

    async def _control(
        self, ask: protocol.Ask, ids: Sequence[int], salt: str, *, tokens: int = 1
    ) -> dict[str, Any]:
        body = {
            "model": self.info.model,
            "prompt": list(ids),
            "cache_salt": salt,
            "kv_transfer_params": protocol.params(ask, self._secret),
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        return _reply(await self._transport.post(COMPLETIONS, body))

    async def _outcome(self, owner: str, receipt: str) -> dict[str, Any]:
        """The connector's reply to a streamed request. The answer is already complete, so a failure here is reported
        in the reply instead of raised."""
        try:
            reply = await self._control(Outcome(owner, receipt), [self.some_token], self._salt(owner))
        except EngineError:
            reply = {}
        unknown = {"refused": reply.get("refused") or "the server cannot say what became of the blobs"}
        return reply.get("outcome") or unknown

    def _body(
        self, prompt: Prompt, options: SamplingOptions, *, receipt: str = ""
    ) -> tuple[int, dict[str, Any]]:
        """(number of tokens to inject, the request)."""
        ids = prompt.ids
        self._check(ids, options)
        asked, transfer, salt = self._transfer(prompt, receipt=receipt)
        body: dict[str, Any] = {
            "model": self.info.model,
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
        """`reason`, unless it means that the server broke the answer off: that raises EngineError."""
        if reason in (None, "stop", "length"):
            return reason
        raise EngineError(f"the server at {self._url} ended an answer early ({reason}); its log may say why")


def _wrong_secret(url: str, reply: Mapping[str, Any]) -> str:
    return (
        f"the connector at {url} does not trust this client ({reply.get('error', 'no reply')}): both need the same "
        "INFERSCALE_SECRET, or, on one machine, the same INFERSCALE_HOME"
    )


def _reply(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The connector's part of an answer; empty if it has none."""
    return dict((answer.get("kv_transfer_params") or {}).get(protocol.NAME) or {})


def _cached(usage: Mapping[str, Any]) -> int:
    """Prompt tokens that vLLM did not compute; 0 if the server runs without --enable-prompt-tokens-details."""
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _logprobs(choice: Mapping[str, Any]) -> list[Mapping[int, float]]:
    """For each token, {token id: log-probability}. The server names a token "token_id:17"."""
    found = (choice.get("logprobs") or {}).get("top_logprobs") or ()
    return [{int(name.rpartition(":")[2]): value for name, value in (step or {}).items()} for step in found]
