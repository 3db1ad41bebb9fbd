"""Long-term memory for any agent: it recalls once a turn, and writes the turn down when it is finished.

It must never break an agent: a memory that is slow or fails costs the memories of one turn, with a warning. What an
app got wrong is an error all the same: nobody named whose memories are meant.
"""

from __future__ import annotations

import asyncio
import logging
import re
import warnings
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from threading import Lock
from time import monotonic
from typing import Any

from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableBinding
from langgraph.runtime import Runtime

from inferscale_memory import Chat
from inferscale_memory.arguments import as_count, as_flag, as_mapping, as_number, as_plain, as_text, optional
from inferscale_memory.deprecation import one_top_k
from inferscale_memory.errors import ConfigurationError, ExtractionError
from langchain_inferscale.chat_models import ChatInferScale
from langchain_inferscale.copying import Shared
from langchain_inferscale.expiry import living
from langchain_inferscale.scope import DEFAULT_KEYS, Ids, checked_keys, demanded, ids_of_config, read_ids

_log = logging.getLogger(__name__)
_NAME = "InferScaleMemoryMiddleware"
_HEADING = "You remember the following from earlier conversations:"
_MARKUP = re.compile(r"<(?=\S)|\[(?=/?[A-Z_]+\])")
"""Where what may be a control token begins: `<|im_end|>`, `</s>`, `[INST]`. System texts are trusted, memories not."""
_TURNS_KEPT = 256
_TURN_S = 600.0
"""A turn that is taken up again later, after an interrupt, recalls anew: something may have been forgotten since."""

Found = Sequence[Mapping[str, Any]]


