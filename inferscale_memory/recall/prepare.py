"""The read path: from what a search found to a prompt with the right blobs in it, and from its answer to a
reply.

It must never wait for an encode of a fact: one without a blob goes as text, and its encode is asked for behind
the answer. It must never inject a blob made of other words than the fact has now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from time import perf_counter
from typing import Any

from inferscale_memory.engine.base import Engine
from inferscale_memory.engine.known_blobs import KnownBlobs, Preambles
from inferscale_memory.engine.lazy import LazyEngine
from inferscale_memory.errors import ConfigurationError, PromptError
from inferscale_memory.facts.repeats import once
from inferscale_memory.facts.scope import Scope, fact_tag
from inferscale_memory.facts.text import payload_of, words_of
from inferscale_memory.journal import Journal
from inferscale_memory.prompt import PUBLIC_OWNER, Fact, Frame, Message, Prompt, Segment, compose
from inferscale_memory.recall.injection import Injection
from inferscale_memory.recall.order import arranged
from inferscale_memory.recall.results import Prepared, Recalled, Shown
from inferscale_memory.recall.retrieved import Found
from inferscale_memory.recall.tool_calling import Calling
from inferscale_memory.write.encoder import Encoder
from inferscale_memory.write.plan import fact_words

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

    def read(self, results: Sequence[Result]) -> list[Found]:
        """Search results, the most relevant first; of equally relevant ones the newest. Before them those that are
        pinned, as they come. What several say stands once.

        Scores of one search and the next differ in their last digits: unrounded, two facts that say the same
        would change places now and then, and the same question would have another prompt.
        """
        pinned: list[Found] = []
        found: list[Found] = []
        for result in once(results):
            payload = payload_of(result)
            words, owner = words_of(payload), Scope.of(payload).owner
            recalled = Recalled(str(result["id"]), words.text, float(result.get("score") or 0.0))
            tag = fact_tag(owner, recalled.id)
            whole, front = result.get("whole") is True, result.get("pinned") is True
            item = Found(recalled, words, owner, tag, self.line_ids(words.line), whole, front)
            (pinned if front else found).append(item)
        found.sort(key=lambda item: item.recalled.id)
        found.sort(key=lambda item: item.words.when.isoformat() if item.words.when else "", reverse=True)
        found.sort(key=lambda item: round(item.recalled.score, 4), reverse=True)
        return pinned + found

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
        found = self.read(_of_scope(results, scope))
        keys = self._keys(engine, scope.owner, found)
        ranked = found[::-1]
        rank = {item.tag: float(number) for number, item in enumerate(ranked)}
        facts = [
            Fact(item.ids, keys.get(item.tag), item.tag, rank[item.tag], item.pinned)
            for item in arranged(ranked, self._injection.order, self._journal)
        ]
        composed = compose(
            frame,
            facts,
            owner=scope.owner,
            max_tokens=engine.max_model_len - max_tokens,
            context=engine.max_model_len,
            most_of_facts=self.budget(found),
            preamble_key=self._preamble_key(engine, frame, scope.owner) if keys else None,
            text_last=self._injection.text_last,
        )
        prompt = composed.prompt
        if len(composed.dropped) == len(facts):  # no facts, no heading above them
            prompt = Prompt(scope.owner, (Segment(template.plain(messages, tools=offered)),))
        dropped = {fact.tag for fact in composed.dropped}
        injected = {segment.tag for segment in prompt.composition}
        stand = [item for item in found if item.tag not in dropped]
        return Prepared(
            prompt,
            tuple(replace(item.recalled, injected=item.tag in injected) for item in stand),
            tuple(item.recalled for item in found if item.tag in dropped),
            search_s,
            perf_counter() - started,
            calling,
            sum(len(item.ids) for item in stand),
            self.shown(stand),
        )

    def shown(self, found: Sequence[Found]) -> tuple[Shown, ...]:
        """How these are worded."""
        known = self._journal.facts.get(item.recalled.id for item in found)
        unknown = [item.recalled.id for item in found if item.recalled.id not in known]
        gone = self._journal.facts.tombstones(unknown) if unknown else set()

        def foreign(name: str, digest: str) -> bool:
            """Whether another program wrote it so; else it was forgotten or reworded since it was found."""
            if name not in known:
                return name not in gone
            if fact_words(known[name]).digest == digest:
                return False
            payload = self._held(name)
            return payload is not None and words_of(payload).digest == digest

        lines = [(item.recalled.id, item.tag, item.words.digest) for item in found]
        return tuple(Shown(name, tag, digest, foreign(name, digest)) for name, tag, digest in lines)

    def budget(self, found: Sequence[Found]) -> int | None:
        """Most tokens of memories; None for as many as fit. A whole memory has a budget of its own."""
        whole = bool(found) and all(item.whole for item in found)
        return None if whole else self._injection.max_memory_tokens or None

    def _preamble_key(self, engine: Engine, frame: Frame, owner: str) -> str | None:
        """An app's own system text may hold a user's words, so its blob is that user's."""
        return self._preambles.key(engine, PUBLIC_OWNER if frame.system is None else owner, frame.preamble)

    def _keys(self, engine: Engine, owner: str, found: Sequence[Found]) -> dict[str, str]:
        """Tag -> blob key of those facts of `owner` whose blob is at hand. The others are asked for."""
        if engine.unsupported is not None:
            return {}
        own = {item.recalled.id: item for item in found if item.owner == owner}
        entries = {
            fact: entry
            for fact, entry in self._journal.ledger.get(own, engine.fingerprint).items()
            if entry.line == own[fact].words.digest and (entry.chained or not own[fact].whole)
        }
        at_hand = self._at_hand.confirm(engine, owner, (entry.key for entry in entries.values()))
        keys = {own[fact].tag: entry.key for fact, entry in entries.items() if entry.key in at_hand}
        missing = [fact for fact, item in own.items() if item.tag not in keys]
        self._encoder.submit(missing, wait=False, check=True)
        return keys


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
