"""mem0's `Memory`, whose memories are prefilled once: swap the import, keep the app, and ask with `chat`.

Every method of mem0's keeps its arguments, results and errors. This class adds no path by which a fact is
written: it only marks where a call begins and ends, and the mirror on the vector store sees the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, overload

import mem0
from mem0.configs.base import MemoryConfig
from mem0.memory.main import _UNSET, _build_filters_and_metadata

from inferscale_memory.engine.base import Engine, SamplingOptions
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.memory.config import Injection, Settings
from inferscale_memory.memory.core import Core, new_turns
from inferscale_memory.memory.encoder import Progress
from inferscale_memory.memory.recall import Messages, Result, conversation, question
from inferscale_memory.memory.reply import Prepared, Reply, ReplyChunk
from inferscale_memory.memory.scope import Scope
from inferscale_memory.memory.session import ChatSession
from inferscale_memory.memory.words import read_date

Filters = Mapping[str, Any]

# Whether the search under way is for a prompt. A context variable: asyncio.to_thread carries it along.
_recalling: ContextVar[bool] = ContextVar("inferscale_recall", default=False)


class Memory(mem0.Memory):  # type: ignore[misc]  # mem0 has no types
    """A mem0 memory with an engine behind it.

    With nothing set all is local: an embedder, a vector store and an engine in this process, everything under
    one folder. The engine starts when it is first needed.
    """

    # Instances that mem0's own code or tests make without __init__ behave as mem0's.
    _core: Core | None = None

    def __init__(
        self,
        config: MemoryConfig | Mapping[str, Any] | None = None,
        *,
        engine: Engine | Mapping[str, Any] | None = None,
        injection: Injection | Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """Open a memory.

        Args:
            config: mem0's configuration; as a dictionary it may leave out anything, and hold the three below.
            engine: `{"provider": "vllm" | "transformers", "model": folder, ...}`, or an `Engine`, which stays
                the caller's. By default vLLM where it is installed, with the demo model.
            injection: how memories are encoded and placed; see `Injection`.
            folder: where everything is written; by default `INFERSCALE_HOME`, or ~/.inferscale.

        Raises:
            ConfigurationError: an engine, option or folder that cannot work.
            pydantic.ValidationError: as mem0 does, about its own part of the configuration.
        """
        settings = Settings.read(config, engine, injection, folder)
        self._core = core = Core(settings, self._payload)
        try:
            super().__init__(settings.mem0)
        except BaseException as error:
            core.close()
            if isinstance(error, RuntimeError) and "already accessed" in str(error):  # says Qdrant
                raise ConfigurationError(
                    f"the memory in {settings.folder} is open already: close it, pass another folder, or use "
                    "a vector store that is a server"
                ) from error
            raise

    @classmethod
    def from_config(cls, config_dict: Mapping[str, Any]) -> Memory:
        """A memory from mem0's configuration dictionary, with `engine`, `injection` and `folder` added at
        will."""
        return cls(config_dict)

    # -- the stores, as mem0 is to see them ------------------------------------------------------------------

    # They lie where mem0 would put them, so that an instance that has none raises AttributeError like mem0's.

    @property
    def vector_store(self) -> Any:
        return _attribute(self, "vector_store")

    @vector_store.setter
    def vector_store(self, store: Any) -> None:
        core = _core(self)
        self.__dict__["vector_store"] = store if core is None else core.mirror_facts(store)

    @property
    def _entity_store(self) -> Any:
        return _attribute(self, "_entity_store")

    @_entity_store.setter
    def _entity_store(self, store: Any) -> None:
        core = _core(self)
        self.__dict__["_entity_store"] = store if core is None else core.guard_entities(store)

    def _payload(self, memory_id: str) -> Mapping[str, Any] | None:
        payload: Mapping[str, Any] | None = getattr(self.vector_store.get(memory_id), "payload", None)
        return payload

    # -- writing ---------------------------------------------------------------------------------------------

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
        """
        core = _core(self)
        mem0s_own = {
            "user_id": user_id,
            "agent_id": agent_id,
            "run_id": run_id,
            "expiration_date": expiration_date,
            "infer": infer,
            "memory_type": memory_type,
            "prompt": prompt,
        }
        if core is None or not isinstance(messages, str | dict | list):
            return super().add(messages, metadata=metadata, timestamp=timestamp, **mem0s_own)
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        _build_filters_and_metadata(**ids)  # refuses a bad scope before anything is logged
        when = _moment(timestamp)
        turns = new_turns(messages, metadata, when)
        if when is not None:
            metadata = {"created_at": when.isoformat(), **(metadata or {})}
        with core.writes.saying(Scope.of(ids), turns):
            return super().add(messages, metadata=metadata, **mem0s_own)

    def update(
        self,
        memory_id: str,
        text: str | None = None,
        metadata: dict[str, Any] | None = None,
        expiration_date: Any = _UNSET,
        data: str | None = None,
    ) -> Any:
        """mem0's `update`. A fact with new words gets a new blob, and so does every fact whose window held
        it."""
        with _collected(self):
            return super().update(memory_id, text, metadata, expiration_date, data)

    def delete(self, memory_id: str) -> Any:
        """mem0's `delete`. The engine forgets the fact too, and every blob whose window held it is made
        again.

        Not yet here (the drop-in issue adds it): scrubbing the text from mem0's history and from free pages.
        """
        with _collected(self):
            return super().delete(memory_id)

    def delete_all(
        self, user_id: str | None = None, agent_id: str | None = None, run_id: str | None = None
    ) -> Any:
        """mem0's `delete_all`; see `delete`."""
        with _collected(self):
            return super().delete_all(user_id=user_id, agent_id=agent_id, run_id=run_id)

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
        self._behind.encoder.flush(progress, timeout)

    # -- asking ----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine; started now if it was not."""
        return self._behind.engine.get()

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        user_id: str | None = ...,
        agent_id: str | None = ...,
        run_id: str | None = ...,
        k: int | None = ...,
        stream: Literal[False] = ...,
        max_tokens: int = ...,
        inject: bool = ...,
        session: ChatSession | None = ...,
        filters: Filters | None = ...,
        options: SamplingOptions | None = ...,
    ) -> Reply: ...
    @overload
    def chat(
        self,
        messages: Messages,
        *,
        user_id: str | None = ...,
        agent_id: str | None = ...,
        run_id: str | None = ...,
        k: int | None = ...,
        stream: Literal[True],
        max_tokens: int = ...,
        inject: bool = ...,
        session: ChatSession | None = ...,
        filters: Filters | None = ...,
        options: SamplingOptions | None = ...,
    ) -> Iterator[ReplyChunk]: ...
    def chat(
        self,
        messages: Messages,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        k: int | None = None,
        stream: bool = False,
        max_tokens: int = 256,
        inject: bool = True,
        session: ChatSession | None = None,
        filters: Filters | None = None,
        options: SamplingOptions | None = None,
    ) -> Reply | Iterator[ReplyChunk]:
        """An answer that knows what is remembered of this scope.

        Args:
            messages: a question, or a conversation that ends with one.
            user_id, agent_id, run_id: whose memories; at least one.
            k: how many memories, by default `injection.k`.
            stream: yield the answer piece by piece; the last piece carries the reply.
            max_tokens: most tokens of the answer; room is left for them.
            inject: False prefills the very same prompt as text.
            session: the conversation this question belongs to; its scope, filters and k are settled, and
                `messages` is the question alone.
            filters: mem0's filters, beyond the ids.
            options: how tokens are drawn; `max_tokens` wins over what they say.

        Raises:
            PromptError: an empty question, or messages that do not fit the model's context.
            ValueError: no scope, as mem0's `search` says it.
        """
        called = perf_counter()
        options = replace(options or SamplingOptions(), max_tokens=max_tokens)
        if session is not None:
            text = question(conversation(messages))
            ask = session.stream if stream else session.chat
            return ask(text, options=options, inject=inject)
        prepared = self.prepare(
            messages,
            user_id=user_id,
            agent_id=agent_id,
            run_id=run_id,
            k=k,
            max_tokens=max_tokens,
            filters=filters,
        )
        answer = self._behind.recall.stream if stream else self._behind.recall.answer
        return answer(prepared, options, inject=inject, called=called)

    def prepare(
        self,
        messages: Messages,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        k: int | None = None,
        max_tokens: int = 256,
        filters: Filters | None = None,
    ) -> Prepared:
        """What `chat` would give the engine: search and composition, and nothing generated. Arguments as
        there."""
        said = conversation(messages)
        text = question(said)
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        started = perf_counter()
        results = self._recall(text, ids, self._behind.injection.k if k is None else k, filters)
        search_s = perf_counter() - started
        return self._behind.recall.prepare(
            said, results, Scope.of(ids), max_tokens=max_tokens, search_s=search_s
        )

    def session(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        k: int | None = None,
        filters: Filters | None = None,
        system: str | None = None,
    ) -> ChatSession:
        """A conversation that keeps its composition from turn to turn. `system` is the app's own system
        text."""
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}

        def search(text: str, k: int) -> Sequence[Result]:
            return self._recall(text, ids, k, filters)

        k = self._behind.injection.k if k is None else k
        return ChatSession(self._behind, search, Scope.of(ids), k=k, system=system)

    def _recall(self, text: str, ids: Mapping[str, Any], k: int, filters: Filters | None) -> Sequence[Result]:
        """mem0's own search, without its threshold: k memories come if there are k."""
        wanted = {**(filters or {}), **{name: value for name, value in ids.items() if value is not None}}
        token = _recalling.set(True)
        try:
            results: Sequence[Result] = self.search(text, filters=wanted, top_k=k, threshold=0.0)["results"]
            return results
        finally:
            _recalling.reset(token)

    def _search_vector_store(
        self, query: str, filters: Any, limit: int, threshold: float | None = 0.1, **options: Any
    ) -> Any:
        # Cosines may be negative, and mem0's search takes no threshold under 0.
        threshold = -1.0 if _recalling.get() else threshold
        return super()._search_vector_store(query, filters, limit, threshold, **options)

    # -- lifetime --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop encoding, end the engine if this memory made it, and give back every file. Closing twice is
        harmless."""
        core, self._core = _core(self), None
        if core is not None:
            core.close()
            if getattr(self.vector_store, "is_local", False):  # mem0 leaves embedded Qdrant locked
                self.vector_store.client.close()
        super().close()

    @property
    def _behind(self) -> Core:
        core = _core(self)
        if core is None:
            raise RuntimeError("this memory is closed: open another one")
        return core


def _attribute(memory: Memory, name: str) -> Any:
    try:
        return vars(memory)[name]
    except KeyError:
        raise AttributeError(f"{type(memory).__name__!r} object has no attribute {name!r}") from None


def _core(memory: Memory) -> Core | None:
    """The core of an instance that has one: not of a class, a mock or a bare instance."""
    core = vars(memory).get("_core")
    return core if isinstance(core, Core) else None


def _collected(memory: Memory) -> AbstractContextManager[None]:
    core = _core(memory)
    return nullcontext() if core is None else core.writes.collected()


def _moment(timestamp: Any) -> Any:
    """`timestamp` as a datetime. Raises ValueError when it is none: a wrong date would go unnoticed."""
    if timestamp is None:
        return None
    when = read_date(timestamp)
    if when is None:
        raise ValueError(
            f"timestamp {timestamp!r} is no moment: pass a datetime, seconds since the epoch, or ISO text"
        )
    return when