class InferScaleMemoryMiddleware(Shared, AgentMiddleware[AgentState[Any], Any, Any]):
    """Recalls what the user's last words bring up, hands it to the model, and remembers the turn.

    A `ChatInferScale` over the same memory is given the memories themselves, and injects them. Any other model reads
    them at the end of its system text, which is said once. Whose memories are meant is said by the agent's `context`
    (`agent.invoke(..., context={"user_id": ...})`), else by `config["configurable"]`, else in the constructor.

    What is written down are the user's words and the model's last ones; tools and their results are not. Nothing of a
    memory is kept in the agent's state, or in a checkpoint of it.
    """

    _shared = ("_chat", "_turns", "_threads")

    def __init__(
        self,
        memory: Any,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        scope_keys: Mapping[str, str] = DEFAULT_KEYS,
        top_k: int | None = None,
        k: int | None = None,
        filters: Mapping[str, Any] | None = None,
        write: bool = True,
        answers: bool = True,
        infer: bool = True,
        recall_timeout: float = 5.0,
        write_timeout: float = 60.0,
        heading: str = _HEADING,
    ) -> None:
        """
        Args:
            memory: a `Memory` or `AsyncMemory`, open; it stays the caller's.
            user_id, agent_id, run_id: whose memories, where neither context nor config says.
            scope_keys: which key of context or config says which id.
            top_k: how many memories a turn recalls; by default the memory's own number. `k` is short for it.
            filters: mem0's filters, beyond the ids.
            write: False recalls only.
            answers: False writes the user's words and not the model's.
            infer: as `add` takes it: True has an LLM draw facts out of the turn, False keeps its words.
            recall_timeout: seconds after which the model is called without memories.
            write_timeout: seconds after which an agent no longer waits for its turn to be written; the write goes
                on in the background.
            heading: stands above memories that are read as text.

        Raises:
            ConfigurationError: a memory that is none, ids or options that cannot be.
        """
        super().__init__()
        if memory is None:
            raise ConfigurationError(f"{_NAME} has no memory: pass a Memory or an AsyncMemory")
        self.tools = ()
        self._chat = Chat(memory=memory)
        self._ids = read_ids({"user_id": user_id, "agent_id": agent_id, "run_id": run_id})
        self._keys = checked_keys(scope_keys)
        self._top_k = optional(as_count)(one_top_k(top_k, k), "top_k")
        self._filters = None if filters is None else as_plain(as_mapping(filters, "filters"), "filters")
        self._write = as_flag(write, "write")
        self._answers = as_flag(answers, "answers")
        self._infer = as_flag(infer, "infer")
        self._recall_timeout = as_number(recall_timeout, "recall_timeout", least=0)
        self._write_timeout = as_number(write_timeout, "write_timeout", least=0)
        self._heading = as_text(heading, "heading")
        self._turns = _Turns()
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="inferscale-memory")
        self._told = False

    # -- before the model ------------------------------------------------------------------------------------

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        scope = self._scope(request.runtime)
        turn = _Turn.of(request.messages, scope)
        found = self._turns.get(turn)
        if found is None or not self._stand(found):
            found = self._turns.keep(turn, self._recall(turn, scope))
        return handler(self._with(request, scope, found))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        scope = self._scope(request.runtime)
        turn = _Turn.of(request.messages, scope)
        found = self._turns.get(turn)
        if found is None or not await self._astand(found):
            found = self._turns.keep(turn, await self._arecall(turn, scope))
        return await handler(self._with(request, scope, found))

    def _recall(self, turn: _Turn, scope: Ids) -> Found:
        if not turn.question:
            return ()
        work = self._later(lambda: self._chat.recall(turn.question, scope, top_k=self._top_k, filters=self._filters))
        try:
            return living(work.result(self._recall_timeout))
        except Exception as error:
            work.cancel()
            return self._without(error)

    async def _arecall(self, turn: _Turn, scope: Ids) -> Found:
        if not turn.question:
            return ()
        work = self._chat.arecall(turn.question, scope, top_k=self._top_k, filters=self._filters)
        try:
            return living(await asyncio.wait_for(work, self._recall_timeout))
        except Exception as error:
            return self._without(error)

    def _stand(self, found: Found) -> bool:
        """Whether nothing of what was recalled was forgotten or changed since: by one of the agent's tools, say."""
        try:
            return len(living(found)) == len(found) and self._chat.is_current(found)
        except Exception:  # recalling again says what is wrong
            return False

    async def _astand(self, found: Found) -> bool:
        try:
            return len(living(found)) == len(found) and await self._chat.ais_current(found)
        except Exception:
            return False

    def _without(self, error: Exception) -> Found:
        slow = isinstance(error, TimeoutError)
        why = f"took longer than {self._recall_timeout:g} s" if slow else f"failed ({_said(error)})"
        _log.warning("recalling %s: this turn is answered without memories", why)
        return ()

    def _with(self, request: ModelRequest[Any], scope: Ids, found: Found) -> ModelRequest[Any]:
        """The request with what was found, as KV where the model can inject it, else as text."""
        model: Any = request.model
        while isinstance(model, RunnableBinding):
            model = model.bound
        if isinstance(model, ChatInferScale) and model.stands_on(self._chat.memory):
            settings = {**request.model_settings, "memories": list(found), "scope": scope}
            return request.override(model_settings=settings)
        if not self._told:
            self._told = True
            warnings.warn(
                f"{_NAME}: {type(model).__name__} cannot inject this memory, so memories are read as text. "
                "A ChatInferScale over the same memory injects them.",
                stacklevel=2,
            )
        if not found:
            return request
        text = "\n".join([self._heading, *(_line(result) for result in found)])
        system = request.system_message
        if system is None:
            return request.override(system_message=SystemMessage(text))
        if isinstance(system.content, str):
            return request.override(system_message=SystemMessage(f"{system.content}\n\n{text}"))
        return request.override(
            system_message=SystemMessage([*system.content, {"type": "text", "text": f"\n\n{text}"}])
        )

    # -- after the agent -------------------------------------------------------------------------------------

    def after_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        work = self._writing(state, runtime)
        if work is None:
            return
        try:
            work.result(self._write_timeout)
        except TimeoutError:
            self._still_writing(work)
        except Exception as error:
            _not_written(error)

    async def aafter_agent(self, state: AgentState[Any], runtime: Runtime[Any]) -> None:
        work = self._writing(state, runtime)
        if work is None:
            return
        waited = asyncio.wrap_future(work)  # which nobody cancels when the loop ends
        await asyncio.wait({waited}, timeout=self._write_timeout)
        if not waited.done():
            waited.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._still_writing(work)
        elif (error := waited.exception()) is not None:
            _not_written(error)

    def _writing(self, state: AgentState[Any], runtime: Runtime[Any]) -> Future[Any] | None:
        """The turn on its way into the memory. None where there is nothing to write.

        It is written in a thread that ends with the write, and not in the agent's loop, which may end before.
        """
        scope = self._scope(runtime)
        self._turns.drop(_Turn.of(state["messages"], scope))
        said = _finished(state)
        if not self._answers:
            said = [message for message in said if message["role"] == "user"]
        if not self._write or not said:
            return None
        return self._later(lambda: self._chat.remember(said, scope, infer=self._infer))

    def _still_writing(self, work: Future[Any]) -> None:
        _log.warning(
            "writing the turn takes longer than %g s: it goes on in the background", self._write_timeout
        )
        work.add_done_callback(_tell_failure)

    # -- inside ----------------------------------------------------------------------------------------------

    def _scope(self, runtime: Runtime[Any] | None) -> Ids:
        context = getattr(runtime, "context", None)
        given = context if isinstance(context, Mapping) else {}
        if context is not None and not given:
            given = {key: getattr(context, key, None) for key in self._keys.values()}
        ids = {**self._ids, **ids_of_config(None, self._keys), **read_ids(given, self._keys)}
        return demanded(ids, _NAME)

    def _later(self, work: Callable[[], Any]) -> Future[Any]:
        """`work` in a thread, with the context variables of this one."""
        return self._threads.submit(copy_context().run, work)


