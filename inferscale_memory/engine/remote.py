"""The engine of an app that holds no weights: it talks to `vllm serve` with our connector, over HTTP.

`inferscale serve` starts such a server. The sync methods block on one HTTP client, the async methods await one client
per event loop, and both share one implementation. After each refusal the engine checks that the server still runs the
model of the handshake.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from secrets import token_bytes
from typing import Any, Self

from inferscale_memory.connector import secret
from inferscale_memory.coroutines import run
from inferscale_memory.engine.base import (
    DEFAULT_OPTIONS,
    Chunk,
    Completion,
    EncodeRequest,
    EncodeResult,
    SamplingOptions,
)
from inferscale_memory.engine.environment import home_folder
from inferscale_memory.engine.http import Address, AsyncTransport, SyncTransport, Transport
from inferscale_memory.engine.remote_model import RemoteModel, ServerInfo, handshake
from inferscale_memory.engine.tool_parsers import call_reader, check_tool_parser
from inferscale_memory.errors import ClosedError, ConfigurationError
from inferscale_memory.lifetime import close_at_exit, leave_behind, renew_after_fork
from inferscale_memory.model_files.folder import is_hub_id, model_folder
from inferscale_memory.prompt.calls import CallReader
from inferscale_memory.prompt.segments import Prompt
from inferscale_memory.sharing import Shared

SAMPLE = "On 12 May 2024, at 09:30, naïve Zoë paid 1,234.50 € for 3 çays.\n\tdef f(x): return {x: 'ω'}  # 日本語 🙂"


class RemoteEngine(Shared):
    """An `Engine` that uses a vLLM server.

    Args:
        base_url: address of the server, such as "http://127.0.0.1:8000".
        tokenizer: folder of the model's tokenizer, or the model's id at the hub. It may be left out if this machine
            has the server's model.
        model: name of the model at the server; by default the one it serves.
        api_key: the --api-key that the server was started with, if any.
        home: folder of the secret if INFERSCALE_SECRET is not set (default: INFERSCALE_HOME, ~/.inferscale). The
            server has to use the same secret.
        timeout: seconds the server may be silent before a request fails. The server is silent until an answer that
            is not streamed is complete.
        tool_parser: vLLM's tool parser for this model's tool calls, if they are not JSON. This option alone needs an
            installed vLLM on the client's side.

    Nothing is sent before the first use.

    Raises:
        ConfigurationError: the address is not valid, or the folder or tool parser does not exist. From the first use
            on: the server refuses the API key or the model, or the tokenizer is not its model's.
        EngineError: from the first use on: no server answers, its secret is another one, or it fails.
    """

    def __init__(
        self,
        base_url: str,
        *,
        tokenizer: str | Path | None = None,
        model: str | None = None,
        api_key: str | None = None,
        home: str | Path | None = None,
        timeout: float = 600.0,
        tool_parser: str | None = None,
    ) -> None:
        self._address = Address.read(base_url, api_key, timeout)
        self._folder = None if tokenizer is None else _tokenizer_folder(tokenizer)
        if tool_parser is not None:
            check_tool_parser(tool_parser)
        self._tool_parser = tool_parser
        self._model = model
        self._home = home_folder(home)
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: Any = None
        self._server: tuple[bytes, ServerInfo] | None = None  # the secret of the handshake and its result
        self._sync: SyncTransport | None = None
        self._by_loop: dict[asyncio.AbstractEventLoop, AsyncTransport] = {}
        self._closed = False
        close_at_exit(self, engine=True)
        renew_after_fork(self)

    # -- the model ----------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        return self._remote_model().fingerprint

    @property
    def unsupported(self) -> str | None:
        return self._remote_model().unsupported

    @property
    def max_model_len(self) -> int:
        return self._remote_model().max_model_len

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from a folder on this machine. It is compared with the server's when it is loaded."""
        self._still_open()
        with self._loading:
            if self._tokenizer is None:
                model = self._remote_model()
                folder = self._folder or _root(model.info, self._address.url)
                tokenizer = _load(folder, model.info, self._address.url)
                text = SAMPLE + "".join(tokenizer.all_special_tokens)
                theirs = run(model.tokenize(text))
                if theirs != tokenizer(text, add_special_tokens=False)["input_ids"]:
                    raise ConfigurationError(
                        f"the tokenizer in {folder} is not that of {model.info.model}, which {self._address.url} "
                        "serves: pass as tokenizer the folder of the model that is served"
                    )
                self._tokenizer = tokenizer
            return self._tokenizer

    @property
    def call_reader(self) -> CallReader | None:
        """Splits this model's answers into text and tool calls; None if its tool calls are JSON."""
        return None if self._tool_parser is None else call_reader(self._tool_parser, self.tokenizer)

    def start(self) -> Self:
        """Do the handshake with the server now instead of at the first use; returns itself."""
        self._remote_model()
        return self

    def close(self) -> None:
        """Close all connections. Requests under way end at the server and raise ClosedError here. A closed engine
        cannot be started again."""
        with self._lock:
            self._closed = True
            blocking, self._sync = self._sync, None
            by_loop, self._by_loop = self._by_loop, {}
        if blocking is not None:
            blocking.close()
        for loop, transport in by_loop.items():
            if loop.is_running():
                ended = asyncio.run_coroutine_threadsafe(transport.aclose(), loop)
                if _running_loop() is not loop:
                    ended.result(timeout=10)

    def _renew(self) -> None:
        """Runs in a forked child: the connections belong to the parent, and the child opens its own."""
        self._lock, self._loading = threading.Lock(), threading.Lock()
        leave_behind(self._sync, *self._by_loop.values())
        self._sync, self._by_loop = None, {}

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- sync methods -------------------------------------------------------------------------------------------

    def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        return run(self._encode(self._sync_transport(), requests))

    def generate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        return run(self._generate(self._sync_transport(), prompt, options))

    def stream(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Iterator[Chunk]:
        chunks = self._stream(self._sync_transport(), prompt, options)
        try:
            while (chunk := run(_next(chunks))) is not None:
                yield chunk
        finally:
            run(_end(chunks))

    def at_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        return run(self._at_hand(self._sync_transport(), owner, keys))

    def forget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        return run(self._forget(self._sync_transport(), owner, keys, tags))

    # -- async methods ------------------------------------------------------------------------------------------

    async def aencode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        return await self._encode(self._async_transport(), requests)

    async def agenerate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        return await self._generate(self._async_transport(), prompt, options)

    async def astream(
        self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS
    ) -> AsyncIterator[Chunk]:
        async with aclosing(self._stream(self._async_transport(), prompt, options)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aat_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        return await self._at_hand(self._async_transport(), owner, keys)

    async def aforget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        return await self._forget(self._async_transport(), owner, keys, tags)

    # -- shared by both -----------------------------------------------------------------------------------------

    async def _encode(self, transport: Transport, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        with self._while_open():
            model = await self._model_over(transport)
            results = await model.encode(requests)
            if results and all(result.error is not None for result in results):
                await model.check_identity()
            return results

    async def _generate(self, transport: Transport, prompt: Prompt, options: SamplingOptions) -> Completion:
        with self._while_open():
            model = await self._model_over(transport)
            completion = await model.generate(prompt, options)
            if completion.refused is not None:
                await model.check_identity()
            return completion

    async def _stream(
        self, transport: Transport, prompt: Prompt, options: SamplingOptions
    ) -> AsyncGenerator[Chunk, None]:
        with self._while_open():
            model = await self._model_over(transport)
            async with aclosing(model.stream(prompt, options)) as chunks:
                async for chunk in chunks:
                    if chunk.completion is not None and chunk.completion.refused is not None:
                        await model.check_identity()
                    yield chunk

    async def _at_hand(self, transport: Transport, owner: str, keys: Sequence[str]) -> set[str]:
        with self._while_open():
            model = await self._model_over(transport)
            return await model.at_hand(owner, keys) if model.info.connected else set()

    async def _forget(
        self, transport: Transport, owner: str, keys: Sequence[str], tags: Sequence[str]
    ) -> int:
        with self._while_open():
            model = await self._model_over(transport)
            return await model.forget(owner, keys, tags) if model.info.connected else 0

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Raise ClosedError instead of the error of a request that failed because the engine was closed."""
        try:
            yield
        except Exception as error:
            if not self._closed:
                raise
            raise ClosedError(_CLOSED) from error

    # -- the handshake ------------------------------------------------------------------------------------------

    def _remote_model(self) -> RemoteModel:
        return run(self._model_over(self._sync_transport()))

    async def _model_over(self, transport: Transport) -> RemoteModel:
        """The model over `transport`. Concurrent first calls may each do the handshake, which is harmless."""
        url = self._address.url
        if self._server is None:
            # Without a secret no connector trusts us; the salts of text must be impossible to guess all the same.
            key = secret.known(self._home) or token_bytes(32)
            self._server = key, await handshake(transport, url, self._model, key)
        key, info = self._server
        return RemoteModel(key, transport, url, info)

    def _sync_transport(self) -> SyncTransport:
        with self._lock:
            self._still_open()
            if self._sync is None:
                self._sync = SyncTransport(self._address)
            return self._sync

    def _async_transport(self) -> AsyncTransport:
        loop = asyncio.get_running_loop()
        with self._lock:
            self._still_open()
            if loop not in self._by_loop:
                # A client refers to its loop, so clients of closed loops would otherwise never be freed.
                self._by_loop = {
                    old: transport for old, transport in self._by_loop.items() if not old.is_closed()
                }
                self._by_loop[loop] = AsyncTransport(self._address)
            return self._by_loop[loop]

    def _still_open(self) -> None:
        if self._closed:
            raise ClosedError(_CLOSED)


_CLOSED = "the engine was closed: make a new RemoteEngine"


def _tokenizer_folder(tokenizer: str | Path) -> Path:
    folder = Path(tokenizer).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(tokenizer):
        raise ConfigurationError(
            f"no tokenizer folder at {folder}: pass the folder of the model that is served, or its id at the hub"
        )
    return model_folder(tokenizer, weights=False)


def _root(info: ServerInfo, url: str) -> Path:
    """The folder of the server's model on this machine."""
    try:
        return _tokenizer_folder(info.root)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{url} serves {info.model}, but this machine has no folder of that model: {_REMEDY}"
        ) from error


_REMEDY = "pass as tokenizer a folder with the tokenizer of the model that is served"


def _load(folder: Path, info: ServerInfo, url: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{folder} does not contain a readable tokenizer ({error}): {_REMEDY}"
        ) from error


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    """The next chunk; None after the last."""
    return await anext(chunks, None)


async def _end(chunks: AsyncGenerator[Chunk, None]) -> None:
    await chunks.aclose()
