"""An engine that answers conversations, with a memory behind it or without: what a framework's chat model stands on.

A framework calls its parts from threads and from coroutines, over whichever memory it was given. So both ways of
calling are here for both faces: each body is written once, over a `Waiting`, and asks the memory in its own way.
It must never bring a memory into a prompt that was not asked for by an id of its scope.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from time import perf_counter
from typing import Any

from inferscale_memory.engine.base import DEFAULT_OPTIONS, Engine, SamplingOptions
from inferscale_memory.engine.known_blobs import KnownBlobs
from inferscale_memory.engine.lazy import LazyEngine
from inferscale_memory.engine.runner import Direct, Threads, Waiting, run
from inferscale_memory.errors import ClosedError, ConfigurationError
from inferscale_memory.facts.expiry import is_expired
from inferscale_memory.facts.scope import Scope
from inferscale_memory.facts.text import payload_of, words_of
from inferscale_memory.mem0_adapter.rows import MOST, rows_of
from inferscale_memory.memory import operations
from inferscale_memory.memory.argument_checks import an, as_conversation, as_memories, checked
from inferscale_memory.memory.base import Face
from inferscale_memory.memory.guarded import guarded
from inferscale_memory.memory.instance import core_of
from inferscale_memory.memory.old_chat_names import OldChatNames
from inferscale_memory.memory.operations import Filters, Ids
from inferscale_memory.prompt import PUBLIC_OWNER, Prompt, PromptTemplate, Segment
from inferscale_memory.prompt.compose import check_fits
from inferscale_memory.prompt.template import DEFAULT_HEADING, DEFAULT_SYSTEM
from inferscale_memory.recall.answer import Answers
from inferscale_memory.recall.prepare import Messages, Result, checked_scope, conversation, question
from inferscale_memory.recall.results import Prepared, Reply, ReplyChunk
from inferscale_memory.recall.tool_calling import Calling
from inferscale_memory.sharing import Shared

_HERE, _THREADS = Direct(), Threads()
_with_messages = checked(messages=as_conversation, memories=as_memories)
_with_options = checked(options=an(SamplingOptions, "a SamplingOptions"))


@guarded
class Chat(OldChatNames, Shared):
    """Conversations with one engine. Every method has an async twin, whose name begins with `a`.

    A turn is `recall`, `prepare`, then `answer` or `stream`; `remember` writes it down. Nothing starts before it is
    needed.
    """

    def __init__(self, engine: Engine | Mapping[str, Any] | None = None, memory: Any = None) -> None:
        """
        Args:
            engine: as `Memory` takes it. Not together with `memory`, which has one.
            memory: a `Memory` or `AsyncMemory`, open; it stays the caller's.

        Raises:
            ConfigurationError: both, or a memory that is not of this library.
        """
        if memory is not None and not isinstance(memory, Face):
            raise ConfigurationError(
                f"memory is a {type(memory).__module__}.{type(memory).__name__}: pass a Memory or AsyncMemory of "
                "inferscale_memory, which take mem0's configuration as it is"
            )
        if memory is not None and engine is not None:
            raise ConfigurationError(
                "a memory has an engine of its own: leave `engine` out, and give it to the memory, as in "
                "Memory.from_config({'engine': engine})"
            )
        self.memory: Any = memory
        self._own = LazyEngine(
            engine, chosen=True, eager=True, heading=DEFAULT_HEADING, default_system=DEFAULT_SYSTEM
        )
        self._answers = Answers(self._own, KnownBlobs())
        self._closed = False

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, made if it was not. It loads its model at the first use, or with `start()`."""
        return self._engine.get()

    @property
    def template(self) -> PromptTemplate:
        """The model's chat template, with a place for memories."""
        return self._engine.template

    @property
    def model_name(self) -> str:
        """The name of the model's folder. Nothing is started to find out."""
        return self._engine.model_name

    @property
    def open_memory(self) -> Any:
        """The memory, for whoever reads its stores. Raises ConfigurationError without one, and the memory's own error
        after its `close()`."""
        memory = self._with_memory()
        operations.behind(memory)
        return memory

    @property
    def default_k(self) -> int:
        """How many memories a question recalls unless it says so; 0 without a memory."""
        self._check_open()
        return 0 if self.memory is None else operations.behind(self.memory).injection.top_k

    @property
    def _engine(self) -> LazyEngine:
        self._check_open()
        return self._own if self.memory is None else operations.behind(self.memory).engine

    def close(self) -> None:
        """End the engine, if this object made it. Every other call raises ClosedError from then on."""
        self._closed = True
        self._own.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this Chat is closed: make another one")
        if self.memory is not None:
            core_of(self.memory)

    # -- a turn ----------------------------------------------------------------------------------------------

    @_with_messages
    def recall(
        self,
        messages: Messages,
        ids: Ids,
        *,
        top_k: int | None = None,
        k: int | None = None,
        filters: Filters | None = None,
    ) -> list[dict[str, Any]]:
        """The `top_k` memories of a scope that are nearest to the question at the end of `messages`, as mem0's
        `search` returns them: best first, each with its score. Pinned memories come before them, or the whole memory
        instead of them, if the configuration says so. `k` is short for `top_k`.

        Raises:
            ValueError: no scope, as mem0's `search` says it.
            PromptError: an empty question.
        """
        return run(self._recall(_HERE, messages, ids, top_k, filters))

    @_with_messages
    async def arecall(
        self,
        messages: Messages,
        ids: Ids,
        *,
        top_k: int | None = None,
        k: int | None = None,
        filters: Filters | None = None,
    ) -> list[dict[str, Any]]:
        """See `recall`."""
        return await self._recall(_THREADS, messages, ids, top_k, filters)

    @checked(memories=as_memories)
    def is_current(self, memories: Sequence[Result]) -> bool:
        """Whether all of `memories`, as `recall` returned them, still exist and have the same text. An app that keeps
        memories from one call to the next must ask, or a memory that was forgotten in between comes back."""
        return run(self._stand(_HERE, memories))

    @checked(memories=as_memories)
    async def ais_current(self, memories: Sequence[Result]) -> bool:
        """See `is_current`."""
        return await self._stand(_THREADS, memories)

    @_with_messages
    def prepare(
        self,
        messages: Messages,
        ids: Ids,
        memories: Sequence[Result] = (),
        *,
        max_tokens: int = 256,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
        search_s: float = 0.0,
    ) -> Prepared:
        """The prompt of `messages` with `memories`, which `recall` gave; see `Memory.chat` for the rest.

        Args:
            search_s: seconds that recalling took, to be counted in the reply's timings.

        Raises:
            PromptError: an empty question, messages that do not fit, tools that are none.
            ValueError: a memory of another scope.
        """
        work = self._prepare(_HERE, messages, ids, memories, max_tokens, tools, tool_choice, search_s)
        return run(work)

    @_with_messages
    async def aprepare(
        self,
        messages: Messages,
        ids: Ids,
        memories: Sequence[Result] = (),
        *,
        max_tokens: int = 256,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
        search_s: float = 0.0,
    ) -> Prepared:
        """See `prepare`."""
        return await self._prepare(
            _THREADS, messages, ids, memories, max_tokens, tools, tool_choice, search_s
        )

    @_with_options
    def answer(
        self, prepared: Prepared, options: SamplingOptions = DEFAULT_OPTIONS, *, inject: bool = True
    ) -> Reply:
        """The engine's answer. With `inject=False` the very same prompt is prefilled as text."""
        return run(self._asks.answer(_HERE, prepared, options, inject=inject, called=_called(prepared)))

    @_with_options
    async def aanswer(
        self, prepared: Prepared, options: SamplingOptions = DEFAULT_OPTIONS, *, inject: bool = True
    ) -> Reply:
        """See `answer`."""
        return await self._asks.answer(_THREADS, prepared, options, inject=inject, called=_called(prepared))

    @_with_options
    def stream(
        self, prepared: Prepared, options: SamplingOptions = DEFAULT_OPTIONS, *, inject: bool = True
    ) -> Iterator[ReplyChunk]:
        """The same, piece by piece; the last piece carries the reply. What may become a tool call is held back."""
        return self._asks.stream(prepared, options, inject=inject, called=_called(prepared))

    @_with_options
    def astream(
        self, prepared: Prepared, options: SamplingOptions = DEFAULT_OPTIONS, *, inject: bool = True
    ) -> AsyncIterator[ReplyChunk]:
        """See `stream`; for `async for`."""
        return self._asks.astream(prepared, options, inject=inject, called=_called(prepared))

    @_with_messages
    def remember(self, messages: Messages, ids: Ids, **options: Any) -> Any:
        """The memory's `add`: what was said becomes facts. Raises ConfigurationError without a memory."""
        return run(self._remember(_HERE, messages, ids, options))

    @_with_messages
    async def aremember(self, messages: Messages, ids: Ids, **options: Any) -> Any:
        """See `remember`."""
        return await self._remember(_THREADS, messages, ids, options)

    @checked()
    def forget(self, memory_ids: Sequence[str]) -> None:
        """The memory's `delete` for each of them: when it returns they are gone everywhere. Ids that are not there
        any more are passed over. Raises ConfigurationError without a memory."""
        run(self._forget(_HERE, memory_ids))

    @checked()
    async def aforget(self, memory_ids: Sequence[str]) -> None:
        """See `forget`."""
        await self._forget(_THREADS, memory_ids)

    @checked()
    def fingerprint(self, ids: Ids) -> str:
        """A digest of everything that a question of this scope can recall now, for the key of a cache of answers. It
        reads every fact of the scope."""
        return run(self._version(_HERE, ids))

    @checked()
    async def afingerprint(self, ids: Ids) -> str:
        """See `fingerprint`."""
        return await self._version(_THREADS, ids)

    # -- the bodies ------------------------------------------------------------------------------------------

    async def _recall(
        self, wait: Waiting, messages: Messages, ids: Ids, k: int | None, filters: Filters | None
    ) -> list[dict[str, Any]]:
        text = question(conversation(messages))
        memory = self._with_memory()
        injection = operations.behind(memory).injection
        besides = k is None and (injection.full_memory_tokens or injection.pinned)
        if not besides and (injection.top_k if k is None else k) < 1:
            checked_scope(ids)
            return []
        found = await _ask(
            wait, memory, lambda: operations.search(memory._kind, memory, text, ids, k, filters)
        )
        return list(found)

    async def _stand(self, wait: Waiting, memories: Sequence[Result]) -> bool:
        said = {str(memory["id"]): words_of(payload_of(memory)).digest for memory in memories}
        if not said:
            return True
        memory = self._with_memory()
        core = operations.behind(memory)
        await wait.call(core.writes.expire)
        now = dict(await wait.call(core.freshness.wordings, list(said)))
        for name in said.keys() - now.keys():  # gone, or written by somebody whom the journal does not know
            row = await wait.call(memory.vector_store.get, name)
            if row is None or is_expired(row.payload or {}):
                return False
            now[name] = words_of(row.payload or {}).digest
        return now == said

    async def _prepare(
        self,
        wait: Waiting,
        messages: Messages,
        ids: Ids,
        memories: Sequence[Result],
        max_tokens: int,
        tools: Sequence[Any] | None,
        tool_choice: str | None,
        search_s: float,
    ) -> Prepared:
        if self.memory is None and memories:
            raise ConfigurationError("there is no memory to take these memories from: pass one as `memory`")
        if self.memory is None or not (memories or Scope.of(ids).owner):
            return await wait.call(self._plain, messages, ids, max_tokens, tools, tool_choice)
        core = operations.behind(self.memory)
        return await wait.call(
            core.recall.prepare,
            conversation(messages),
            memories,
            Scope.of(ids),
            max_tokens=max_tokens,
            search_s=search_s,
            tools=tools,
            tool_choice=tool_choice,
        )

    def _plain(
        self,
        messages: Messages,
        ids: Ids,
        max_tokens: int,
        tools: Sequence[Any] | None,
        tool_choice: str | None,
    ) -> Prepared:
        """A prompt of the conversation alone."""
        started = perf_counter()
        engine, template = self._engine.get(), self._engine.template
        calling = Calling.read(engine, tools, tool_choice)
        written = template.plain(conversation(messages), tools=None if calling is None else calling.tools)
        check_fits(len(written), engine.max_model_len)
        prompt = Prompt(Scope.of(ids).owner or PUBLIC_OWNER, (Segment(written),))
        return Prepared(prompt, (), (), 0.0, perf_counter() - started, calling)

    async def _remember(self, wait: Waiting, messages: Messages, ids: Ids, options: Mapping[str, Any]) -> Any:
        memory = self._with_memory()
        said = [dict(message) for message in conversation(messages)]
        named = {name: value for name, value in ids.items() if value is not None}
        return await _ask(wait, memory, lambda: _awaited(memory.add(said, **named, **options)))

    async def _forget(self, wait: Waiting, memory_ids: Sequence[str]) -> None:
        memory = self._with_memory()
        for name in memory_ids:
            try:
                await _ask(wait, memory, partial(_deleted, memory, name))
            except ValueError:
                if await wait.call(memory.vector_store.get, name) is not None:
                    raise

    async def _version(self, wait: Waiting, ids: Ids) -> str:
        memory = self._with_memory()
        return await wait.call(_digest, memory.vector_store, checked_scope(ids))

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _asks(self) -> Answers:
        return self._answers if self.memory is None else operations.behind(self.memory).answers

    def _with_memory(self) -> Any:
        if self.memory is None:
            raise ConfigurationError("there is no memory behind this: pass one as `memory`")
        return self.memory


