"""A conversation: each turn prefills as little as it can.

A turn that goes on has token ids that begin with all ids of the turn before, answer included; what is newly recalled is
put into the user's message as text. A turn that is composed anew has what is recalled now injected before the
conversation, which is then prefilled. Early on the latter is less, later the former. It must never show a memory that
was forgotten or reworded: then the prompt is composed anew, and so it is when the context is full. A conversation that
has outgrown the context goes on without its oldest turns.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol, Self

from inferscale_memory.arguments import optional
from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.runner import Waiting, run
from inferscale_memory.errors import ContextOverflowError
from inferscale_memory.facts.scope import Scope
from inferscale_memory.journal import Epoch
from inferscale_memory.memory.argument_checks import as_conversation, as_room, checked
from inferscale_memory.memory.core import Core
from inferscale_memory.memory.guarded import guarded
from inferscale_memory.memory.instance import behind, core_of
from inferscale_memory.prompt import Message, Segment, ToolCall
from inferscale_memory.recall.continuation import fitting, tagged, turn_ids, with_memories
from inferscale_memory.recall.prepare import Messages, Result, conversation, question
from inferscale_memory.recall.results import Prepared, Reply, ReplyChunk
from inferscale_memory.sharing import Shared

_log = logging.getLogger(__name__)

_KEPT = 0.75
"""How much of the context a conversation takes at most that has let go of turns: so the next ones can go on."""


class Search(Protocol):
    """mem0's search, scope settled."""

    async def __call__(
        self, *, text: str, k: int | None, filters: Mapping[str, Any] | None
    ) -> Sequence[Result]: ...


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one turn brings: messages that end with a question or with the result of a tool, and how to answer them."""

    said: list[Message]
    options: SamplingOptions
    inject: bool
    k: int | None
    filters: Mapping[str, Any] | None
    memories: Sequence[Result] | None
    tools: Sequence[Any] | None
    tool_choice: str | None

    @property
    def text(self) -> str | None:
        """The question, where there is nothing but one."""
        only = self.said[0] if len(self.said) == 1 and not self.tools else {}
        content = only.get("content")
        return content if only.get("role") == "user" and isinstance(content, str) else None


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the next turn goes on from: the prompt so far and its answer."""

    prepared: Prepared
    answer: tuple[int, ...]