class _Turn:
    """What a turn is known by, and the words it begins with."""

    def __init__(self, key: tuple[Any, ...], question: str) -> None:
        self.key = key
        self.question = question

    @classmethod
    def of(cls, messages: Sequence[BaseMessage], scope: Ids) -> _Turn:
        asked = next((message for message in reversed(messages) if _is_users(message)), None)
        if asked is None:
            return cls((), "")
        words = str(asked.text).strip()
        return cls((*sorted(scope.items()), asked.id or "", words), words)


class _Turns:
    """What was recalled in turns that are not finished, for their next calls of the model."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._found: OrderedDict[tuple[Any, ...], tuple[float, Found]] = OrderedDict()

    def get(self, turn: _Turn) -> Found | None:
        with self._lock:
            since, found = self._found.get(turn.key, (0.0, None))
            return found if found is not None and monotonic() - since < _TURN_S else None

    def keep(self, turn: _Turn, found: Found) -> Found:
        with self._lock:
            self._found[turn.key] = (monotonic(), found)
            while len(self._found) > _TURNS_KEPT:
                self._found.popitem(last=False)
        return found

    def drop(self, turn: _Turn) -> None:
        with self._lock:
            self._found.pop(turn.key, None)


def _finished(state: Mapping[str, Any]) -> list[dict[str, str]]:
    """The user's words of the last turn and the model's answer to them; nothing where it was not answered."""
    messages: Sequence[AnyMessage] = state["messages"]
    last = next((at for at in range(len(messages) - 1, -1, -1) if _is_users(messages[at])), None)
    if last is None:
        return []
    first = last
    while first > 0 and _is_users(messages[first - 1]):
        first -= 1
    said = [("user", str(message.text)) for message in messages[first : last + 1]]
    answer = messages[-1]
    if isinstance(answer, AIMessage) and not answer.tool_calls:
        said.append(("assistant", str(answer.text)))
    elif state.get("structured_response") is None:
        return []
    return [{"role": role, "content": words.strip()} for role, words in said if words.strip()]


def _is_users(message: BaseMessage) -> bool:
    """Whether a message is the user's own. LangChain's middleware writes some in their name, such as the summary of a
    conversation, which says what was remembered already."""
    return isinstance(message, HumanMessage) and not message.additional_kwargs.get("lc_source")


def _line(result: Mapping[str, Any]) -> str:
    """A memory as a line of text; it can imitate neither another line nor a control token, whatever model reads it."""
    day = str((result.get("metadata") or {}).get("date") or result.get("created_at") or "")[:10]
    words = _MARKUP.sub(r"\g<0> ", " ".join(str(result.get("memory") or "").split()))
    return f"- [{day}] {words}" if day else f"- {words}"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _not_written(error: BaseException) -> None:
    kept = isinstance(error, ExtractionError)
    then = "its words are kept, memory.retry_failed() tries again" if kept else "it is not remembered"
    _log.warning("the turn could not be written (%s): %s", _said(error), then)


def _tell_failure(work: Future[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        _not_written(error)
