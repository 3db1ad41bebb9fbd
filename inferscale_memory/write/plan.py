"""From facts in the journal to encode requests: what stands before each, and what is kept.

With neighbours every fact is an encode of its own, behind those. Without, it is encoded in its session: one that is
word for word a turn in its place, behind the turns before it; one that was drawn out of turns behind the last of them,
after its siblings. A fact without a conversation stands alone. Windows must never cross a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from inferscale_memory.engine.base import BlobRef, EncodeRequest, Span
from inferscale_memory.facts.scope import turn_tag
from inferscale_memory.facts.text import Words
from inferscale_memory.journal import Context, Fact, Journal, LedgerEntry, Turn
from inferscale_memory.prompt import EncodePlan, PromptTemplate, plan_session
from inferscale_memory.prompt import Turn as Line
from inferscale_memory.write.stacking import Near

NEIGHBOUR_TOKENS = 512
"""Most tokens that a fact's own neighbours and turns may have. Eight facts of a sentence or two are below it. Attention
over eight long ones would make the encode of a long fact more than twice as slow as its prefill; a long fact brings
a context of its own."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A fact whose blob one encode yields, and what that blob's window holds; `chained`: all facts before it."""

    fact: Fact
    context: Context
    chained: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """An encode request; `kept` has one entry per span, `mentioned` every fact whose words are in it."""

    request: EncodeRequest
    kept: tuple[Kept, ...]
    mentioned: tuple[Fact, ...]

    def simpler(self) -> list[Planned]:
        """What to try when this could not be done: nothing injected, else every fact in an encode of its own. Empty
        when it is as simple as can be."""
        if self.request.base:
            kept = tuple(replace(one, context=replace(one.context, blobs=())) for one in self.kept)
            return [replace(self, request=replace(self.request, base=()), kept=kept)]
        if len(self.kept) == 1:
            return []
        return [
            Planned(
                EncodeRequest(
                    self.request.owner,
                    self.request.ids[: span.stop],
                    (span,),
                    _before(self.request, span.stop),
                ),
                (kept,),
                self.mentioned,
            )
            for span, kept in zip(self.request.spans, self.kept, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Item:
    """One line of a session: a turn, a fact, or a fact that is a turn. `says`: facts whose words are in
    it."""

    ids: tuple[int, ...]
    turn: int | None
    fact: Fact | None
    says: tuple[Fact, ...]

    def tags(self, owner: str) -> list[str]:
        """What the engine is to know it by. A turn that no fact was drawn from may be forgotten too."""
        if not self.says and self.turn is not None:
            return [turn_tag(owner, self.turn)]
        return [fact.tag for fact in self.says]


def steps(planned: Iterable[Planned], most: int) -> Iterator[list[Planned]]:
    """`planned` in order, in runs of at most `most` tokens to compute; what has more by itself is a run of its own."""
    step: list[Planned] = []
    tokens = 0
    for plan in planned:
        more = len(plan.request.ids) - plan.request.base_tokens
        if step and tokens + more > most:
            yield step
            step, tokens = [], 0
        step.append(plan)
        tokens += more
    if step:
        yield step


def fact_words(fact: Fact) -> Words:
    return Words(fact.text, fact.speaker, fact.when)


class Planner:
    """Plans encodes for one model."""

    def __init__(self, journal: Journal, template: PromptTemplate, *, w: int, max_tokens: int) -> None:
        self._journal = journal
        self._template = template
        self._w = w
        self._max_tokens = max_tokens

    def fits(self, fact: Fact) -> bool:
        """Whether the fact can be encoded at all, alone."""
        return len(self._template.encode_preamble) + len(self._fact_ids(fact)) <= self._max_tokens

    def plan(self, facts: Sequence[Fact]) -> list[Planned]:
        """Encodes in sessions that together keep every one of `facts` once. All of them must fit."""
        planned = []
        wanted = {fact.fact for fact in facts}
        for group in self._groups(facts, wanted):
            keep = [number for number, item in enumerate(group) if item.fact and item.fact.fact in wanted]
            plans = plan_session(
                [Line(item.ids) for item in group],
                keep=keep,
                preamble=self._template.encode_preamble,
                w=self._w,
                max_tokens=self._max_tokens,
            )
            planned += [self._planned(plan, group) for plan in plans]
        return planned

    def _groups(self, facts: Sequence[Fact], wanted: set[str]) -> Iterator[list[_Item]]:
        """Lists of lines, each to be planned as one session."""
        for fact in facts:
            if fact.session is None:
                yield [self._fact_item(fact)]
        for session in dict.fromkeys(fact.session for fact in facts if fact.session is not None):
            here = self._journal.facts.of_session(session)
            turns = self._turn_items(self._journal.turns.of_session(session), here)
            if any(fact.verbatim and fact.fact in wanted for fact in here):
                yield turns
            drawn = [fact for fact in here if not fact.verbatim]
            for last in dict.fromkeys(_last_turn(fact) for fact in drawn if fact.fact in wanted):
                before = [item for item in turns if last is None or (item.turn or 0) <= last]
                yield [*before, *(self._fact_item(fact) for fact in drawn if _last_turn(fact) == last)]

    def among(self, near: Near, preamble: BlobRef | None, blobs: Mapping[str, LedgerEntry]) -> Planned:
        """An encode of one fact behind its neighbours, the last of them nearest to it, and its last `w` turns, which a
        chain has not.

        Up to the first neighbour that has none of `blobs`, by id, they are injected, behind the blob of the preamble;
        from there on they are prefilled. What a turn says stands once; what does not fit, or is more than
        `NEIGHBOUR_TOKENS` outside a chain, is left out from the front.
        """
        fact = near.fact
        turns = self._turns_before(fact) if near.turns else []
        spoken = {item.fact.fact for item in turns if item.fact is not None}
        before = [other for other in near.neighbours if other.fact not in spoken]
        group = [*map(self._fact_item, before), *turns, self._fact_item(fact)]
        room = self._max_tokens - len(self._template.encode_preamble)
        if not near.whole:
            room = min(room, NEIGHBOUR_TOKENS + len(group[-1].ids))
        left_out, size = 0, sum(len(item.ids) for item in group)
        while size > room:
            size -= len(group[left_out].ids)
            left_out += 1
        del group[:left_out]
        before = before[left_out:]
        chained = near.whole and not left_out

        def stands(other: Fact) -> bool:
            return other.fact in blobs and (blobs[other.fact].chained or not chained)

        on = list(takewhile(stands, before)) if preamble is not None else []
        ids = [*self._template.encode_preamble, *(token for item in group for token in item.ids)]
        span = (len(ids) - len(group[-1].ids), len(ids))
        planned = self._planned(EncodePlan(tuple(ids), (span,), (len(group) - 1,), ()), group)
        base = tuple(BlobRef(blobs[other.fact].key, blobs[other.fact].tokens) for other in on)
        [kept] = planned.kept
        held = (*kept.context.facts, *near.repeats)
        context = replace(kept.context, facts=held, blobs=tuple(ref.key for ref in base))
        request = replace(planned.request, base=(preamble, *base) if base and preamble is not None else ())
        return replace(planned, request=request, kept=(replace(kept, context=context, chained=chained),))

    def _turns_before(self, fact: Fact) -> list[_Item]:
        """The last `w` turns before a fact, and those it was drawn from."""
        if fact.session is None or not self._w:
            return []
        here = self._journal.facts.of_session(fact.session)
        last = _last_turn(fact)
        said = self._turn_items(self._journal.turns.of_session(fact.session), here)
        before = [item for item in said if last is None or (item.turn or 0) <= last]
        return [item for item in before if item.fact is None or item.fact.fact != fact.fact][-self._w :]

    def _turn_items(self, turns: Sequence[Turn], facts: Sequence[Fact]) -> list[_Item]:
        said: dict[int, list[Fact]] = {turn.number: [] for turn in turns}
        for fact in facts:
            for number in fact.turns:
                said.setdefault(number, []).append(fact)
        items = []
        for turn in turns:
            itself = next((fact for fact in said[turn.number] if fact.verbatim), None)
            words = fact_words(itself) if itself else Words(turn.text or "", turn.speaker, turn.when)
            items.append(_Item(self._ids(words), turn.number, itself, tuple(said[turn.number])))
        return items

    def _fact_item(self, fact: Fact) -> _Item:
        return _Item(self._fact_ids(fact), None, fact, (fact,))

    def _fact_ids(self, fact: Fact) -> tuple[int, ...]:
        return self._ids(fact_words(fact))

    def _ids(self, words: Words) -> tuple[int, ...]:
        return self._template.fact_ids(words.line)

    def _planned(self, plan: EncodePlan, group: Sequence[_Item]) -> Planned:
        first, starts = self._laid_out(plan, group)
        facts = [fact for number in plan.kept if (fact := group[number].fact) is not None]
        kept = tuple(
            Kept(fact, _context(group[first:number])) for fact, number in zip(facts, plan.kept, strict=True)
        )
        stand = group[first : plan.kept[-1] + 1]
        owner = facts[0].owner
        mentions = [
            (tag, start) for item, start in zip(stand, starts, strict=True) for tag in item.tags(owner)
        ]
        request = EncodeRequest(owner, plan.ids, tuple(Span(*span) for span in plan.spans), tuple(mentions))
        return Planned(request, kept, tuple(_distinct(fact for item in stand for fact in item.says)))

    def _laid_out(self, plan: EncodePlan, group: Sequence[_Item]) -> tuple[int, list[int]]:
        """Index of the first line of `plan`, and where each of its lines begins."""
        first, position = plan.kept[-1] + 1, len(plan.ids)
        starts: list[int] = []
        while position > len(self._template.encode_preamble):
            first -= 1
            position -= len(group[first].ids)
            starts.insert(0, position)
        return first, starts


def _context(before: Sequence[_Item]) -> Context:
    facts = tuple(item.fact for item in before if item.fact is not None)
    return Context(facts, tuple(item.turn for item in before if item.turn is not None))


def _distinct(facts: Iterable[Fact]) -> list[Fact]:
    return list({fact.fact: fact for fact in facts}.values())


def _last_turn(fact: Fact) -> int | None:
    return max(fact.turns, default=None)


def _before(request: EncodeRequest, stop: int) -> tuple[tuple[str, int], ...]:
    return tuple((tag, start) for tag, start in request.mentions if start < stop)
