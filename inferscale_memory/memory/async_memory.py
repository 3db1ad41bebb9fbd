"""mem0's `AsyncMemory`, whose memories are prefilled once: `Memory` for coroutines.

It must never block the event loop: what mem0 does it awaits, what blocks goes to threads, and the engine answers
through its own async twin. The bodies are those of the sync face, in `operations`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Sequence
from typing import Any, Literal, Self, overload

import mem0

from inferscale_memory.deprecation import warn
from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.runner import Threads
from inferscale_memory.mem0_adapter.private import UNSET
from inferscale_memory.memory import operations
from inferscale_memory.memory.argument_checks import at_chat, at_face, at_update
from inferscale_memory.memory.audit import Audit
from inferscale_memory.memory.base import Face
from inferscale_memory.memory.guarded import guarded
from inferscale_memory.memory.instance import never_had_core
from inferscale_memory.memory.legacy import accepts_old_calls
from inferscale_memory.memory.operations import Filters, Kind
from inferscale_memory.memory.session import AsyncChatSession
from inferscale_memory.recall.answer import Answers
from inferscale_memory.recall.prepare import Messages, Result
from inferscale_memory.recall.results import Prepared, Reply, ReplyChunk
from inferscale_memory.write.encoder import Progress

_ASYNC = Kind(mem0.AsyncMemory, Threads(), Answers.astream)


@guarded
class AsyncMemory(Face[AsyncChatSession], mem0.AsyncMemory):  # type: ignore[misc]  # mem0 has no types
    """`Memory` for coroutines: the same methods, awaited; `async with` closes it.

    As with mem0's, making one is an ordinary call, and so are `session`, `engine` and `close`, the last two of
    which may block: `async with` closes in a thread.
    """

    _kind = _ASYNC
    _session = AsyncChatSession

    def __await__(self) -> Generator[Any, None, Self]:
        """`await AsyncMemory.from_config(...)`, which mem0 1.x wanted."""
        warn("mem0 2 does not await from_config(): write memory = AsyncMemory.from_config(config)")
        return _itself(self).__await__()

    # -- writing ---------------------------------------------------------------------------------------------

    @accepts_old_calls
    @at_face
    async def add(
        self,
        messages: Any,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        timestamp: Any = None,
        expiration_date: Any = None,
        infer: bool = True,
        memory_type: str | None = None,
        prompt: str | None = None,
        llm: Any = None,
    ) -> Any:
        """See `Memory.add`."""
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        return await operations.add(
            _ASYNC,
            self,
            messages,
            ids,
            metadata,
            timestamp,
            expiration_date=expiration_date,
            infer=infer,
            memory_type=memory_type,
            prompt=prompt,
            llm=llm,
        )

    @at_face
    async def retry_failed(self) -> dict[str, list[Any]]:
        """See `Memory.retry_failed`."""
        return await operations.retry_failed(_ASYNC, self)

    @at_update
    async def update(
        self,
        memory_id: str,
        text: str | None = None,
        metadata: dict[str, Any] | None = None,
        expiration_date: Any = UNSET,
        data: str | None = None,
    ) -> Any:
        """See `Memory.update`."""
        return await operations.update(_ASYNC, self, memory_id, text, metadata, expiration_date, data)

    @at_face
    async def delete(self, memory_id: str) -> Any:
        """See `Memory.delete`."""
        return await operations.change(_ASYNC, self, "delete", memory_id)

    @at_face
    async def delete_all(
        self, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> Any:
        """See `Memory.delete_all`."""
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        return await operations.delete_all(_ASYNC, self, ids)

    @at_face
    async def reset(self) -> Any:
        """See `Memory.reset`."""
        return await operations.reset(_ASYNC, self)

    @at_face
    async def expire(self) -> int:
        """See `Memory.expire`."""
        return await operations.expire(_ASYNC, self)

    @at_face
    async def audit(self, text: str) -> Audit:
        """See `Memory.audit`."""
        return await operations.audit(_ASYNC, self, text)

    @at_face
    async def flush(self, progress: Progress | None = None, *, timeout: float | None = None) -> None:
        """See `Memory.flush`; `progress` is called in a thread."""
        await operations.flush(_ASYNC, self, progress, timeout)

    # -- asking ----------------------------------------------------------------------------------------------

    search = accepts_old_calls(at_face(mem0.AsyncMemory.search))
    get_all = accepts_old_calls(at_face(mem0.AsyncMemory.get_all))
    get = at_face(mem0.AsyncMemory.get)
    history = at_face(mem0.AsyncMemory.history)

    @overload
    async def chat(
        self,
        messages: Messages,
        *,
        user_id: str | None = ...,
        agent_id: str | None = ...,
        run_id: str | None = ...,
        top_k: int | None = ...,
        k: int | None = ...,
        stream: Literal[False] = ...,
        max_tokens: int = ...,
        inject: bool = ...,
        session: AsyncChatSession | None = ...,
        filters: Filters | None = ...,
        options: SamplingOptions | None = ...,
        memories: Sequence[Result] | None = ...,
        tools: Sequence[Any] | None = ...,
        tool_choice: str | None = ...,
    ) -> Reply: ...
    @overload
    async def chat(
        self,
        messages: Messages,
        *,
        user_id: str | None = ...,
        agent_id: str | None = ...,
        run_id: str | None = ...,
        top_k: int | None = ...,
        k: int | None = ...,
        stream: Literal[True],
        max_tokens: int = ...,
        inject: bool = ...,
        session: AsyncChatSession | None = ...,
        filters: Filters | None = ...,
        options: SamplingOptions | None = ...,
        memories: Sequence[Result] | None = ...,
        tools: Sequence[Any] | None = ...,
        tool_choice: str | None = ...,
    ) -> AsyncIterator[ReplyChunk]: ...
    @at_chat
    async def chat(
        self,
        messages: Messages,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int | None = None,
        k: int | None = None,
        stream: bool = False,
        max_tokens: int = 256,
        inject: bool = True,
        session: AsyncChatSession | None = None,
        filters: Filters | None = None,
        options: SamplingOptions | None = None,
        memories: Sequence[Result] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
    ) -> Reply | AsyncIterator[ReplyChunk]:
        """See `Memory.chat`. With `stream`, awaiting gives what `async for` then goes through."""
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        answer: Reply | AsyncIterator[ReplyChunk] = await operations.chat(
            _ASYNC,
            self,
            messages,
            ids,
            k=top_k,
            stream=stream,
            max_tokens=max_tokens,
            inject=inject,
            session=session,
            filters=filters,
            options=options,
            memories=memories,
            tools=tools,
            tool_choice=tool_choice,
        )
        return answer

    @at_chat
    async def prepare(
        self,
        messages: Messages,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int | None = None,
        k: int | None = None,
        max_tokens: int = 256,
        filters: Filters | None = None,
        memories: Sequence[Result] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
    ) -> Prepared:
        """See `Memory.prepare`."""
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        return await operations.prepare(
            _ASYNC,
            self,
            messages,
            ids,
            k=top_k,
            max_tokens=max_tokens,
            filters=filters,
            memories=memories,
            tools=tools,
            tool_choice=tool_choice,
        )

    async def _search_vector_store(
        self,
        query: str,
        filters: Any,
        limit: int,
        threshold: float | None = 0.1,
        explain: bool = False,
        show_expired: bool = False,
    ) -> Any:
        threshold = operations.threshold_of_search(threshold)
        hidden, shown = operations.hiding(self, show_expired)
        with hidden:
            return await _ASYNC.mem0._search_vector_store(
                self, query, filters, limit, threshold, explain, shown
            )

    async def _get_all_from_vector_store(
        self, filters: Any, limit: int, show_expired: bool = False, output_limit: int | None = None
    ) -> Any:
        hidden, shown = operations.hiding(self, show_expired)
        with hidden:
            return await _ASYNC.mem0._get_all_from_vector_store(self, filters, limit, shown, output_limit)

    # -- lifetime --------------------------------------------------------------------------------------------

    async def __aexit__(self, *raised: object) -> Literal[False]:
        if never_had_core(self):
            self.close()
        else:
            await asyncio.to_thread(self.close)
        return False


async def _itself(memory: AsyncMemory) -> AsyncMemory:
    return memory
