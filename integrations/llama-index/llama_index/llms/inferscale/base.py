"""`InferScaleLLM`: an LLM of LlamaIndex's whose memories are injected into the engine's cache.

It is a thin face: what is asked is read in `asking`, what comes back is written in `report`, and between the two stands
`inferscale_memory.Chat`. Nothing starts before it is needed. It must never answer with memories that nobody named a
scope for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

from inferscale_memory import Chat, Engine, Prepared, Reply
from inferscale_memory.arguments import as_text
from inferscale_memory.deprecation import with_top_k
from inferscale_memory.errors import ConfigurationError
from llama_index.core.base.llms.generic_utils import (
    achat_to_completion_decorator,
    astream_chat_to_completion_decorator,
    chat_to_completion_decorator,
    stream_chat_to_completion_decorator,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import (
    Field,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection

from llama_index.llms.inferscale import asking
from llama_index.llms.inferscale.asking import Asked
from llama_index.llms.inferscale.copying import Named, is_plain, unpicklable
from llama_index.llms.inferscale.door import IDS, id_in
from llama_index.llms.inferscale.report import to_response
from llama_index.llms.inferscale.structured import SchemaLLM

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

_OWN = (*IDS, "top_k", "filters", "inject", "max_tokens", "temperature")
_BEHIND = "behind"


class InferScaleLLM(SchemaLLM):
    """An engine, with a memory behind it or without.

    With `memory` and a scope every question recalls the memories of that scope and injects them. Under an
    `InferScaleMemory` or an `InferScaleChatEngine` of the same memory it injects what they have recalled instead, and
    needs no scope of its own.
    """

    user_id: str | None = Field(default=None, description="Whose memories.")
    agent_id: str | None = Field(default=None, description="Of which agent.")
    run_id: str | None = Field(default=None, description="Of which run.")
    top_k: int | None = Field(default=None, ge=0, description="How many memories a question recalls; `k` for short.")
    filters: dict[str, Any] | None = Field(default=None, description="mem0's filters, beyond the ids.")
    inject: bool = Field(default=True, description="False prefills the very same prompt as text.")
    max_tokens: int = Field(default=256, gt=0, description="Most tokens of an answer.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 is greedy.")
    model: str | None = Field(default=None, description="The model's name; that of its folder by default.")
    context_window: int | None = Field(
        default=None, gt=0, description="Most tokens; what the engine has by default."
    )
    is_function_calling_model: bool = Field(
        default=True, description="False keeps agents from offering it tools."
    )
    additional_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More options of every call: top_p, stop, seed."
    )

    _opened: Chat | None = PrivateAttr(default=None)
    _engine_given: Any = PrivateAttr(default=None)
    _written: Any = PrivateAttr(default=None)
    _warned: bool = PrivateAttr(default=False)

    def __init__(
        self, engine: Engine | Mapping[str, Any] | None = None, memory: Any = None, **fields: Any
    ) -> None:
        """
        Args:
            engine: `{"provider": "vllm" | "transformers", "model": folder, ...}`, or an `Engine`, which stays the
                caller's. By default vLLM where it is installed, with the demo model. Not together with `memory`.
            memory: a `Memory` or `AsyncMemory` of inferscale_memory, which brings its engine; it stays the caller's.
            fields: the attributes of this class and of LlamaIndex's `LLM`.

        Raises:
            ConfigurationError: both, or a memory of another library.
            TypeError: a field that does not exist: a misspelt user_id would be nobody's.
            pydantic.ValidationError: a field that cannot be.
        """
        fields = with_top_k(fields)
        written = fields.pop(_BEHIND, None)
        for name in fields:
            if name not in type(self).model_fields:
                raise TypeError(
                    f"InferScaleLLM has no field {name!r}: it has {', '.join(type(self).model_fields)}"
                )
        if written is None or engine is not None or memory is not None:
            chat: Chat | None = Chat(engine, memory)
        else:
            chat = _found(written)
        fields.update({name: id_in(fields[name], name) for name in IDS if name in fields})
        super().__init__(**fields)
        self._stand_on(chat, engine, written)

    @property
    def k(self) -> int | None:
        """The same as `top_k`."""
        return self.top_k

    @k.setter
    def k(self, top_k: int | None) -> None:
        self.top_k = top_k

    @classmethod
    def class_name(cls) -> str:
        """The name under which it is serialized. The engine and the memory are not: `from_dict` takes them, and finds
        them by itself in the process in which `to_dict` was called."""
        return "InferScaleLLM"

    # -- copies ----------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy over the same engine and memory."""
        memo = {} if memo is None else memo
        for shared in (self._opened, self._engine_given):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """pydantic's copy; `update` takes `engine` and `memory`, too."""
        fields = dict(update or {})
        behind = {name: fields.pop(name) for name in ("engine", "memory") if name in fields}
        copied = super().model_copy(update=fields, deep=deep)
        if behind:
            copied._stand_on(Chat(**behind), behind.get("engine"))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What `pickle` writes: the configuration of the engine. LlamaIndex's own would leave out what is open without
        a word, and the copy would start another engine. Raises CopyError over an open memory or engine."""
        if self._opened is None or self.memory is not None or not is_plain(self._engine_given):
            raise unpicklable(
                "InferScaleLLM", "write down llm.to_dict() instead, and pass memory= or engine= to from_dict"
            )
        return {"fields": dict(self.__dict__), "engine": self._engine_given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["engine"], **state["fields"])  # type: ignore[misc]  # as LlamaIndex's own does

    @model_serializer(mode="wrap")
    def custom_model_dump(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """LlamaIndex's, and the name under which this process finds the engine and the memory again."""
        return {**handler(self), "class_name": self.class_name(), _BEHIND: self._written}

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Any:
        """The memory behind it, or None."""
        return self._chat.memory

    @property
    def engine(self) -> Engine:
        """The engine; started now if it was not, which blocks until it serves."""
        return self._chat.engine

    @property
    def metadata(self) -> LLMMetadata:
        """Starts the engine, unless `model` and `context_window` are set."""
        return LLMMetadata(
            context_window=self.context_window or self.engine.max_model_len,
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model or Path(str(self.engine.tokenizer.name_or_path)).name or "unknown",
        )

    def to_payload(self) -> dict[str, Any]:
        """What observers are told of it: nobody's ids. It starts no engine."""
        return {
            "class_name": self.class_name(),
            "model_name": self.model or "unknown",
            "num_output": self.max_tokens,
            "temperature": self.temperature,
        }

    def tokenize(self, text: str) -> list[int]:
        """Token ids of the model's own tokenizer: what `Settings.tokenizer` and splitters take."""
        text = as_text(text, "text")
        return list(self.engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def close(self) -> None:
        """End the engine, if this object made it."""
        self._chat.close()

    # -- answers ---------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """An answer.

        Args:
            kwargs: `user_id`, `agent_id`, `run_id`, `top_k`, `filters`, `inject`, `tools`, `tool_choice`, and the
                fields of `SamplingOptions`.

        Raises:
            PromptError: an empty question, messages that do not fit, tools that are none.
            ValueError: blocks that are no text, memories of another scope.
            TypeError: an option that does not exist.
        """
        return self._answer(messages, **kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """The same, piece by piece; the last piece carries the report and the tool calls."""
        return self._stream(messages, **kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """See `chat`."""
        return await self._aanswer(messages, **kwargs)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """See `stream_chat`."""
        return await self._astream(messages, **kwargs)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """The answer to `prompt` as a question of the user."""
        return chat_to_completion_decorator(self._answer)(as_text(prompt, "prompt"), **kwargs)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """See `complete`."""
        return stream_chat_to_completion_decorator(self._stream)(as_text(prompt, "prompt"), **kwargs)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """See `complete`."""
        return await achat_to_completion_decorator(self._aanswer)(as_text(prompt, "prompt"), **kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """See `complete`."""
        return await astream_chat_to_completion_decorator(self._astream)(as_text(prompt, "prompt"), **kwargs)

    # -- tools -----------------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or [])
        if user_msg is not None:
            asked = (
                ChatMessage(role=MessageRole.USER, content=user_msg)
                if isinstance(user_msg, str)
                else user_msg
            )
            messages.append(asked)
        required = tool_required and bool(tools)
        return {**kwargs, "messages": messages, "tools": list(tools), "tool_required": required}

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """Where calls are to come one at a time, the first one stays."""
        if not allow_parallel_tool_calls:
            first = next(
                (block for block in response.message.blocks if isinstance(block, ToolCallBlock)), None
            )
            response.message.blocks = [
                block
                for block in response.message.blocks
                if block is first or not isinstance(block, ToolCallBlock)
            ]
            if first is not None:
                calls = response.message.additional_kwargs["tool_calls"]
                response.message.additional_kwargs["tool_calls"] = calls[:1]
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls an answer asks for. Raises ValueError when there are none and there must be."""
        found = [
            ToolSelection(
                tool_id=block.tool_call_id or "",
                tool_name=block.tool_name,
                tool_kwargs=block.tool_kwargs if isinstance(block.tool_kwargs, dict) else {},
            )
            for block in response.message.blocks
            if isinstance(block, ToolCallBlock)
        ]
        if not found and error_on_no_tool_call:
            broken = response.additional_kwargs.get("invalid_tool_calls") or []
            if broken:
                raise ValueError(
                    f"the call of {broken[0]['name'] or 'a tool'!r} cannot be read: {broken[0]['error']}. Raise "
                    "max_tokens if it was cut off"
                )
            raise ValueError("the model called no tool: pass tool_required=True to make it call one")
        return found

    # -- inside ----------------------------------------------------------------------------------------------

    def _stand_on(self, chat: Chat | None, engine: Any, written: Any = None) -> None:
        self._opened, self._engine_given = chat, engine
        if chat is None:
            self._written = written
            return
        named = (
            chat if chat.memory is None else chat.memory
        )  # the app keeps a memory; the engine is this object's
        self._written = {"name": Named.add(named), "default": engine is None and chat.memory is None}

    @property
    def _chat(self) -> Chat:
        if self._opened is None:
            raise ConfigurationError(
                "this InferScaleLLM was written down in another process and has neither engine nor memory here: read "
                "it with InferScaleLLM.from_dict(data, memory=...) or (data, engine=...)"
            )
        return self._opened

    def _read(self, messages: Sequence[ChatMessage], given: Mapping[str, Any]) -> Asked:
        own = {name: getattr(self, name) for name in _OWN}
        asked = asking.read(messages, self.memory, {**own, **self.additional_kwargs}, given)
        if self.memory is not None and not asked.scoped and not self._warned:
            self._warned = True
            warnings.warn(
                "InferScaleLLM has a memory and was told nobody's id, so it answers without memories: pass user_id, "
                "agent_id or run_id to it or to the call, or use it under an InferScaleMemory",
                stacklevel=5,
            )
        return asked

    def _prepared(self, asked: Asked) -> Prepared:
        started = perf_counter()
        memories, search_s = asked.given, asked.search_s
        if memories is None:
            memories = self._chat.recall(asked.question, asked.ids, top_k=asked.top_k, filters=asked.filters)
            search_s = perf_counter() - started
        return self._chat.prepare(asked.messages, asked.ids, memories, **_told(asked), search_s=search_s)

    async def _aprepared(self, asked: Asked) -> Prepared:
        started = perf_counter()
        memories, search_s = asked.given, asked.search_s
        if memories is None:
            memories = await self._chat.arecall(asked.question, asked.ids, top_k=asked.top_k, filters=asked.filters)
            search_s = perf_counter() - started
        return await self._chat.aprepare(
            asked.messages, asked.ids, memories, **_told(asked), search_s=search_s
        )

    def _answer(self, messages: Sequence[ChatMessage], **given: Any) -> ChatResponse:
        asked = self._read(messages, given)
        reply = self._chat.answer(self._prepared(asked), asked.options, inject=asked.inject)
        return to_response(reply, asked.ids)

    async def _aanswer(self, messages: Sequence[ChatMessage], **given: Any) -> ChatResponse:
        asked = self._read(messages, given)
        reply = await self._chat.aanswer(await self._aprepared(asked), asked.options, inject=asked.inject)
        return to_response(reply, asked.ids)

    def _stream(self, messages: Sequence[ChatMessage], **given: Any) -> ChatResponseGen:
        asked = self._read(messages, given)
        prepared = self._prepared(asked)

        def pieces() -> ChatResponseGen:
            text = ""
            for chunk in self._chat.stream(prepared, asked.options, inject=asked.inject):
                text += chunk.text
                yield _piece(asked, text, chunk.text, chunk.reply)

        return pieces()

    async def _astream(self, messages: Sequence[ChatMessage], **given: Any) -> ChatResponseAsyncGen:
        asked = self._read(messages, given)
        prepared = await self._aprepared(asked)

        async def pieces() -> ChatResponseAsyncGen:
            text = ""
            async for chunk in self._chat.astream(prepared, asked.options, inject=asked.inject):
                text += chunk.text
                yield _piece(asked, text, chunk.text, chunk.reply)

        return pieces()


def _found(written: Mapping[str, Any]) -> Chat | None:
    """What was behind an LLM that was written down: here still, the default engine anew, or None."""
    found = Named.find(written.get("name"))
    if found is None:
        return Chat() if written.get("default") else None
    return found if isinstance(found, Chat) else Chat(memory=found)


def _told(asked: Asked) -> dict[str, Any]:
    return {"max_tokens": asked.options.max_tokens, "tools": asked.tools, "tool_choice": asked.tool_choice}


def _piece(asked: Asked, text: str, delta: str, reply: Reply | None) -> ChatResponse:
    if reply is not None:
        return to_response(reply, asked.ids, delta)
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)
