"""`InferScaleMemory`: mem0's memory for LlamaIndex, with facts that an `InferScaleLLM` injects.

The history of the conversation is kept apart, in a memory of LlamaIndex's own; facts live in `inferscale_memory`. One
turn is one search and one `add`. Under any other LLM the facts are a system message. It must never lose an answer
because remembering it failed, and never show anybody's memory to somebody else.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Self

from inferscale_memory import AsyncMemory as InferScaleAsyncClient
from inferscale_memory import Chat
from inferscale_memory import Memory as InferScaleClient
from inferscale_memory.arguments import as_count, as_text, refusal
from inferscale_memory.deprecation import with_top_k
from inferscale_memory.errors import ConfigurationError
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr, SerializeAsAny, model_serializer
from llama_index.core.memory import BaseMemory, Memory
from llama_index.core.memory.memory import DEFAULT_TOKEN_LIMIT
from llama_index.core.storage.chat_store.sql import SQLAlchemyChatStore

from llama_index.llms.inferscale.copying import Named, unpicklable
from llama_index.llms.inferscale.door import messages_in
from llama_index.llms.inferscale.recollection import Recollection, carry, own_words
from llama_index.memory.inferscale.context import InferScaleContext
from llama_index.memory.inferscale.turn import Turn

logger = logging.getLogger(__name__)

Client = InferScaleClient | InferScaleAsyncClient
_HISTORY, _STATE = "chat_history", "state"


class InferScaleMemory(BaseMemory):
    """A conversation's history, and what is remembered of its user."""

    primary_memory: SerializeAsAny[BaseMemory] = Field(description="The history of this conversation.")
    context: InferScaleContext = Field(description="Whose facts.")
    search_msg_limit: int = Field(
        default=5,
        ge=0,
        description="How many messages of the history go into the search, behind the question.",
    )
    top_k: int | None = Field(
        default=None,
        ge=0,
        description="How many facts a question recalls, `k` for short; the client's own number by default.",
    )
    filters: dict[str, Any] | None = Field(default=None, description="mem0's filters, beyond the ids.")
    infer: bool = Field(
        default=True, description="Draw facts out of a turn with an LLM; otherwise keep the user's own words."
    )

    _opened: Chat | None = PrivateAttr(default=None)
    _name: str | None = PrivateAttr(default=None)
    _owned: bool = PrivateAttr(default=False)
    _turn: Turn = PrivateAttr(default_factory=Turn)
    _warned: bool = PrivateAttr(default=False)

    def __init__(
        self,
        client: Client | None = None,
        context: InferScaleContext | Mapping[str, Any] | None = None,
        primary_memory: BaseMemory | None = None,
        **fields: Any,
    ) -> None:
        """
        Args:
            client: a `Memory` or `AsyncMemory` of inferscale_memory, open; it stays the caller's. None only where it
                is set later, as after `from_dict`.
            context: `user_id`, `agent_id`, `run_id`; at least one.
            primary_memory: where the history is kept; by default a `Memory` of LlamaIndex's.
            fields: the attributes of this class.

        Raises:
            ValueError: no scope.
            ConfigurationError: a client of another library.
            TypeError: a field that does not exist.
        """
        history = [ChatMessage(**said) for said in fields.pop(_HISTORY, None) or []]
        state = fields.pop(_STATE, None) or {}
        fields.pop("class_name", None)
        fields = with_top_k(fields)
        for name in fields:
            if name not in type(self).model_fields:
                raise TypeError(
                    f"InferScaleMemory has no field {name!r}: it has {', '.join(type(self).model_fields)}"
                )
        whose = InferScaleContext.read(context)
        if primary_memory is not None and not isinstance(primary_memory, BaseMemory):
            raise refusal("primary_memory", primary_memory, "a memory of LlamaIndex's")
        kept = primary_memory or _history(history, state.get("history") or {})
        super().__init__(**{**fields, "primary_memory": kept, "context": whose})
        self._turn = Turn.behind(history)
        self._warned = bool(state.get("warned"))
        client = Named.find(state.get("client")) if client is None else client
        if client is not None:
            self.client = client

    @property
    def k(self) -> int | None:
        """The same as `top_k`."""
        return self.top_k

    @k.setter
    def k(self, top_k: int | None) -> None:
        self.top_k = top_k

    @classmethod
    def class_name(cls) -> str:
        """The name under which it is serialized."""
        return "InferScaleMemory"

    # -- how it is made --------------------------------------------------------------------------------------

    @classmethod
    def from_defaults(
        cls,
        client: Client | None = None,
        context: InferScaleContext | Mapping[str, Any] | None = None,
        chat_history: list[ChatMessage] | None = None,
        token_limit: int | None = None,
        tokenizer_fn: Callable[[str], list[Any]] | None = None,
        **fields: Any,
    ) -> Self:
        """A memory over an open client.

        Args:
            chat_history: the history so far; its turns are taken to be remembered already.
            token_limit: most tokens of the history; LlamaIndex's `Memory` keeps about 0.7 of them.
            tokenizer_fn: counts them, such as `InferScaleLLM.tokenize`; by default LlamaIndex's own, of another model.
            fields: as in the constructor.

        Raises:
            ConfigurationError: no client, or one of another library.
            ValueError: no scope.
        """
        if client is None:
            raise ConfigurationError(
                "no client: pass an open Memory or AsyncMemory of inferscale_memory, or use from_config"
            )
        kept = Memory.from_defaults(
            chat_history=None if chat_history is None else messages_in(chat_history, "chat_history"),
            token_limit=DEFAULT_TOKEN_LIMIT
            if token_limit is None
            else as_count(token_limit, "token_limit", least=1),
            tokenizer_fn=tokenizer_fn,
        )
        return cls(client=client, context=context, primary_memory=kept, **fields)

    @classmethod
    def from_client(
        cls,
        context: InferScaleContext | Mapping[str, Any],
        client: Client | None = None,
        search_msg_limit: int = 5,
        **fields: Any,
    ) -> Self:
        """The same with the arguments in the order of LlamaIndex's memory for mem0. That one opens mem0's hosted
        service, which holds no keys and values: its `api_key` and the like are refused."""
        for name in ("api_key", "host", "org_id", "project_id"):
            if fields.pop(name, None) is not None:
                raise ConfigurationError(
                    f"{name} is of mem0's hosted service, out of which nothing can be injected: pass "
                    "client=Memory(...) of inferscale_memory, and bring your facts along with `inferscale migrate`"
                )
        return cls.from_defaults(client=client, context=context, search_msg_limit=search_msg_limit, **fields)

    @classmethod
    def from_config(
        cls,
        context: InferScaleContext | Mapping[str, Any],
        config: Mapping[str, Any],
        search_msg_limit: int = 5,
        **fields: Any,
    ) -> Self:
        """A memory with a client of its own, which `close` closes. `config` is mem0's configuration, with `engine`,
        `injection` and `folder` added at will."""
        whose = InferScaleContext.read(context)
        if not isinstance(config, Mapping):
            raise refusal("config", config, "mem0's configuration as a dictionary")
        client = InferScaleClient.from_config(config)
        try:
            memory = cls.from_defaults(
                client=client, context=whose, search_msg_limit=search_msg_limit, **fields
            )
        except BaseException:
            client.close()
            raise
        memory._owned = True
        return memory

    @property
    def client(self) -> Client:
        """The memory behind it. Raises ConfigurationError where there is none yet."""
        client: Client = self._chat.memory
        return client

    @client.setter
    def client(self, client: Client) -> None:
        if client is None:
            raise ConfigurationError(
                "client is None: set it to an open Memory or AsyncMemory of inferscale_memory"
            )
        self._opened = Chat(memory=client)
        self._name = Named.add(client)

    def close(self) -> None:
        """Close the client, if this object made it."""
        if self._owned:
            self.client.close()

    # -- copies ----------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Another conversation over the same client, with a history of its own that begins as this one stands. A
        history in a database stays that database's."""
        memo = {} if memo is None else memo
        memo[id(self._opened)] = self._opened
        kept = self.primary_memory
        if isinstance(kept, Memory):
            memo[id(kept.tokenizer_fn)] = kept.tokenizer_fn
            if isinstance(kept.sql_store, SQLAlchemyChatStore):  # holds connections, and says what is in it
                memo[id(kept.sql_store)] = SQLAlchemyChatStore(**kept.sql_store.model_dump())
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        """Raises CopyError: LlamaIndex's own takes what it cannot pickle out of this very object."""
        raise unpicklable(
            "InferScaleMemory", "write down memory.to_dict() instead, and pass client= to from_dict"
        )

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, input: str | None = None, **kwargs: Any) -> list[ChatMessage]:
        """The history, and what is remembered about the question: `input`, else the user's last words.

        The memories are one system message. An `InferScaleLLM` of the same client takes it out and injects what it
        says.
        """
        input = None if input is None else as_text(input, "input")
        messages = self.primary_memory.get(input=input, **kwargs)
        found = self.recall(messages, input)
        return messages if found is None else carry(messages, found)

    async def aget(self, input: str | None = None, **kwargs: Any) -> list[ChatMessage]:
        """See `get`."""
        input = None if input is None else as_text(input, "input")
        messages = await self.primary_memory.aget(input=input, **kwargs)
        found = await self.arecall(messages, input)
        return messages if found is None else carry(messages, found)

    def recall(self, messages: Sequence[ChatMessage], input: str | None = None) -> Recollection | None:
        """What is remembered about the question; searched for once a turn, and again where some of it was forgotten
        or changed since. None without a question."""
        question, query = self._asked(messages, input)
        if not question:
            return None
        known = self._turn.recalled(question, fresh=input is not None)
        if known is None or not self._is_own(known) or not self._chat.is_current(known.results):
            started = perf_counter()
            results = self._chat.recall(query, self.context.ids, top_k=self.top_k, filters=self.filters)
            known = self._found(results, messages, perf_counter() - started)
            self._turn.recall(question, known)
        return known

    async def arecall(self, messages: Sequence[ChatMessage], input: str | None = None) -> Recollection | None:
        """See `recall`."""
        question, query = self._asked(messages, input)
        if not question:
            return None
        known = self._turn.recalled(question, fresh=input is not None)
        if known is None or not self._is_own(known) or not await self._chat.ais_current(known.results):
            started = perf_counter()
            results = await self._chat.arecall(query, self.context.ids, top_k=self.top_k, filters=self.filters)
            known = self._found(results, messages, perf_counter() - started)
            self._turn.recall(question, known)
        return known

    def get_all(self) -> list[ChatMessage]:
        """The history alone."""
        return self.primary_memory.get_all()

    async def aget_all(self) -> list[ChatMessage]:
        """See `get_all`."""
        return await self.primary_memory.aget_all()

    # -- writing ---------------------------------------------------------------------------------------------

    def put(self, message: ChatMessage) -> None:
        """Another message of the conversation. With the answer the turn is remembered, in one `add`."""
        self.put_messages([message])

    async def aput(self, message: ChatMessage) -> None:
        """See `put`."""
        await self.aput_messages([message])

    def put_messages(self, messages: list[ChatMessage]) -> None:
        """See `put`. Where remembering fails the history is written all the same, and the failure is logged; what was
        said waits in the client's `failed_adds`."""
        messages = own_words(messages_in(messages))
        if not messages:
            return
        self.primary_memory.put_messages(messages)
        said = self._heard(messages)
        if said:
            try:
                self._chat.remember(said, self.context.ids, infer=self.infer)
            except Exception:
                logger.warning(_NOT_REMEMBERED, exc_info=True)

    async def aput_messages(self, messages: list[ChatMessage]) -> None:
        """See `put_messages`."""
        messages = own_words(messages_in(messages))
        if not messages:
            return
        await self.primary_memory.aput_messages(messages)
        said = self._heard(messages)
        if said:
            try:
                await self._chat.aremember(said, self.context.ids, infer=self.infer)
            except Exception:
                logger.warning(_NOT_REMEMBERED, exc_info=True)

    def set(self, messages: list[ChatMessage]) -> None:
        """Another history. Its turns are taken to be remembered already; what stands behind its last answer is
        remembered when it is answered."""
        messages = own_words(messages_in(messages))
        self.primary_memory.set(messages)
        self._turn = Turn.behind(messages)

    async def aset(self, messages: list[ChatMessage]) -> None:
        """See `set`."""
        messages = own_words(messages_in(messages))
        await self.primary_memory.aset(messages)
        self._turn = Turn.behind(messages)

    def reset(self) -> None:
        """Forget the history. Facts stay: `client.delete_all` forgets them."""
        self.primary_memory.reset()
        self._turn = Turn()

    async def areset(self) -> None:
        """See `reset`."""
        await self.primary_memory.areset()
        self._turn = Turn()

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _chat(self) -> Chat:
        if self._opened is None:
            raise ConfigurationError(
                "this InferScaleMemory was written down in another process and has no client: set `memory.client` to "
                "an open Memory or AsyncMemory of inferscale_memory"
            )
        return self._opened

    def _asked(self, messages: Sequence[ChatMessage], input: str | None) -> tuple[str, str]:
        """The question, and what to search for: the question first, because an embedder reads only so far."""
        said = [message for message in messages if message.role in _SPEAKERS and message.content]
        question = "" if input is None else as_text(input, "input").strip()
        if not question:
            while said and said[-1].role is not MessageRole.USER:
                said.pop()
            question = (said.pop().content or "").strip() if said else ""
        before = said[-self.search_msg_limit :] if self.search_msg_limit else []
        return question, "\n".join([question, *(message.content or "" for message in reversed(before))])

    def _found(
        self, results: Sequence[Mapping[str, Any]], messages: Sequence[ChatMessage], search_s: float
    ) -> Recollection:
        """What was recalled, without what the history says word for word: the prompt holds that already."""
        said = {(message.content or "").strip() for message in messages}
        new = [result for result in results if str(result.get("memory") or "").strip() not in said]
        return Recollection(self.client, self.context.ids, new, search_s)

    def _is_own(self, found: Recollection) -> bool:
        """Whether something was recalled for this scope, out of this client: a copy may have been given others."""
        return found.memory is self.client and found.ids == self.context.ids

    def _heard(self, messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
        """What is to be remembered of messages that were put. Without an LLM that draws facts out of them, the
        assistant's words are none."""
        said = [heard for message in messages for heard in self._turn.hear(message)]
        self._say_if_text()
        return [
            {
                "role": "user" if message.role is MessageRole.USER else "assistant",
                "content": message.content or "",
            }
            for message in said
            if self.infer or message.role is MessageRole.USER
        ]

    def _say_if_text(self) -> None:
        if self._turn.untaken and not self._warned:
            self._warned = True
            warnings.warn(
                "memories were sent as text, because the LLM or the chat engine cannot inject them: use "
                "InferScaleLLM(memory=...) of llama_index.llms.inferscale, with the same memory",
                stacklevel=4,
            )

    @model_serializer
    def _serialize(self) -> dict[str, Any]:
        """Everything but the client, which only this process finds again; the history as it stands, whatever keeps
        it."""
        return {
            "context": self.context.ids,
            "search_msg_limit": self.search_msg_limit,
            "top_k": self.top_k,
            "filters": self.filters,
            "infer": self.infer,
            _STATE: {"client": self._name, "warned": self._warned, "history": _limits(self.primary_memory)},
            _HISTORY: [message.model_dump() for message in self.get_all()],
            "class_name": self.class_name(),
        }


def _history(messages: list[ChatMessage], limits: Mapping[str, Any]) -> Memory:
    """A history that holds `messages`, as long as `limits` let it be."""
    if not limits:
        return Memory.from_defaults(chat_history=messages)
    kept = Memory(**limits)
    kept.set(messages)
    return kept


def _limits(kept: BaseMemory) -> dict[str, Any]:
    """How long a history of LlamaIndex's becomes."""
    return {name: getattr(kept, name) for name in _LIMITS} if isinstance(kept, Memory) else {}


_LIMITS = ("token_limit", "token_flush_size", "chat_history_token_ratio")
_SPEAKERS = (MessageRole.USER, MessageRole.ASSISTANT)
_NOT_REMEMBERED = (
    "a turn was answered but could not be remembered: see failed_adds() of the client, and try again with "
    "retry_failed()"
)