def _called(prepared: Prepared) -> float:
    """When the turn began, had nothing happened since its prompt was made."""
    return perf_counter() - prepared.search_s - prepared.compose_s


async def _ask(wait: Waiting, memory: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    """What `work`, a coroutine of the memory's own face, returns."""
    if isinstance(memory._kind.wait, Direct):
        return await wait.call(lambda: run(work()))  # type: ignore[arg-type]
    if isinstance(wait, Threads):
        return await work()
    with ThreadPoolExecutor(1) as apart:  # this thread may have a loop that runs

        async def whole() -> Any:
            return await work()

        return apart.submit(asyncio.run, whole()).result()


async def _deleted(memory: Any, name: str) -> Any:
    return await _awaited(memory.delete(name))


async def _awaited(result: Any) -> Any:
    """A sync face has its result already."""
    return await result if isinstance(result, Awaitable) else result


def _digest(store: Any, scope: Scope) -> str:
    rows = []
    for row in rows_of(store.list(filters=scope.ids, top_k=MOST)):
        payload = row.payload or {}
        if not is_expired(payload):
            rows.append(f"{row.id}\0{payload.get('data')}\0{payload.get('updated_at')}")
    return blake2b("\1".join(sorted(rows)).encode(), digest_size=16).hexdigest()
