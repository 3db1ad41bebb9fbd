"""The read path: from what a search found to a prompt with the right blobs in it, and from its answer to a
reply.

It must never wait for an encode of a fact: one without a blob goes as text, and its encode is asked for behind
the answer. It must never inject a blob made of other words than the fact has now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter
from typing import Any

from inferscale_memory.engine.base import Engine
from inferscale_memory.engine.known_blobs import KnownBlobs, Preambles
from inferscale_memory.engine.lazy import LazyEngine
from inferscale_memory.errors import ConfigurationError, PromptError
from inferscale_memory.facts.repeats import once
from inferscale_memory.facts.scope import Scope, fact_tag
from inferscale_memory.facts.search_result import Placement, placement_of
from inferscale_memory.facts.text import Words, line_digest, payload_of, words_of
from inferscale_memory.journal import Journal, KnownFact
from inferscale_memory.prompt import PUBLIC_OWNER, Fact, Frame, Message, Prompt, Segment, compose
from inferscale_memory.recall.injection import Injection
from inferscale_memory.recall.order import as_placed, by_relevance
from inferscale_memory.recall.results import Prepared
from inferscale_memory.recall.retrieved import Retrieved, RetrievedMemory
from inferscale_memory.recall.tool_calling import Calling
from inferscale_memory.write.encoder import Encoder

Messages = str | Sequence[Message]
Result = Mapping[str, Any]
"""One of mem0's search results."""


def conversation(messages: Messages) -> list[Message]:
    """A question on its own is a conversation of one turn."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def question(messages: Sequence[Message]) -> str:
    """What to search for: the user's last words. Raises PromptError when there are none."""
    for message in reversed(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, list | tuple):
                parts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
                content = "\n".join(part for part in parts if isinstance(part, str))
            if isinstance(content, str) and content.strip():
                return content.strip()
            break
    raise PromptError("The question is empty: pass some text, or messages that end with a user's words.")


def checked_scope(ids: Mapping[str, Any]) -> Scope:
    """The scope of `ids`. Raises ConfigurationError, a ValueError as mem0's `search` raises it, when there is none."""
    scope = Scope.of(ids)
    if not scope.ids:
        raise ConfigurationError(
            "no scope: pass at least one of user_id, agent_id and run_id, so that it is clear whose memories are meant"
        )
    return scope


