"""mem0's `Memory`, whose memories are prefilled once: swap the import, keep the app, and ask with `chat`.

Every method of mem0's keeps its arguments, results and errors. Here are the signatures and what they mean; the
bodies, which the async face shares, are in `operations`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import mem0

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.runner import Direct, run
from inferscale_memory.mem0_adapter.private import UNSET
from inferscale_memory.memory import operations
from inferscale_memory.memory.argument_checks import at_chat, at_face, at_update
from inferscale_memory.memory.audit import Audit
from inferscale_memory.memory.base import Face
from inferscale_memory.memory.guarded import guarded
from inferscale_memory.memory.legacy import accepts_old_calls
from inferscale_memory.memory.operations import Filters, Kind
from inferscale_memory.memory.session import ChatSession
from inferscale_memory.recall.answer import Answers
from inferscale_memory.recall.prepare import Messages, Result
from inferscale_memory.recall.results import Prepared, Reply, ReplyChunk
from inferscale_memory.write.encoder import Progress

_SYNC = Kind(mem0.Memory, Direct(), Answers.stream)


@guarded
class Memory(Face[ChatSession], mem0.Memory):  # type: ignore[misc]  # mem0 has no types
    """A mem0 memory with an engine behind it.

    With nothing set all is local: an embedder, a vector store and an engine in this process, everything under
    one folder. The engine starts when it is first needed.
    """

    _kind = _SYNC
    _session = ChatSession

    # -- writing ---------------------------------------------------------------------------------------------

    @accepts_old_calls
    @at_face
    def add(
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
    ) -> Any:
        """mem0's `add`. Its messages are logged first, and become the context in which their facts are
        encoded.

        Facts are dated by `metadata["date"]`, else by `timestamp` (a datetime, seconds since the epoch, or
        ISO text), which also becomes their `created_at`; else now. Returns when the facts are durable;
        encoding follows.

        Their time is over at `expiration_date`: a datetime (without a time zone, one of this process's zone), or a
        date, which ends when that day ends in this process's zone; or ISO text of either.

        Raises:
            ExtractionError: the model's answer was cut off, no JSON, or none. It is mem0's LLMError too. The
                messages are kept, and `retry_failed` tries again; so does adding the same once more.
        """
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        return run(
            operations.add(
                _SYNC,
                self,
                messages,
                ids,
                metadata,
                timestamp,
                expiration_date=expiration_date,
                infer=infer,
                memory_type=memory_type,
                prompt=prompt,
            )
        )

    @at_face
    def retry_failed(self) -> dict[str, list[Any]]:
        """Make every call of `failed_adds` again, with the options it had; system messages are not kept. Those
        that fail once more stay.

        Returns:
            `results`, as of `add`, and `failed`: the calls that stay.
        """
        return run(operations.retry_failed(_SYNC, self))

    @at_update
    def update(
        self,
        memory_id: str,
        text: str | None = None,
        metadata: dict[str, Any] | None = None,
        expiration_date: Any = UNSET,
        data: str | None = None,
    ) -> Any:
        """mem0's `update`. A fact with new words gets a new blob, and so does every fact whose window held
        it. The old words are gone everywhere when it returns; in the history None stands for them."""
        return run(operations.update(_SYNC, self, memory_id, text, metadata, expiration_date, data))

    @at_face
    def delete(self, memory_id: str) -> Any:
        """mem0's `delete`. When it returns the text is gone from every file: vector, index, entities, turns,
        messages, history (whose events stay, with None for the text), and free pages. The engine forgets the
        fact too, and every blob whose window held it is made again.
        """
        return run(operations.change(_SYNC, self, "delete", memory_id))

    @at_face
    def delete_all(
        self, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> Any:
        """mem0's `delete_all`; see `delete`. The turns and messages of these scopes go too, whatever became of
        them."""
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        return run(operations.delete_all(_SYNC, self, ids))

    @at_face
    def reset(self) -> Any:
        """mem0's `reset`: everything is forgotten, in the engine too."""
        return run(operations.reset(_SYNC, self))

    @at_face
    def expire(self) -> int:
        """Delete every memory whose `expiration_date` has passed, as `delete` does; how many they were.

        Expired memories are in no prompt and no blob from the moment this is noticed: at the start, at `flush`,
        and at every question. Until they are deleted `get`, and `search` with `show_expired`, still find them.
        """
        return run(operations.expire(_SYNC, self))

    @at_face
    def audit(self, text: str) -> Audit:
        """Where `text` is still to be found, word for word: in the bytes of every file of this memory, free pages
        and logs included, and in blobs that the engine holds. It reads all of them. Raises
        ConfigurationError on a text without words."""
        return run(operations.audit(_SYNC, self, text))

    @at_face
    def flush(self, progress: Progress | None = None, *, timeout: float | None = None) -> None:
        """Wait until every fact written so far is encoded. Where nothing has asked for an engine (mem0's own
        functions with an LLM of their own do not) nothing is, and nothing waits.

        Args:
            progress: called with how many are done, and of how many.
            timeout: seconds to wait at most.

        Raises:
            EngineError: the engine could not be started.
            TimeoutError: some are still waiting.
        """
        run(operations.flush(_SYNC, self, progress, timeout))

    # -- asking ----------------------------------------------------------------------------------------------

    search = accepts_old_calls(at_face(mem0.Memory.search))
    get_all = accepts_old_calls(at_face(mem0.Memory.get_all))
    get = at_face(mem0.Memory.get)
    history = at_face(mem0.Memory.history)

    @overload
    def chat(
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
        session: ChatSession | None = ...,
        filters: Filters | None = ...,
        options: SamplingOptions | None = ...,
        memories: Sequence[Result] | None = ...,
        tools: Sequence[Any] | None = ...,
        tool_choice: str | None = ...,
    ) -> Reply: ...
    @overload
    def chat(
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
        session: ChatSession | None = ...,
        filters: Filters | None = ...,
        options: SamplingOptions | None = ...,
        memories: Sequence[Result] | None = ...,
        tools: Sequence[Any] | None = ...,
        tool_choice: str | None = ...,
    ) -> Iterator[ReplyChunk]: ...
    @at_chat
    def chat(
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
        session: ChatSession | None = None,
        filters: Filters | None = None,
        options: SamplingOptions | None = None,
        memories: Sequence[Result] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
    ) -> Reply | Iterator[ReplyChunk]:
        """An answer that knows what is remembered of this scope.

        Args:
            messages: a question, or a conversation that ends with one.
            user_id, agent_id, run_id: whose memories; at least one.
            top_k: how many memories besides pinned ones, by default `injection.top_k`; 0 for no memories. `k` is short
                for it.
            stream: yield the answer piece by piece; the last piece carries the reply.
            max_tokens: most tokens of the answer; memories leave room for them where the conversation does. What the
                prompt leaves of the model's context is what can be said.
            inject: False prefills the very same prompt as text.
            session: the conversation this question belongs to; it has its own scope, filters and
                top_k, and `messages` is the question alone.
            filters: mem0's filters, beyond the ids.
            options: how tokens are drawn; `max_tokens` wins over what they say.
            memories: results of `search` that are to be used instead of searching; none when it is empty.
            tools: what the model may call, as chat APIs take it; `Reply.tool_calls` has its calls, and messages of
                role "tool" bring the results.
            tool_choice: "auto", "none", "any" for one of the tools at least, or the name of one. A call that must
                be made is decoded within the schema of its arguments.

        Raises:
            PromptError: an empty question, messages that do not fit the model's context, tools that are none.
            ValueError: no scope, as mem0's `search` says it; memories of another scope.
        """
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        answer: Reply | Iterator[ReplyChunk] = run(
            operations.chat(
                _SYNC,
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
        )
        return answer

    @at_chat
    def prepare(
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
        """What `chat` would give the engine: search and composition, and nothing generated. Arguments as
        there."""
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        return run(
            operations.prepare(
                _SYNC,
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
        )

    def _search_vector_store(
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
            return _SYNC.mem0._search_vector_store(self, query, filters, limit, threshold, explain, shown)

    def _get_all_from_vector_store(
        self, filters: Any, limit: int, show_expired: bool = False, output_limit: int | None = None
    ) -> Any:
        hidden, shown = operations.hiding(self, show_expired)
        with hidden:
            return _SYNC.mem0._get_all_from_vector_store(self, filters, limit, shown, output_limit)