class Conversation(Shared):
    """What a session of either face is. `copy.copy` and `copy.deepcopy` give a second conversation with the same
    memory, which goes on from the same place.

    Attributes:
        messages: the conversation so far, in the form chat APIs use; it only grows.
    """

    def __init__(
        self,
        memory: Any,
        wait: Waiting,
        search: Search,
        scope: Scope,
        *,
        k: int | None,
        filters: Mapping[str, Any] | None = None,
        system: str | None = None,
        sticky: bool = False,
    ) -> None:
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._memory = memory
        self._wait = wait
        self._search = search
        self._scope = scope
        self._k = k
        self._filters = filters
        self._sticky = sticky
        self._kept: _Kept | None = None
        self._begins = self._opening = len(
            self.messages
        )  # where what is still shown of the conversation begins

    def recompose(self) -> None:
        """Compose the next turn's prompt anew, with whatever is recalled then standing before the
        conversation."""
        self._kept = None

    @property
    def _core(self) -> Core:
        return behind(self._memory)

    def _check_open(self) -> None:
        core_of(self._memory)

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self), messages=list(self.messages))
        return other

    def __deepcopy__(self, memo: Any) -> Self:
        other = self.__copy__()
        other.messages = deepcopy(self.messages, memo)
        return other

    def is_of(self, core: Core) -> bool:
        """Whether this is a conversation with the memory that stands on `core`."""
        return self._core is core

    async def _chat(self, turn: _Turn) -> Reply:
        called = perf_counter()
        prepared = await self._prepare(turn)
        reply = await self._core.answers.answer(
            self._wait, prepared, turn.options, inject=turn.inject, called=called
        )
        await self._wait.call(self._remember, turn, prepared, reply)
        return reply

    async def _prepare(self, turn: _Turn) -> Prepared:
        asked = question(
            turn.said if turn.said[-1:] and turn.said[-1].get("role") == "user" else self._with(turn)
        )
        started = perf_counter()
        results = turn.memories
        if results is None:
            filters = self._filters if turn.filters is None else turn.filters
            results = await self._search(text=asked, k=self._k if turn.k is None else turn.k, filters=filters)
        return await self._wait.call(self._compose, turn, results, perf_counter() - started)

    def _with(self, turn: _Turn) -> list[Message]:
        return [*self.messages, *turn.said]

    def _compose(self, turn: _Turn, results: Sequence[Result], search_s: float) -> Prepared:
        kept, epoch = self._kept, None
        if kept is not None:  # every memory in the prompt so far must still exist as it is worded there
            unchanged, epoch = self._core.freshness.unchanged(kept.prepared)
            kept = kept if unchanged else None
        going_on = None
        if kept is not None and turn.text is not None and kept.prepared.calling is None:
            going_on = self._continued(kept, epoch, turn.text, results, turn.options.max_tokens, search_s)
        if kept is None or going_on is None:
            return self._anew(turn, results, search_s)
        shows_more = len(going_on.memories) > len(kept.prepared.memories)
        if self._sticky or not turn.inject or not shows_more:
            return going_on
        anew = self._anew(turn, results, search_s)
        more = len(going_on.prompt.ids) - len(kept.prepared.prompt.ids) - len(kept.answer)
        return anew if _not_injected(anew) < more else going_on

    def _anew(self, turn: _Turn, results: Sequence[Result], search_s: float) -> Prepared:
        def prepared() -> Prepared:
            composed = self._core.recall.prepare(
                self._shown(turn, self._begins),
                results,
                self._scope,
                max_tokens=turn.options.max_tokens,
                search_s=search_s,
                tools=turn.tools,
                tool_choice=turn.tool_choice,
            )
            return replace(composed, left_out=self._begins - self._opening)

        try:
            return prepared()
        except ContextOverflowError:
            if not self._let_go(turn):
                raise
            return prepared()

    def _shown(self, turn: _Turn, begins: int) -> list[Message]:
        """The conversation with this turn, from message `begins` on; the system text always stands before it."""
        said = self._with(turn)
        return [*said[: self._opening], *said[begins:]]

    def _let_go(self, turn: _Turn) -> bool:
        """Leave as few of the oldest turns out of the prompt as it takes to have room for some more. False where
        there is only the one that is asked now."""
        said = self._with(turn)
        starts = [
            at for at, message in enumerate(said) if at > self._begins and message.get("role") == "user"
        ]
        if not starts:
            return False
        context = self._core.engine.get().max_model_len
        room = _KEPT * (context - min(turn.options.max_tokens, context // 2))

        def fits(begins: int) -> bool:
            frame = self._core.engine.template.split(self._shown(turn, begins), tools=turn.tools)
            return len(frame.preamble) + len(frame.suffix) <= room

        first = bisect_left(starts, True, key=fits)
        if self._begins == self._opening:
            _log.warning(
                "a conversation has outgrown the model's context: from now on its oldest turns are left out, and each "
                "reply says in `left_out` how many messages they are"
            )
        self._begins = starts[min(first, len(starts) - 1)]
        return True

    def _continued(
        self,
        kept: _Kept,
        epoch: Epoch | None,
        text: str,
        results: Sequence[Result],
        max_tokens: int,
        search_s: float,
    ) -> Prepared | None:
        """The prompt of the turn before, its answer, and this turn. None where they do not fit, or where the
        chat template cannot be continued."""
        started = perf_counter()
        before = kept.prepared
        seen = {memory.id for memory in before.memories}
        lines = {memory.digest for memory in before.memories}
        retrieved = self._core.recall.retrieved(results)
        found = retrieved.memories
        unseen = [memory for memory in found if memory.id not in seen and memory.digest not in lines]
        new = fitting(unseen, self._core.recall.budget(found), before.memory_tokens)
        template, engine = self._core.engine.template, self._core.engine.get()
        turn = turn_ids(template, with_memories(text, new))
        if turn is None:
            return None
        added = [Segment(kept.answer)] if kept.answer else []
        prompt = replace(before.prompt, segments=(*before.prompt.segments, *added, *tagged(turn, new)))
        context = engine.max_model_len
        if len(prompt.ids) + min(max_tokens, context // 2) > context:
            return None
        return Prepared(
            prompt,
            (*new, *before.memories),
            tuple(memory for memory in unseen if memory not in new),
            search_s,
            perf_counter() - started,
            memory_tokens=before.memory_tokens + sum(len(item.ids) for item in new),
            epoch=epoch if before.memories else retrieved.epoch,  # of two the earlier
            continued=True,
            left_out=before.left_out,
        )

    def _remember(self, turn: _Turn, prepared: Prepared, reply: Reply) -> None:
        said: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.tool_calls:
            said["tool_calls"] = [_as_message(call) for call in reply.tool_calls]
        self.messages += [*turn.said, said]
        answer = _unended(reply.completion.token_ids, self._core.engine.get().tokenizer.all_special_ids)
        self._kept = _Kept(prepared, answer)


_at_turn = checked(text=as_conversation, max_tokens=optional(as_room))


@guarded
class ChatSession(Conversation):
    """One conversation of one owner. Not for several threads at once."""

    @_at_turn
    def chat(
        self,
        text: Messages,
        *,
        top_k: int | None = None,
        k: int | None = None,
        max_tokens: int | None = None,
        inject: bool = True,
        filters: Mapping[str, Any] | None = None,
        options: SamplingOptions | None = None,
        memories: Sequence[Result] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
    ) -> Reply:
        """The answer to `text`, which becomes part of the conversation.

        Args:
            text: a question, or messages that end with one or with results of tools.
            top_k, filters: as given to `session`, unless they are given here. `k` is short for `top_k`.
            max_tokens: most tokens of the answer; by default what `options` say.
            inject, options, memories, tools, tool_choice: see `Memory.chat`.

        Raises:
            PromptError: `text` is empty, or alone too long for the model's context.
        """
        return run(
            self._chat(_turn(text, top_k, max_tokens, inject, filters, options, memories, tools, tool_choice))
        )

    @_at_turn
    def stream(
        self,
        text: Messages,
        *,
        top_k: int | None = None,
        k: int | None = None,
        max_tokens: int | None = None,
        inject: bool = True,
        filters: Mapping[str, Any] | None = None,
        options: SamplingOptions | None = None,
        memories: Sequence[Result] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
    ) -> Iterator[ReplyChunk]:
        """The same, piece by piece. An answer that is not read to its end does not become part of the
        conversation."""
        called = perf_counter()
        turn = _turn(text, top_k, max_tokens, inject, filters, options, memories, tools, tool_choice)
        return self._remembering(turn, run(self._prepare(turn)), called)

    def _remembering(self, turn: _Turn, prepared: Prepared, called: float) -> Iterator[ReplyChunk]:
        if self._core.answers.gone(prepared):  # between the call and the first piece
            prepared = run(self._prepare(turn))
        pieces = self._core.answers.stream(prepared, turn.options, inject=turn.inject, called=called)
        for chunk in pieces:
            if chunk.reply is not None:
                self._remember(turn, prepared, chunk.reply)
            yield chunk


@guarded
class AsyncChatSession(Conversation):
    """`ChatSession` for coroutines. One turn at a time: a conversation has an order."""

    @_at_turn
    async def chat(
        self,
        text: Messages,
        *,
        top_k: int | None = None,
        k: int | None = None,
        max_tokens: int | None = None,
        inject: bool = True,
        filters: Mapping[str, Any] | None = None,
        options: SamplingOptions | None = None,
        memories: Sequence[Result] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
    ) -> Reply:
        """See `ChatSession.chat`."""
        turn = _turn(text, top_k, max_tokens, inject, filters, options, memories, tools, tool_choice)
        return await self._chat(turn)

    @_at_turn
    def stream(
        self,
        text: Messages,
        *,
        top_k: int | None = None,
        k: int | None = None,
        max_tokens: int | None = None,
        inject: bool = True,
        filters: Mapping[str, Any] | None = None,
        options: SamplingOptions | None = None,
        memories: Sequence[Result] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
    ) -> AsyncIterator[ReplyChunk]:
        """See `ChatSession.stream`; for `async for`. Nothing happens before the first piece is asked for."""
        return self._remembering(
            _turn(text, top_k, max_tokens, inject, filters, options, memories, tools, tool_choice), perf_counter()
        )

    async def _remembering(self, turn: _Turn, called: float) -> AsyncIterator[ReplyChunk]:
        prepared = await self._prepare(turn)
        pieces = self._core.answers.astream(prepared, turn.options, inject=turn.inject, called=called)
        async for chunk in pieces:
            if chunk.reply is not None:
                await self._wait.call(self._remember, turn, prepared, chunk.reply)
            yield chunk


def _turn(
    text: Messages,
    k: int | None,
    max_tokens: int | None,
    inject: bool,
    filters: Mapping[str, Any] | None,
    options: SamplingOptions | None,
    memories: Sequence[Result] | None,
    tools: Sequence[Any] | None,
    tool_choice: str | None,
) -> _Turn:
    options = options or SamplingOptions()
    if max_tokens is not None:
        options = replace(options, max_tokens=max_tokens)
    return _Turn(conversation(text), options, inject, k, filters, memories, tools, tool_choice)


def _as_message(call: ToolCall) -> dict[str, Any]:
    """A call in the form of chat APIs. One that could not be read has no arguments."""
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def _not_injected(prepared: Prepared) -> int:
    """How many tokens are left to prefill if all that is asked for is injected."""
    return len(prepared.prompt.ids) - sum(len(segment.ids) for segment in prepared.prompt.composition)


def _unended(answer: tuple[int, ...], special: Collection[int]) -> tuple[int, ...]:
    """An answer without the token that ended it: the chat template ends the turn itself."""
    return answer[:-1] if answer and answer[-1] in special else answer
