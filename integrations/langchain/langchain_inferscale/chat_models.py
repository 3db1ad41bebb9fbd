"""A chat model whose memories are injected into its KV cache.

It must never answer one user with another's memories, nor with an answer that a cache of LangChain's keeps of
another: the scope and a digest of all it could recall are part of the cache's key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from time import perf_counter
from typing import Any, Self

from langchain_core.caches import BaseCache
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import ContextOverflowError as LangChainOverflow
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from pydantic import Field, PrivateAttr, model_validator

from inferscale_memory import Chat, Engine, Prepared
from inferscale_memory.arguments import as_text, refusal
from inferscale_memory.deprecation import renamed, with_top_k
from inferscale_memory.errors import ConfigurationError, ContextOverflowError
from langchain_inferscale.behind import Behind
from langchain_inferscale.bound import Bound
from langchain_inferscale.calls import UNUSED, Call, read_call, read_choice, read_tools
from langchain_inferscale.copying import picklable, sharing
from langchain_inferscale.expiry import living
from langchain_inferscale.messages import chunk, generation, question_in, to_chat
from langchain_inferscale.scope import (
    DEFAULT_KEYS,
    IDS,
    Id,
    Ids,
    Keys,
    demanded,
    ids_of_config,
    read_ids,
)
from langchain_inferscale.structured import (
    Method,
    bound_to,
    checked_method,
    parser_of,
    read_as,
    whole_calls,
    whole_json,
)

_NAME = "ChatInferScale"


class ConversationTooLongError(ContextOverflowError, LangChainOverflow):
    """A conversation that is longer than the model's context, as both libraries call it: LangChain's middleware that
    summarizes tries again with less."""

OLD_NAMES = {"w": "context_turns"}


class ChatInferScale(BaseChatModel):
    """A chat model over an engine of InferScale Memory, with a memory behind it or without.

    Every question recalls the `top_k` memories of its scope nearest to it, and their keys and values are injected. The
    scope is named by `bind(user_id=...)` or an argument, else by `config["configurable"]`, else in the constructor;
    each of the three ids is taken from the nearest place that names it. Nothing is opened or started before the first
    question.

    What an answer stood on is in its `response_metadata`: `memories` (id, text, score, injected), `dropped` (those
    that did not fit), token counts and times. `usage_metadata` counts injected tokens as `cache_read`.
    """

    engine: Any = Field(default=None, exclude=True, repr=False)
    """An `Engine`, which stays the caller's, or `{"provider": "vllm" | "transformers" | "remote", "model": folder,
    ...}`. Not together with a `memory` that is made, which has one."""
    memory: Any = Field(default=None, exclude=True, repr=False)
    """A `Memory` or `AsyncMemory`, which stays the caller's; or mem0's configuration, with `engine` and `injection`
    in it at will, of one that is opened here."""
    user_id: Id = None
    agent_id: Id = None
    run_id: Id = None
    scope_keys: Keys = Field(default_factory=lambda: dict(DEFAULT_KEYS))
    """Which key of `config["configurable"]` says which id; `{"user_id": "user_id", "run_id": "thread_id"}` makes every
    thread a run of its own."""
    top_k: int | None = Field(default=None, ge=0)
    """How many memories to recall; by default the memory's own number, 0 for none. `k` is short for it."""
    context_turns: int | None = Field(default=None, ge=0)
    """Turns of context that facts are encoded behind. Only where `memory` is a configuration: facts are encoded when
    they are written, so it is the memory's to know."""
    filters: dict[str, Any] | None = None
    """mem0's filters on what is recalled, beyond the ids."""
    inject: bool = True
    """False prefills memories as text, with the very same token ids."""
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=256, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None
    stop: list[str] | None = None
    streaming: bool = False
    memory_texts: bool = True
    """False leaves the words of memories out of `response_metadata`; their ids, scores and ways stay. An app that keeps
    messages (a checkpointer does) keeps the words with them, where forgetting does not reach."""

    _opened: Behind | None = PrivateAttr(default=None)
    _bound: Ids = PrivateAttr(default_factory=dict)
    """Ids that a binding has named: nearer than the config."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """pydantic would pass over what it does not know, and a misspelt id with it."""
        if isinstance(given, Mapping):
            given = with_top_k(renamed(given, OLD_NAMES, ""))
            unknown = sorted(set(given) - set(cls.model_fields) - set(UNUSED))
            if unknown:
                raise ConfigurationError(f"{_NAME} has no option {', '.join(unknown)}")
        return given

    @property
    def k(self) -> int | None:
        """The same as `top_k`."""
        return self.top_k

    @k.setter
    def k(self, top_k: int | None) -> None:
        self.top_k = top_k

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._opened = Behind(self.engine, self.memory, self.context_turns)

    @property
    def _behind(self) -> Behind:
        """What stands behind it now: a copy or an assignment may have put another engine or memory there."""
        if self._opened is None or not self._opened.is_over(self.engine, self.memory, self.context_turns):
            self._opened = Behind(self.engine, self.memory, self.context_turns)
        return self._opened

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy over the same engine and memory."""
        return super().__deepcopy__(sharing((self.engine, self.memory, self._opened), memo))

    def __getstate__(self) -> dict[Any, Any]:
        """Everything but what is open. Raises CopyError over an open memory or engine."""
        for thing in (self.engine, self.memory):
            picklable(_NAME, thing)
        state = super().__getstate__()
        return {**state, "__pydantic_private__": {**(state["__pydantic_private__"] or {}), "_opened": None}}

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "inferscale"

    @property
    def model_name(self) -> str:
        """The name of the model's folder. Nothing is started to find out."""
        return self._behind.model_name

    @property
    def chat(self) -> Chat:
        """The conversations it is made of. Opens a memory that is given as a configuration."""
        return self._behind.chat

    def stands_on(self, memory: Any) -> bool:
        """Whether it injects the memories of this very `memory`."""
        return self._behind.has_memory and self.chat.memory is memory

    def close(self) -> None:
        """End the engine and close the memory, where they were made here."""
        self._behind.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = (*IDS, "top_k", "filters", "inject", "temperature", "max_tokens", "top_p", "seed", "stop")
        return {
            "model_name": self.model_name,
            "memory_texts": self.memory_texts,
            **{name: getattr(self, name) for name in names},
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs)

    def _resolve_model_profile(self) -> ModelProfile | None:
        return ModelProfile(
            image_inputs=False, audio_inputs=False, video_inputs=False, tool_calling=True, tool_choice=True
        )

    # -- tokens ----------------------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of the engine's own tokenizer."""
        text = as_text(text, "text")
        return list(self._engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def get_num_tokens(self, text: str) -> int:
        """Tokens of a text, by the engine's own tokenizer."""
        return len(self.get_token_ids(text))

    def get_num_tokens_from_messages(
        self,
        messages: Sequence[BaseMessage],
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] | None = None,
    ) -> int:
        """Tokens of a prompt of `messages` and `tools` through the model's chat template, without memories."""
        return len(self.chat.template.plain(to_chat(messages), tools=read_tools(tools or ()) or None))

    @property
    def _engine(self) -> Engine:
        return self.chat.engine

    # -- bindings --------------------------------------------------------------------------------------------

    def bind(self, **kwargs: Any) -> Bound:  # type: ignore[override]  # LangChain names a private class
        """This model with arguments of every call; ids among them stay with whatever is made of it."""
        return Bound(bound=self, kwargs=kwargs, config={})

    def with_config(self, config: RunnableConfig | None = None, **kwargs: Any) -> Bound:
        """This model with a config of every call; see `bind`."""
        merged: Any = {**(config or {}), **kwargs}
        return Bound(bound=self, kwargs={}, config=merged)

    def named(self, *, bound: Ids, configured: Ids) -> Self:
        """The same model, over the same memory, that answers for these ids: `bound` goes before the config of a
        call, `configured` behind it."""
        model = self.model_copy(update=configured)
        model._bound = {**self._bound, **bound}
        return model

    # -- tools and forms -------------------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools it may call, or must: `tool_choice` is "auto", "none", "any" or the name of one. A
        call that must be made is decoded within the schema of its arguments.

        Raises:
            ConfigurationError: a choice that is not among the tools.
        """
        offered = read_tools(tools)
        choice = read_choice(tool_choice, offered)
        return self.bind(tools=offered, **({} if choice is None else {"tool_choice": choice}), **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers in the form of `schema`, decoded within it by every method; `strict` changes nothing. An answer
        that `max_tokens` cuts off cannot be read, and is an error.

        Raises:
            ConfigurationError: a method that does not exist.
        """
        checked_method(method)
        if kwargs:
            raise ConfigurationError(f"with_structured_output takes no {', '.join(sorted(kwargs))}")
        if method == "function_calling":
            read_tools([schema])
            called: Any = super().with_structured_output(schema)
            return read_as(called.first, whole_calls() | called.last, include_raw=include_raw)
        parser = whole_json() | parser_of(schema)
        return read_as(self.bind(**bound_to(schema, method)), parser, include_raw=include_raw)

    # -- calls: whose memories are meant is settled where the config is known, and when the call is made: a stream may
    # -- be read elsewhere ------------------------------------------------------------------------------------

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        return super().invoke(input, config, stop=stop, **self._settled(config, kwargs))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        settled = self._settled(config, kwargs)
        if self._cached:  # its key is made where nothing may be awaited
            call = self._read(stop, settled)
            if self._recalls(call):
                settled["memory_version"] = await self.chat.afingerprint(call.scope)
        return await super().ainvoke(input, config, stop=stop, **settled)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, config, stop=stop, **self._settled(config, kwargs))

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, config, stop=stop, **self._settled(config, kwargs))

    def stream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().stream_events(input, config, **self._settled(config, kwargs))

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return super().astream_events(input, config, **self._settled(config, kwargs))

    def _settled(self, config: RunnableConfig | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` with `scope` in place of its ids: LangChain has a `run_id` of its own."""
        rest = {name: value for name, value in given.items() if name not in IDS}
        bound = {**self._bound, **read_ids(given)}
        if "scope" in rest:
            if not isinstance(rest["scope"], Mapping):
                raise refusal("scope", rest["scope"], "a dictionary of ids")
            return {**rest, "scope": {**rest["scope"], **bound}}
        return {**rest, "scope": {**self._own_ids, **ids_of_config(config, self.scope_keys), **bound}}

    @property
    def _own_ids(self) -> Ids:
        return read_ids({name: getattr(self, name) for name in IDS})

    def _read(self, stop: Sequence[str] | None, given: Mapping[str, Any]) -> Call:
        names = ("top_k", "filters", "inject", "temperature", "max_tokens", "top_p", "seed", "stop")
        nothing = dict.fromkeys(("memories", "tools", "tool_choice", "response_format"))
        defaults = {**nothing, **{name: getattr(self, name) for name in names}}
        return read_call(defaults, self._settled(None, given), stop)

    def _recalls(self, call: Call) -> bool:
        """Whether a search is to be made. Raises ConfigurationError where nobody said whose memories are meant."""
        if not (self._behind.has_memory and call.recalls):
            return False
        demanded(call.scope, _NAME)
        return True

    # -- answers ---------------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._read(stop, kwargs)
        reply = self.chat.answer(self._prepared(messages, call), call.options, inject=call.inject)
        return ChatResult(generations=[generation(reply, self.model_name, texts=self.memory_texts)])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._read(stop, kwargs)
        prepared = await self._aprepared(messages, call)
        reply = await self.chat.aanswer(prepared, call.options, inject=call.inject)
        return ChatResult(generations=[generation(reply, self.model_name, texts=self.memory_texts)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._read(stop, kwargs)
        pieces = self.chat.stream(self._prepared(messages, call), call.options, inject=call.inject)
        for piece in pieces:
            yield chunk(piece, self.model_name, texts=self.memory_texts)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._read(stop, kwargs)
        prepared = await self._aprepared(messages, call)
        async for piece in self.chat.astream(prepared, call.options, inject=call.inject):
            yield chunk(piece, self.model_name, texts=self.memory_texts)

    def _prepared(self, messages: Sequence[BaseMessage], call: Call) -> Prepared:
        said, started = to_chat(messages), perf_counter()
        found = call.memories or ()
        if self._recalls(call) and (asked := question_in(said)):
            found = living(self.chat.recall(asked, call.scope, top_k=call.top_k, filters=call.filters))
        try:
            return self.chat.prepare(
                said, call.scope, found, search_s=perf_counter() - started, **call.prompt
            )
        except ContextOverflowError as error:
            raise ConversationTooLongError(str(error)) from error

    async def _aprepared(self, messages: Sequence[BaseMessage], call: Call) -> Prepared:
        said, started = to_chat(messages), perf_counter()
        found = call.memories or ()
        if self._recalls(call) and (asked := question_in(said)):
            found = living(await self.chat.arecall(asked, call.scope, top_k=call.top_k, filters=call.filters))
        try:
            return await self.chat.aprepare(
                said, call.scope, found, search_s=perf_counter() - started, **call.prompt
            )
        except ContextOverflowError as error:
            raise ConversationTooLongError(str(error)) from error

    # -- LangChain's cache of answers --------------------------------------------------------------------------

    @property
    def _cached(self) -> bool:
        return self.cache is not False and (isinstance(self.cache, BaseCache) or get_llm_cache() is not None)

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """The cache's key beside the messages: whose answer it is, and what it could stand on."""
        call = self._read(stop, kwargs)
        version = kwargs.pop("memory_version", None)
        if version is None and self._recalls(call):
            version = self.chat.fingerprint(call.scope)
        preamble = repr(self.chat.template.encode_preamble)
        key = (
            self._engine.fingerprint,
            blake2b(preamble.encode(), digest_size=8).hexdigest(),
            sorted(call.scope.items()),
            self.chat.default_k if call.top_k is None else call.top_k,
            version,
        )
        return f"{super()._get_llm_string(stop=stop, **kwargs)} {key!r}"
