"""The engine of an app that holds no weights: a `vllm serve` with our connector, over HTTP.

`inferscale serve` starts such a server. Both faces are native: the sync one blocks on a client of its own, the async
one awaits on one client per event loop, and one body serves them both. A client never trusts that it still speaks
with the model it has met: what is refused makes it look again.
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
from inferscale_memory.engine.http import Address, DirectWire, LoopWire, Wire
from inferscale_memory.engine.remote_model import Served, Told, meet
from inferscale_memory.engine.tool_parsers import call_reader, check_tool_parser
from inferscale_memory.errors import ClosedError, ConfigurationError
from inferscale_memory.lifetime import close_at_exit, leave_behind, renew_after_fork
from inferscale_memory.model_files.folder import is_hub_id, model_folder
from inferscale_memory.prompt.calls import CallReader
from inferscale_memory.prompt.segments import Prompt
from inferscale_memory.sharing import Shared

SAMPLE = "On 12 May 2024, at 09:30, naïve Zoë paid 1,234.50 € for 3 çays.\n\tdef f(x): return {x: 'ω'}  # 日本語 🙂"


class RemoteEngine(Shared):
    """`Engine` over a vLLM server.

    Args:
        base_url: of the server, such as "http://127.0.0.1:8000".
        tokenizer: folder of the model's tokenizer, or the model's id at the hub. It may be left out where this machine
            has the server's model too.
        model: name of the model at the server; the one it serves when left out.
        api_key: what the server was started with as --api-key, if it was.
        home: where the secret is read from when INFERSCALE_SECRET is not set (default: INFERSCALE_HOME,
            ~/.inferscale). It must be the server's.
        timeout: longest silence of the server that is borne, in seconds. An answer that is not streamed is silent
            until it is complete.
        tool_parser: which of vLLM's tool parsers reads this model's tool calls, where they are not JSON. It is the
            only thing for which vLLM must be installed here too.

    Nothing is sent before the first use.

    Raises:
        ConfigurationError: no address, no such folder or tool parser; from the first use on: an API key or a model
            that the server does not take, or a tokenizer that is not its model's.
        EngineError: from the first use on: no server, one of another secret, or one that fails.
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
        self._told: tuple[bytes, Told] | None = None  # the secret it was met with, and what it told
        self._direct: DirectWire | None = None
        self._loops: dict[asyncio.AbstractEventLoop, LoopWire] = {}
        self._closed = False
        close_at_exit(self, engine=True)
        renew_after_fork(self)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        return self._met().fingerprint

    @property
    def unsupported(self) -> str | None:
        return self._met().unsupported

    @property
    def max_model_len(self) -> int:
        return self._met().max_model_len

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from a folder on this machine; compared with the server's once."""
        self._still_open()
        with self._loading:
            if self._tokenizer is None:
                served = self._met()
                folder = self._folder or _root(served.told, self._address.url)
                tokenizer = _load(folder, served.told, self._address.url)
                text = SAMPLE + "".join(tokenizer.all_special_tokens)
                theirs = run(served.tokenize(text))
                if theirs != tokenizer(text, add_special_tokens=False)["input_ids"]:
                    raise ConfigurationError(
                        f"the tokenizer in {folder} is not that of {served.told.model}, which {self._address.url} "
                        "serves: pass as tokenizer the folder of the model that is served"
                    )
                self._tokenizer = tokenizer
            return self._tokenizer

    @property
    def call_reader(self) -> CallReader | None:
        """What takes this model's answers apart into words and tool calls; None where their calls are JSON."""
        return None if self._tool_parser is None else call_reader(self._tool_parser, self.tokenizer)

    def start(self) -> Self:
        """Meet the server now instead of at the first use; returns itself."""
        self._met()
        return self

    def close(self) -> None:
        """Close all connections: what is under way at the server ends, and raises ClosedError here. A closed engine
        does not start again."""
        with self._lock:
            self._closed = True
            direct, self._direct = self._direct, None
            loops, self._loops = self._loops, {}
        if direct is not None:
            direct.close()
        for loop, wire in loops.items():
            if loop.is_running():
                ended = asyncio.run_coroutine_threadsafe(wire.aclose(), loop)
                if _running_loop() is not loop:
                    ended.result(timeout=10)

    def _renew(self) -> None:
        """In a forked child: connections are the parent's, the child makes its own."""
        self._lock, self._loading = threading.Lock(), threading.Lock()
        leave_behind(self._direct, *self._loops.values())
        self._direct, self._loops = None, {}

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the sync face ------------------------------------------------------------------------------------------

    def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        return run(self._encode(self._here(), requests))

    def generate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        return run(self._generate(self._here(), prompt, options))

    def stream(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Iterator[Chunk]:
        chunks = self._stream(self._here(), prompt, options)
        try:
            while (chunk := run(_next(chunks))) is not None:
                yield chunk
        finally:
            run(_end(chunks))

    def at_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        return run(self._at_hand(self._here(), owner, keys))

    def forget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        return run(self._forget(self._here(), owner, keys, tags))

    # -- the async face -----------------------------------------------------------------------------------------

    async def aencode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        return await self._encode(self._on_loop(), requests)

    async def agenerate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        return await self._generate(self._on_loop(), prompt, options)

    async def astream(
        self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS
    ) -> AsyncIterator[Chunk]:
        async with aclosing(self._stream(self._on_loop(), prompt, options)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aat_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        return await self._at_hand(self._on_loop(), owner, keys)

    async def aforget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        return await self._forget(self._on_loop(), owner, keys, tags)

    # -- the body of both ---------------------------------------------------------------------------------------

    async def _encode(self, wire: Wire, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        with self._while_open():
            served = await self._meet(wire)
            results = await served.encode(requests)
            if results and all(result.error is not None for result in results):
                await served.recognize()
            return results

    async def _generate(self, wire: Wire, prompt: Prompt, options: SamplingOptions) -> Completion:
        with self._while_open():
            served = await self._meet(wire)
            completion = await served.generate(prompt, options)
            if completion.refused is not None:
                await served.recognize()
            return completion

    async def _stream(
        self, wire: Wire, prompt: Prompt, options: SamplingOptions
    ) -> AsyncGenerator[Chunk, None]:
        with self._while_open():
            served = await self._meet(wire)
            async with aclosing(served.stream(prompt, options)) as chunks:
                async for chunk in chunks:
                    if chunk.completion is not None and chunk.completion.refused is not None:
                        await served.recognize()
                    yield chunk

    async def _at_hand(self, wire: Wire, owner: str, keys: Sequence[str]) -> set[str]:
        with self._while_open():
            served = await self._meet(wire)
            return await served.at_hand(owner, keys) if served.told.connected else set()

    async def _forget(self, wire: Wire, owner: str, keys: Sequence[str], tags: Sequence[str]) -> int:
        with self._while_open():
            served = await self._meet(wire)
            return await served.forget(owner, keys, tags) if served.told.connected else 0

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """What breaks off because the engine was closed meanwhile raises ClosedError."""
        try:
            yield
        except Exception as error:
            if not self._closed:
                raise
            raise ClosedError(_CLOSED) from error

    # -- meeting the server -------------------------------------------------------------------------------------

    def _met(self) -> Served:
        return run(self._meet(self._here()))

    async def _meet(self, wire: Wire) -> Served:
        """The server over `wire`. Several first calls may introduce themselves at the same time: no harm is done."""
        url = self._address.url
        if self._told is None:
            # Without a secret no connector believes us; salts that nobody can guess are good all the same.
            key = secret.known(self._home) or token_bytes(32)
            self._told = key, await meet(wire, url, self._model, key)
        key, told = self._told
        return Served(key, wire, url, told)

    def _here(self) -> DirectWire:
        with self._lock:
            self._still_open()
            if self._direct is None:
                self._direct = DirectWire(self._address)
            return self._direct

    def _on_loop(self) -> LoopWire:
        loop = asyncio.get_running_loop()
        with self._lock:
            self._still_open()
            if loop not in self._loops:
                # A client refers to its loop: those of loops that have ended would stay for ever.
                self._loops = {old: wire for old, wire in self._loops.items() if not old.is_closed()}
                self._loops[loop] = LoopWire(self._address)
            return self._loops[loop]

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


def _root(told: Told, url: str) -> Path:
    """Where the server's model is on this machine."""
    try:
        return _tokenizer_folder(told.root)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{url} serves {told.model}, and this machine has no folder of it: {_REMEDY}"
        ) from error


_REMEDY = "pass as tokenizer a folder with the tokenizer of the model that is served"


def _load(folder: Path, told: Told, url: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{folder} holds no tokenizer that can be read ({error}): {_REMEDY}"
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
