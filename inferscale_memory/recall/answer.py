"""From a prepared question to a reply: the engine's answer, whole or piece by piece, with what became of its memories.

It must never call a memory injected that was not.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from inferscale_memory.engine.base import Chunk, Completion, SamplingOptions
from inferscale_memory.engine.known_blobs import KnownBlobs
from inferscale_memory.engine.lazy import LazyEngine
from inferscale_memory.engine.runner import Threads, Waiting
from inferscale_memory.journal import PendingForget
from inferscale_memory.prompt import Prompt, Said
from inferscale_memory.recall.results import Prepared, Reply, ReplyChunk, Timings
from inferscale_memory.recall.retrieved import RetrievedMemory
from inferscale_memory.recall.tool_calling import Calling

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question on its way to the engine, `before_s` seconds after the user's call came in."""

    prepared: Prepared
    options: SamplingOptions
    inject: bool
    before_s: float

    @classmethod
    def now(cls, prepared: Prepared, options: SamplingOptions, inject: bool, called: float) -> _Asked:
        calling = prepared.calling
        options = options if calling is None else calling.options(options)
        return cls(prepared, options, inject, perf_counter() - called)

    @property
    def prompt(self) -> Prompt:
        return self.prepared.prompt if self.inject else self.prepared.prompt.as_text()


class Answers:
    """Asks the engine.

    A memory may be forgotten after a prompt was made with it: before it is sent, or while it is answered. Then it is
    taken out, or else the engine is told once more to forget it, as it was told the first time too early.
    """

    def __init__(
        self,
        engine: LazyEngine,
        at_hand: KnownBlobs,
        gone: Callable[[Prepared], Sequence[RetrievedMemory]] = lambda prepared: (),
        forget: Callable[[Sequence[PendingForget]], None] = lambda wanted: None,
    ) -> None:
        """`gone` says which memories are no longer what they were, `forget` tells the engine what to forget."""
        self._engine = engine
        self._at_hand = at_hand
        self._gone = gone
        self._forget = forget

    async def answer(
        self, wait: Waiting, prepared: Prepared, options: SamplingOptions, *, inject: bool, called: float
    ) -> Reply:
        """The engine's answer. `called`: when the user's call came in, by `perf_counter`."""
        prepared = await wait.call(self._living, prepared)
        asked = _Asked.now(prepared, options, inject, called)
        engine = await wait.call(self._engine.get)
        try:
            return self._reply(asked, await wait.generate(engine, asked.prompt, asked.options))
        finally:
            await wait.settle(self._forget_gone, prepared)

    def stream(
        self, prepared: Prepared, options: SamplingOptions, *, inject: bool, called: float
    ) -> Iterator[ReplyChunk]:
        """The same, piece by piece."""
        prepared = self._living(prepared)
        asked = _Asked.now(prepared, options, inject, called)
        words = _Words(prepared.calling)
        try:
            for chunk in self._engine.get().stream(asked.prompt, asked.options):
                yield self._piece(asked, chunk, words)
        finally:
            self._forget_gone(prepared)

    async def astream(
        self, prepared: Prepared, options: SamplingOptions, *, inject: bool, called: float
    ) -> AsyncIterator[ReplyChunk]:
        """The same for `async for`."""
        prepared = await asyncio.to_thread(self._living, prepared)
        asked = _Asked.now(prepared, options, inject, called)
        words = _Words(prepared.calling)
        engine = await asyncio.to_thread(self._engine.get)
        try:
            async for chunk in engine.astream(asked.prompt, asked.options):
                yield self._piece(asked, chunk, words)
        finally:
            await Threads().settle(self._forget_gone, prepared)

    def _living(self, prepared: Prepared) -> Prepared:
        """`prepared` without the memories that are gone."""
        gone = () if prepared.continued else self.gone(prepared)
        if not gone:
            return prepared
        tags, ids = {memory.tag for memory in gone}, {memory.id for memory in gone}
        out = [segment for segment in prepared.prompt.segments if segment.tag in tags]
        return replace(
            prepared,
            prompt=prepared.prompt.without(tags),
            memories=tuple(memory for memory in prepared.memories if memory.id not in ids),
            memory_tokens=prepared.memory_tokens - sum(len(segment.ids) for segment in out),
        )

    def _forget_gone(self, prepared: Prepared) -> None:
        """Have the engine forget what it was shown and was forgotten meanwhile."""
        gone = self.gone(prepared)
        if not gone:
            return
        tags = tuple(memory.tag for memory in gone)
        try:
            self._forget([PendingForget(prepared.prompt.owner, (), tags)])
        except sqlite3.Error as error:  # an answer is not lost for it
            _log.warning("the engine could not be told once more to forget %d memories: %s", len(tags), error)

    def gone(self, prepared: Prepared) -> Sequence[RetrievedMemory]:
        """The memories of `prepared` that were forgotten or reworded since. None of a memory that was closed: its
        stream may still be read where the engine is somebody else's."""
        try:
            return self._gone(prepared)
        except sqlite3.Error as error:
            _log.debug("the journal cannot be asked what is gone: %s", error)
            return ()

    def _piece(self, asked: _Asked, chunk: Chunk, words: _Words) -> ReplyChunk:
        text = words.push(chunk.text)
        if chunk.completion is None:
            return ReplyChunk(text)
        reply = self._reply(asked, chunk.completion)
        return ReplyChunk(text + words.rest(reply.text), reply)

    def _reply(self, asked: _Asked, completion: Completion) -> Reply:
        prepared, inject = asked.prepared, asked.inject
        if inject and completion.refused is not None:
            self._doubt(prepared.prompt)
        placed = _placed(prepared.prompt, completion) if inject else set()
        memories = tuple(
            replace(memory, injected=False) if memory.injected and memory.tag not in placed else memory
            for memory in prepared.memories
        )
        timings = Timings(prepared.search_s, prepared.compose_s, asked.before_s + completion.ttft_s)
        said = Said(completion.text) if prepared.calling is None else prepared.calling.said(completion.text)
        return Reply(
            said.text, memories, prepared.dropped, completion, timings, said.calls, prepared.left_out
        )

    def _doubt(self, prompt: Prompt) -> None:
        """The engine has lost some of these blobs: ask it about them when they are next recalled."""
        self._at_hand.drop(segment.key for segment in prompt.composition if segment.key is not None)


class _Words:
    """The words of a streamed answer; what may become a tool call is held back."""

    def __init__(self, calling: Calling | None) -> None:
        self._calling = calling
        self._text = ""
        self._sent = 0

    def push(self, piece: str) -> str:
        """What one more piece of the answer makes certain."""
        if self._calling is None:
            return piece
        self._text += piece
        certain = self._text[self._sent : self._calling.certain(self._text)]
        self._sent += len(certain)
        return certain

    def rest(self, text: str) -> str:
        """What is still to be said of `text`, the words of the whole answer: those around a call are trimmed."""
        if self._calling is None:
            return ""
        trimmed = 0 if self._text.startswith(text) else len(self._text) - len(self._text.lstrip())
        return text[max(0, self._sent - trimmed) :]


def _placed(prompt: Prompt, completion: Completion) -> set[str | None]:
    """Tags of the segments that were injected, or hit because an earlier prompt had injected them."""
    if completion.refused is None:
        return {segment.tag for segment in prompt.composition}
    placed, end = set(), 0
    for segment in prompt.composition:
        end += len(segment.ids)
        if end > completion.injected_tokens:
            break
        placed.add(segment.tag)
    return placed
