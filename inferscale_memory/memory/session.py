"""A conversation: each turn prefills as little as it can.

A turn that goes on has token ids that begin with all ids of the turn before, answer included; what is newly recalled is
put into the user's message as text. A turn that is composed anew has what is recalled now injected before the
conversation, which is then prefilled. Early on the latter is less, later the former. It must never show a memory that
was forgotten or reworded: then the prompt is composed anew, and so it is when the context is full.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from time import perf_counter
from typing import Protocol

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.memory.core import Core
from inferscale_memory.memory.found import Found
from inferscale_memory.memory.recall import Result, question
from inferscale_memory.memory.reply import Prepared, Reply, ReplyChunk
from inferscale_memory.memory.scope import Scope
from inferscale_memory.memory.waiting import Waiting, run
from inferscale_memory.prompt import Message, PromptTemplate, Segment

_ALSO = "You also remember:\n"
_STAND_INS = ("yes", "no")


class Search(Protocol):
    """mem0's search, scope and filters settled."""

    async def __call__(self, *, text: str, k: int | None) -> Sequence[Result]: ...


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the next turn goes on from: the prompt so far and its answer."""

    prepared: Prepared
    answer: tuple[int, ...]


class Conversation:
    """What a session of either face is.

    Attributes:
        messages: the conversation so far, in the form chat APIs use; it only grows.
    """

    def __init__(
        self,
        core: Core,
        wait: Waiting,
        search: Search,
        scope: Scope,
        *,
        k: int | None,
        system: str | None = None,
        sticky: bool = False,
    ) -> None:
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._core = core
        self._wait = wait
        self._search = search
        self._scope = scope
        self._k = k
        self._sticky = sticky
        self._kept: _Kept | None = None

    def recompose(self) -> None:
        """Compose the next turn's prompt anew, with whatever is recalled then standing before the
        conversation."""
        self._kept = None

    async def _chat(self, text: str, options: SamplingOptions | None, inject: bool) -> Reply:
        called, options = perf_counter(), options or SamplingOptions()
        prepared = await self._prepare(text, options, inject)
        reply = await self._core.answers.answer(self._wait, prepared, options, inject=inject, called=called)
        await self._wait.call(self._remember, text, prepared, reply)
        return reply

    async def _prepare(self, text: str, options: SamplingOptions, inject: bool) -> Prepared:
        asked = question([{"role": "user", "content": text}])
        started = perf_counter()
        results = await self._search(text=asked, k=self._k)
        search_s = perf_counter() - started
        return await self._wait.call(self._compose, text, results, options.max_tokens, search_s, inject)

    def _compose(
        self, text: str, results: Sequence[Result], max_tokens: int, search_s: float, inject: bool
    ) -> Prepared:
        kept = self._kept if self._kept is not None and self._stands(self._kept) else None
        going_on = None if kept is None else self._continued(kept, text, results, max_tokens, search_s)
        if kept is None or going_on is None:
            return self._anew(text, results, max_tokens, search_s)
        shows_more = len(going_on.memories) > len(kept.prepared.memories)
        if self._sticky or not inject or not shows_more:
            return going_on
        anew = self._anew(text, results, max_tokens, search_s)
        more = len(going_on.prompt.ids) - len(kept.prepared.prompt.ids) - len(kept.answer)
        return anew if _not_injected(anew) < more else going_on

    def _anew(self, text: str, results: Sequence[Result], max_tokens: int, search_s: float) -> Prepared:
        messages = [*self.messages, {"role": "user", "content": text}]
        return self._core.recall.prepare(
            messages, results, self._scope, max_tokens=max_tokens, search_s=search_s
        )

    def _stands(self, kept: _Kept) -> bool:
        """Whether every memory in the prompt so far exists as it is worded there. One that the journal did
        not know then (its encode was still to come) counts as none."""
        return not self._core.unknown(kept.prepared.shown)

    def _continued(
        self, kept: _Kept, text: str, results: Sequence[Result], max_tokens: int, search_s: float
    ) -> Prepared | None:
        """The prompt of the turn before, its answer, and this turn. None where they do not fit, or where the
        chat template cannot be continued."""
        started = perf_counter()
        before = kept.prepared
        seen = {memory.id for memory in before.memories}
        found = self._core.recall.read(results)
        unseen = [item for item in found if item.recalled.id not in seen]
        new = _fitting(unseen, self._core.recall.budget(found), before.memory_tokens)
        template, engine = self._core.engine.template, self._core.engine.get()
        turn = _turn_ids(template, _with_memories(text, new))
        if turn is None:
            return None
        added = [Segment(kept.answer)] if kept.answer else []
        prompt = replace(before.prompt, segments=(*before.prompt.segments, *added, *_tagged(turn, new)))
        if len(prompt.ids) + max_tokens > engine.max_model_len:
            return None
        return Prepared(
            prompt,
            (*(item.recalled for item in new), *before.memories),
            tuple(item.recalled for item in unseen if item not in new),
            search_s,
            perf_counter() - started,
            memory_tokens=before.memory_tokens + sum(len(item.ids) for item in new),
            shown=(*self._core.recall.shown(new), *before.shown),
            continued=True,
        )

    def _remember(self, text: str, prepared: Prepared, reply: Reply) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply.text}]
        answer = _unended(reply.completion.token_ids, self._core.engine.get().tokenizer.all_special_ids)
        self._kept = _Kept(prepared, answer)


class ChatSession(Conversation):
    """One conversation of one owner. Not for several threads at once."""

    def chat(self, text: str, *, options: SamplingOptions | None = None, inject: bool = True) -> Reply:
        """The answer to `text`, which becomes part of the conversation. Raises PromptError when `text` is
        empty."""
        return run(self._chat(text, options, inject))

    def stream(
        self, text: str, *, options: SamplingOptions | None = None, inject: bool = True
    ) -> Iterator[ReplyChunk]:
        """The same, piece by piece. An answer that is not read to its end does not become part of the
        conversation."""
        called, options = perf_counter(), options or SamplingOptions()
        prepared = run(self._prepare(text, options, inject))
        return self._remembering(text, prepared, options, inject, called)

    def _remembering(
        self, text: str, prepared: Prepared, options: SamplingOptions, inject: bool, called: float
    ) -> Iterator[ReplyChunk]:
        if self._core.answers.gone(prepared):  # between the call and the first piece
            prepared = run(self._prepare(text, options, inject))
        for chunk in self._core.answers.stream(prepared, options, inject=inject, called=called):
            if chunk.reply is not None:
                self._remember(text, prepared, chunk.reply)
            yield chunk


class AsyncChatSession(Conversation):
    """`ChatSession` for coroutines. One turn at a time: a conversation has an order."""

    async def chat(self, text: str, *, options: SamplingOptions | None = None, inject: bool = True) -> Reply:
        """See `ChatSession.chat`."""
        return await self._chat(text, options, inject)

    async def stream(
        self, text: str, *, options: SamplingOptions | None = None, inject: bool = True
    ) -> AsyncIterator[ReplyChunk]:
        """See `ChatSession.stream`; for `async for`. Nothing happens before the first piece is asked for."""
        called, options = perf_counter(), options or SamplingOptions()
        prepared = await self._prepare(text, options, inject)
        async for chunk in self._core.answers.astream(prepared, options, inject=inject, called=called):
            if chunk.reply is not None:
                await self._wait.call(self._remember, text, prepared, chunk.reply)
            yield chunk


def _not_injected(prepared: Prepared) -> int:
    """How many tokens are left to prefill if all that is asked for is injected."""
    return len(prepared.prompt.ids) - sum(len(segment.ids) for segment in prepared.prompt.composition)


def _unended(answer: tuple[int, ...], special: Collection[int]) -> tuple[int, ...]:
    """An answer without the token that ended it: the chat template ends the turn itself."""
    return answer[:-1] if answer and answer[-1] in special else answer


def _fitting(unseen: Sequence[Found], budget: int | None, standing: int) -> list[Found]:
    """The first of `unseen` that fit a budget of tokens, of which `standing` are taken."""
    sizes = accumulate((len(item.ids) for item in unseen), initial=standing)
    next(sizes)
    return [item for item, size in zip(unseen, sizes, strict=True) if budget is None or size <= budget]


def _with_memories(text: str, new: Sequence[Found]) -> str:
    lines = "".join(item.words.line for item in reversed(new))  # the most relevant nearest to the question
    return f"{_ALSO}{lines}\n{text}" if new else text


def _turn_ids(template: PromptTemplate, text: str) -> tuple[int, ...] | None:
    """Ids from the end of an answer to the opening of the next one, with the user's `text` in between.

    They are what two conversations that differ in the answer alone have in common behind it. None where the
    template leaves answers out.
    """
    one, other = (
        template.split(
            [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": text},
            ]
        ).suffix
        for answer in _STAND_INS
    )
    if one == other:
        return None
    common = 0
    while one[-1 - common] == other[-1 - common]:
        common += 1
    return one[len(one) - common :]


def _tagged(ids: tuple[int, ...], new: Sequence[Found]) -> list[Segment]:
    """`ids` in segments that carry the tags of the memories in them. A tag stands for all that follows it, so
    the tags may stand at the very beginning."""
    tags = [item.tag for item in new][: len(ids) - 1]
    head = [Segment((token,), None, tag) for token, tag in zip(ids, tags, strict=False)]
    return [*head, Segment(ids[len(tags) :])]
