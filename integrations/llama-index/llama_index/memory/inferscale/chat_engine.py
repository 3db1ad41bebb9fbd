"""`InferScaleChatEngine`: a chat engine that remembers its users, over documents or without.

A turn recalls, retrieves, asks, and writes: history and memory only when the answer is there. The prompt is
[system text] [memories, injected] [history] [documents and question]. With another LLM the memories stand there as
text. It must never write a turn whose answer has not come to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Self

from inferscale_memory.arguments import as_text, refusal
from inferscale_memory.errors import ConfigurationError
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    MessageRole,
)
from llama_index.core.callbacks import CallbackManager, trace_method
from llama_index.core.chat_engine.types import (
    AgentChatResponse,
    BaseChatEngine,
    StreamingAgentChatResponse,
)
from llama_index.core.llms.llm import LLM
from llama_index.core.memory import BaseMemory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.tools import ToolOutput
from llama_index.core.types import Thread
from llama_index.core.utils import get_tokenizer

from llama_index.llms.inferscale import InferScaleLLM
from llama_index.llms.inferscale.copying import unpicklable
from llama_index.llms.inferscale.door import messages_in
from llama_index.llms.inferscale.recollection import recollection_in
from llama_index.memory.inferscale.base import Client, InferScaleMemory
from llama_index.memory.inferscale.documents import Templates, parts
from llama_index.memory.inferscale.nodes import memory_nodes, settle

_IDS = ("user_id", "agent_id", "run_id")


@dataclass
class InferScaleStreamingResponse(StreamingAgentChatResponse):
    """LlamaIndex's streaming response. `metadata` is the LLM's report, there when the stream has ended."""

    metadata: dict[str, Any] | None = None


@dataclass(slots=True)
class _Turn:
    """A question on its way: what goes before it, the parts of the documents, and the sources of the answer."""

    question: str
    before: list[ChatMessage]
    parts: list[str | None]
    templates: Templates
    memories: list[NodeWithScore]
    documents: list[NodeWithScore]
    retrieved: bool
    answer: str | None = field(default=None)

    def messages(self, part: str | None) -> list[ChatMessage]:
        return [*self.before, self.templates.question(self.question, part, self.answer)]

    @property
    def nodes(self) -> list[NodeWithScore]:
        return [*self.memories, *self.documents]

    @property
    def sources(self) -> list[ToolOutput]:
        if not self.retrieved:
            return []
        return [
            ToolOutput(
                tool_name="retriever",
                content=str(self.documents),
                raw_input={"message": self.question},
                raw_output=self.documents,
            )
        ]

    @property
    def user_message(self) -> ChatMessage:
        """What the history keeps: the question, and not the documents."""
        return ChatMessage(role=MessageRole.USER, content=self.question)


class InferScaleChatEngine(BaseChatEngine):
    """Chat with memories, and with documents where there is a retriever."""

    def __init__(
        self,
        llm: LLM,
        memory: InferScaleMemory,
        prefix_messages: Sequence[ChatMessage] = (),
        retriever: BaseRetriever | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = None,
        context_template: str | PromptTemplate | None = None,
        context_refine_template: str | PromptTemplate | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """See `from_defaults`. Raises ConfigurationError on a part that is none."""
        parts_given: tuple[tuple[str, Any, Any, str], ...] = (
            ("llm", llm, LLM, "an LLM of LlamaIndex's, such as InferScaleLLM(memory=...)"),
            ("memory", memory, InferScaleMemory, "an InferScaleMemory"),
            ("retriever", retriever, BaseRetriever | None, "a retriever of LlamaIndex's"),
            ("context_template", context_template, str | BasePromptTemplate | None, "a template or its text"),
            (
                "context_refine_template",
                context_refine_template,
                str | BasePromptTemplate | None,
                "a template",
            ),
        )
        for name, part, kind, expected in parts_given:
            if not isinstance(part, kind):
                raise refusal(name, part, expected)
        self._llm = llm
        self._memory = memory
        self._prefix_messages = messages_in(prefix_messages, "prefix_messages")
        self._retriever = retriever
        self._node_postprocessors = _postprocessors(node_postprocessors)
        self._templates = Templates.read(context_template, context_refine_template)
        self.callback_manager = callback_manager or CallbackManager([])
        for postprocessor in self._node_postprocessors:
            postprocessor.callback_manager = self.callback_manager

    @classmethod
    def from_defaults(
        cls,
        memory: InferScaleMemory | Client,
        llm: LLM | None = None,
        *,
        retriever: BaseRetriever | None = None,
        system_prompt: str | None = None,
        prefix_messages: Sequence[ChatMessage] | None = None,
        chat_history: list[ChatMessage] | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] | None = None,
        context_template: str | PromptTemplate | None = None,
        context_refine_template: str | PromptTemplate | None = None,
        context: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Self:
        """A chat engine for one conversation. It starts the LLM's engine, whose context window limits the history.

        Args:
            memory: an `InferScaleMemory`, or a `Memory` or `AsyncMemory` of inferscale_memory together with `user_id`,
                `agent_id` or `run_id` (or `context`), of which one is made.
            llm: by default an `InferScaleLLM` over the same memory. Any other gets the memories as text.
            retriever, node_postprocessors, context_template, context_refine_template, prefix_messages: as
                `ContextChatEngine` takes them.
            system_prompt: not together with `prefix_messages`.
            chat_history: the history so far.
            fields: ids, and fields of the `InferScaleMemory` that is made.

        Raises:
            ValueError: no scope, or both a system prompt and prefix messages.
            ConfigurationError: a memory that is neither, or fields of a memory that is made already.
        """
        if system_prompt is not None and prefix_messages is not None:
            raise ValueError("Cannot specify both system_prompt and prefix_messages")
        system_prompt = None if system_prompt is None else as_text(system_prompt, "system_prompt")
        if llm is not None and not isinstance(llm, LLM):
            raise refusal("llm", llm, "an LLM of LlamaIndex's, such as InferScaleLLM(memory=...)")
        if isinstance(memory, InferScaleMemory):
            if context or fields:
                names = ", ".join([*fields, *(["context"] if context else [])])
                raise ConfigurationError(
                    f"an InferScaleMemory knows its {names}: leave them out, or pass its client"
                )
            kept = memory
            llm = llm or InferScaleLLM(memory=kept.client)
            if chat_history is not None:
                kept.set(chat_history)
        else:
            if memory is None:  # the LLM would start an engine of its own
                raise refusal(
                    "memory", memory, "an InferScaleMemory, or a Memory or AsyncMemory of inferscale_memory"
                )
            if isinstance(memory, BaseMemory):
                raise ConfigurationError(
                    f"memory is a {type(memory).__name__}, which keeps a history and remembers nobody: pass "
                    "InferScaleMemory(client=..., context={'user_id': ...}, primary_memory=that one)"
                )
            ids = {**(context or {}), **{name: fields.pop(name) for name in _IDS if name in fields}}
            llm = llm or InferScaleLLM(memory=memory)
            fields.setdefault("token_limit", max(llm.metadata.context_window - 256, 1))
            if isinstance(
                llm, InferScaleLLM
            ):  # another model's tokens would let a history outgrow the context
                fields.setdefault("tokenizer_fn", llm.tokenize)
            kept = InferScaleMemory.from_defaults(memory, ids, chat_history, **fields)
        if system_prompt is not None:
            prefix_messages = [ChatMessage(content=system_prompt, role=llm.metadata.system_role)]
        return cls(
            llm,
            kept,
            () if prefix_messages is None else prefix_messages,
            retriever=retriever,
            node_postprocessors=node_postprocessors,
            context_template=context_template,
            context_refine_template=context_refine_template,
            callback_manager=Settings.callback_manager,
        )

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another conversation, whose history begins as this one stands, over the same memory, LLM and retriever."""
        twin = self.__copy__()
        memo[id(self)] = twin
        twin._memory = deepcopy(self._memory, memo)
        twin._prefix_messages = deepcopy(self._prefix_messages, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable(
            "InferScaleChatEngine",
            "write down engine.memory.to_dict() instead, and make the engine anew from it",
        )

    @property
    def memory(self) -> InferScaleMemory:
        """History and facts of this conversation."""
        return self._memory

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The history: what was asked and answered, without memories and documents."""
        return self._memory.get_all()

    def reset(self) -> None:
        """Begin a new conversation. What is remembered stays."""
        self._memory.reset()

    # -- a turn ----------------------------------------------------------------------------------------------

    @trace_method("chat")
    def chat(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        prev_chunks: list[NodeWithScore] | None = None,
    ) -> AgentChatResponse:
        """An answer, whose `source_nodes` are the memories and the documents it knew, and whose `metadata` is the
        LLM's report.

        Args:
            chat_history: takes the place of the history so far.
            prev_chunks: documents to use where the retriever finds none.

        Raises:
            PromptError: an empty message, or a conversation that does not fit.
        """
        turn = self._begin(message, chat_history, prev_chunks)
        for part in turn.parts:
            response = self._llm.chat(turn.messages(part))
            turn.answer = response.message.content or ""
        self._memory.put_messages([turn.user_message, _assistant(turn.answer or "")])
        return _answered(turn, response)

    @trace_method("chat")
    async def achat(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        prev_chunks: list[NodeWithScore] | None = None,
    ) -> AgentChatResponse:
        """See `chat`."""
        turn = await self._abegin(message, chat_history, prev_chunks)
        for part in turn.parts:
            response = await self._llm.achat(turn.messages(part))
            turn.answer = response.message.content or ""
        await self._memory.aput_messages([turn.user_message, _assistant(turn.answer or "")])
        return _answered(turn, response)

    @trace_method("chat")
    def stream_chat(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        prev_chunks: list[NodeWithScore] | None = None,
    ) -> InferScaleStreamingResponse:
        """The same, piece by piece. History and memory are written when the stream has ended; then the nodes say what
        was injected."""
        turn = self._begin(message, chat_history, prev_chunks)
        for part in turn.parts[:-1]:
            turn.answer = self._llm.chat(turn.messages(part)).message.content or ""
        stream = self._llm.stream_chat(turn.messages(turn.parts[-1]))
        streaming = InferScaleStreamingResponse(sources=turn.sources, source_nodes=turn.nodes)

        def pieces() -> ChatResponseGen:
            for piece in stream:
                _note(turn, streaming, piece)
                yield piece
            self._memory.put(turn.user_message)

        streaming.chat_stream = pieces()
        thread = Thread(target=streaming.write_response_to_history, args=(self._memory,))
        streaming.write_response_to_history_thread = thread
        thread.start()
        return streaming

    @trace_method("chat")
    async def astream_chat(
        self,
        message: str,
        chat_history: list[ChatMessage] | None = None,
        prev_chunks: list[NodeWithScore] | None = None,
    ) -> InferScaleStreamingResponse:
        """See `stream_chat`."""
        turn = await self._abegin(message, chat_history, prev_chunks)
        for part in turn.parts[:-1]:
            turn.answer = (await self._llm.achat(turn.messages(part))).message.content or ""
        stream = await self._llm.astream_chat(turn.messages(turn.parts[-1]))
        streaming = InferScaleStreamingResponse(sources=turn.sources, source_nodes=turn.nodes)

        async def pieces() -> ChatResponseAsyncGen:
            async for piece in stream:
                _note(turn, streaming, piece)
                yield piece
            await self._memory.aput(turn.user_message)

        streaming.achat_stream = pieces()
        streaming.awrite_response_to_history_task = asyncio.create_task(
            streaming.awrite_response_to_history(self._memory)
        )
        return streaming

    # -- inside ----------------------------------------------------------------------------------------------

    def _begin(
        self, message: str, chat_history: list[ChatMessage] | None, chunks: list[NodeWithScore] | None
    ) -> _Turn:
        if chat_history is not None:
            self._memory.set(chat_history)
        documents = []
        message, chunks = as_text(message, "message"), _nodes(chunks)
        if self._retriever is not None:
            documents = self._retriever.retrieve(message)
            for postprocessor in self._node_postprocessors:
                documents = postprocessor.postprocess_nodes(documents, query_bundle=QueryBundle(message))
        return self._turn(message, self._memory.get(input=message), documents or chunks or [])

    async def _abegin(
        self, message: str, chat_history: list[ChatMessage] | None, chunks: list[NodeWithScore] | None
    ) -> _Turn:
        if chat_history is not None:
            await self._memory.aset(chat_history)
        documents = []
        message, chunks = as_text(message, "message"), _nodes(chunks)
        if self._retriever is not None:
            documents = await self._retriever.aretrieve(message)
            for postprocessor in self._node_postprocessors:
                documents = await postprocessor.apostprocess_nodes(
                    documents, query_bundle=QueryBundle(message)
                )
        return self._turn(message, await self._memory.aget(input=message), documents or chunks or [])

    def _turn(self, message: str, history: list[ChatMessage], documents: list[NodeWithScore]) -> _Turn:
        before = [*self._prefix_messages, *history]
        tokenize = self._llm.tokenize if isinstance(self._llm, InferScaleLLM) else get_tokenizer()
        cut: list[str | None] = [None]
        if documents:
            cut = parts(documents, before, message, self._templates, self._llm.metadata, tokenize)
        return _Turn(
            message,
            before,
            cut,
            self._templates,
            memory_nodes(recollection_in(history)),
            documents,
            self._retriever is not None,
        )


def _postprocessors(given: Any) -> list[BaseNodePostprocessor]:
    if given is None:
        return []
    if not isinstance(given, list | tuple) or not all(
        isinstance(one, BaseNodePostprocessor) for one in given
    ):
        raise refusal("node_postprocessors", given, "a list of LlamaIndex's node postprocessors")
    return list(given)


def _nodes(given: Any) -> list[NodeWithScore] | None:
    if given is None:
        return None
    if not isinstance(given, list | tuple) or not all(isinstance(one, NodeWithScore) for one in given):
        raise refusal("prev_chunks", given, "a list of NodeWithScore")
    return list(given)


def _assistant(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)


def _answered(turn: _Turn, response: ChatResponse) -> AgentChatResponse:
    settle(turn.memories, response.raw)
    metadata = response.raw if isinstance(response.raw, dict) else None
    return AgentChatResponse(
        response=turn.answer or "", sources=turn.sources, source_nodes=turn.nodes, metadata=metadata
    )


def _note(turn: _Turn, streaming: InferScaleStreamingResponse, piece: ChatResponse) -> None:
    """What the last piece of a stream reports."""
    if isinstance(piece.raw, dict):
        settle(turn.memories, piece.raw)
        streaming.metadata = piece.raw