class Recall:
    """Composes prompts and reads replies."""

    def __init__(
        self,
        journal: Journal,
        engine: LazyEngine,
        encoder: Encoder,
        at_hand: KnownBlobs,
        preambles: Preambles,
        injection: Injection,
        held: Callable[[str], Mapping[str, Any] | None],
    ) -> None:
        """`held` reads what the store holds of a fact now."""
        self._journal = journal
        self._held = held
        self._engine = engine
        self._encoder = encoder
        self._at_hand = at_hand
        self._preambles = preambles
        self._injection = injection
        self.line_ids = lru_cache(maxsize=1 << 16)(self._tokenize)

    def _tokenize(self, line: str) -> tuple[int, ...]:
        return self._engine.template.fact_ids(line)

    def forget_lines(self) -> None:
        """Drop the lines that are kept with their ids: some may be of facts that were just forgotten."""
        self.line_ids.cache_clear()

    # -- before the answer -----------------------------------------------------------------------------------

    def retrieved(
        self, results: Sequence[Result], engine: Engine | None = None, owner: str = ""
    ) -> Retrieved:
        """The memories of search results, the most relevant first; what several say comes once. Those that were
        forgotten or reworded since the search are left out.

        Args:
            engine: where it is given, memories of `owner` get the keys of the blobs that it has at hand.
        """
        if not results:
            return Retrieved((), None)
        rows = [_Row.read(result) for result in once(results)]
        blobs = engine is not None and engine.unsupported is None
        fingerprint = engine.fingerprint if engine is not None and blobs else ""
        epoch, known = self._journal.known([row.id for row in rows], fingerprint)
        foreign = self._foreign(rows, known)
        rows = [row for row in rows if row.id in foreign or row.is_known(known)]
        keys: dict[str, str] = {}
        if engine is not None and blobs:
            keys = self._keys(engine, owner, [row for row in rows if row.owner == owner], known)
        memories = [
            RetrievedMemory(
                row.id,
                row.words.text,
                row.score,
                line=row.line,
                digest=row.digest,
                when=row.words.when,
                ids=self.line_ids(row.line),
                owner=row.owner,
                tag=fact_tag(row.owner, row.id),
                key=keys.get(row.id),
                placement=row.placement,
                place=known[row.id].place if row.id in known else 0,
                session=known[row.id].session if row.id in known else None,
                foreign=row.id in foreign,
            )
            for row in rows
        ]
        return Retrieved(by_relevance(memories), epoch)

    def _foreign(self, rows: Sequence[_Row], known: Mapping[str, KnownFact]) -> set[str]:
        """Ids of those rows that another program wrote in these words. What else the journal does not know in these
        words was forgotten or reworded since it was found."""
        unknown = [row.id for row in rows if row.id not in known]
        forgotten = self._journal.facts.tombstones(unknown) if unknown else set()
        foreign = set(unknown) - forgotten
        for row in rows:
            if row.id in known and not row.is_known(known):
                payload = self._held(row.id)
                if payload is not None and words_of(payload).digest == row.digest:
                    foreign.add(row.id)
        return foreign

    def prepare(
        self,
        messages: Sequence[Message],
        results: Sequence[Result],
        scope: Scope,
        *,
        max_tokens: int,
        search_s: float,
        tools: Sequence[Any] | None = None,
        tool_choice: str | None = None,
    ) -> Prepared:
        """A prompt for `messages` with the facts of `results`, the most relevant nearest to the question.

        Args:
            max_tokens: most tokens of the answer, for which memories leave room.
            search_s: seconds the search took, handed on.
            tools, tool_choice: see `Memory.chat`.

        Raises:
            PromptError: an empty question, messages that do not fit, or tools that are none.
            ValueError: a memory of another scope.
        """
        started = perf_counter()
        engine, template = self._engine.get(), self._engine.template
        calling = Calling.read(engine, tools, tool_choice)
        offered = None if calling is None else calling.tools
        frame = template.split(messages, tools=offered)
        retrieved = self.retrieved(_of_scope(results, scope), engine, scope.owner)
        memories = retrieved.memories
        relevance = {memory.tag: float(-rank) for rank, memory in enumerate(memories)}
        lines = [
            Fact(memory.ids, memory.key, memory.tag, relevance[memory.tag], memory.pinned)
            for memory in as_placed(memories, self._injection.order)
        ]
        has_keys = any(memory.key is not None for memory in memories)
        composed = compose(
            frame,
            lines,
            owner=scope.owner,
            max_tokens=engine.max_model_len - max_tokens,
            context=engine.max_model_len,
            most_of_facts=self.budget(memories),
            preamble_key=self._preamble_key(engine, frame, scope.owner) if has_keys else None,
            text_last=self._injection.text_last,
        )
        prompt = composed.prompt
        if len(composed.dropped) == len(lines):  # no facts, no heading above them
            prompt = Prompt(scope.owner, (Segment(template.plain(messages, tools=offered)),))
        dropped = {line.tag for line in composed.dropped}
        injected = {segment.tag for segment in prompt.composition}
        placed = [memory for memory in memories if memory.tag not in dropped]
        return Prepared(
            prompt,
            tuple(replace(memory, injected=True) if memory.tag in injected else memory for memory in placed),
            tuple(memory for memory in memories if memory.tag in dropped),
            search_s,
            perf_counter() - started,
            calling,
            sum(len(memory.ids) for memory in placed),
            retrieved.epoch,
        )

    def budget(self, memories: Sequence[RetrievedMemory]) -> int | None:
        """Most tokens of memories; None for as many as fit. A scope that is taken whole has a budget of its own."""
        whole = bool(memories) and all(memory.placement is Placement.WHOLE for memory in memories)
        return None if whole else self._injection.max_memory_tokens or None

    def _preamble_key(self, engine: Engine, frame: Frame, owner: str) -> str | None:
        """An app's own system text may hold a user's words, so its blob is that user's."""
        return self._preambles.key(engine, PUBLIC_OWNER if frame.system is None else owner, frame.preamble)

    def _keys(
        self, engine: Engine, owner: str, rows: Sequence[_Row], known: Mapping[str, KnownFact]
    ) -> dict[str, str]:
        """Id -> blob key of those facts of `owner` whose blob is at hand. The others are handed to the encoder."""
        blobs = {}
        for row in rows:
            blob = known[row.id].blob if row.id in known else None
            if blob is None or blob.line != row.digest:
                continue
            if blob.chained or row.placement is not Placement.WHOLE:
                blobs[row.id] = blob.key
        at_hand = self._at_hand.confirm(engine, owner, blobs.values())
        keys = {name: key for name, key in blobs.items() if key in at_hand}
        self._encoder.submit([row.id for row in rows if row.id not in keys], wait=False, check=True)
        return keys


@dataclass(frozen=True, slots=True)
class _Row:
    """A search result, read."""

    id: str
    score: float
    placement: Placement
    words: Words
    line: str
    digest: str
    owner: str

    @classmethod
    def read(cls, result: Result) -> _Row:
        payload = payload_of(result)
        words, owner = words_of(payload), Scope.of(payload).owner
        score = float(result.get("score") or 0.0)
        line = words.line
        return cls(str(result["id"]), score, placement_of(result), words, line, line_digest(line), owner)

    def is_known(self, known: Mapping[str, KnownFact]) -> bool:
        """Whether the journal knows it in these words."""
        fact = known.get(self.id)
        return fact is not None and Words(fact.text, fact.speaker, fact.when).digest == self.digest


def _of_scope(results: Sequence[Result], scope: Scope) -> Sequence[Result]:
    """`results`, all of which must carry every id of `scope`: an app may hand in what it found for somebody else."""
    if results:
        checked_scope(scope.ids)
    for result in results:
        if not scope.covers(Scope.of(payload_of(result))):
            raise ConfigurationError(
                f"memory {result.get('id')!r} is not of {scope.key}: pass what `search` found for the same ids"
            )
    return results
