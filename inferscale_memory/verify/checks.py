"""What is asked of an engine, and what its answers must show.

`gather` asks, through the `Engine` protocol and nothing else; `judge` compares, when the engine may be gone.
Two kinds of comparison carry everything:

- *Exact* pairs. Where every fact was encoded behind precisely what precedes it in the prompt, an injected
  answer is the plain one. The same engine gives both, under salts of their own, so that neither hits the
  other's blocks. What must be refused is such a pair too: the answer stays the plain one.
- *Composed* facts stand elsewhere than they were encoded, and no text has their keys. Nothing behind the
  `Engine` protocol computes them a second way, so the other side is `Reference`: a plain transformers model,
  in which every fact is computed in place, with nothing of ours that captures, rotates or injects.

A difference is the largest of log-probabilities (nats) over the `TOP` likeliest tokens of `ANSWER_TOKENS`
steps. In float32 its bounds are fixed: `SAME_ENGINE`, and `TWO_ENGINES` where the kernels differ too. In
half precision no fixed bound is both fair and sharp, as the grain of a logit grows with its size. There the
bound is measured, on the engine's own *plain* answers, in which nothing is injected: `NOISE_FACTOR` times
what separates them from the float32 reference, for two answers that are within that noise of the truth are
within twice the noise of each other. The noise has a fixed bound itself (`NOISE`): no engine excuses itself.

That the checks can fail is checked as well: each control is a wrong memory, and has to show by
`CONTROL_FACTOR` times the bound.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inferscale_memory.engine.base import Completion, EncodeRequest, Engine, SamplingOptions, Span
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from inferscale_memory.verify.material import Ids, Material

if TYPE_CHECKING:
    from inferscale_memory.verify.reference import Reference

OWNER, OTHER = "verify", "verify another"
ANSWER_TOKENS = 8
TOP = 20
SAME_ENGINE = 1e-4
TWO_ENGINES = 1e-3
NOISE = {"float32": TWO_ENGINES, "float16": 0.1, "bfloat16": 0.5}
"""Most that plain answers may be from the reference."""
NOISE_FACTOR = 2.0
CONTROL_FACTOR = 3.0
PERMUTED = 12
"""Most facts whose order is changed: each costs the reference a copy of its context."""

_OPTIONS = SamplingOptions(max_tokens=ANSWER_TOKENS, temperature=0.0, logprobs=TOP, ignore_eos=True)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: what was looked at.
        proves: what it shows, in one line.
        value: what was found; a text where there is no number.
        bound: what `value` may not exceed, or, of a control, must reach; None where only the text counts.
        control: whether `bound` is a least.
    """

    name: str
    proves: str
    value: float | str
    bound: float | None
    control: bool = False

    @property
    def passed(self) -> bool:
        if isinstance(self.value, str) or self.bound is None:
            return False
        return self.value >= self.bound if self.control else self.value <= self.bound


class BrokenEngineError(Exception):
    """The engine could not do what is checked. Carries the failed check."""

    def __init__(self, check: Check) -> None:
        super().__init__(str(check.value))
        self.check = check


@dataclass(frozen=True, slots=True)
class Kept:
    """A blob, and what it was made of."""

    context: Ids
    ids: Ids
    key: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a prompt of blobs with `text` behind them. `due`: tokens that had to be injected."""

    parts: tuple[Kept, ...]
    text: Ids
    due: int
    completion: Completion

    @property
    def miscounted(self) -> int:
        return abs(self.due - self.completion.injected_tokens)


@dataclass(frozen=True, slots=True)
class Exact:
    """An injected answer and the plain one that it must equal."""

    name: str
    proves: str
    injected: Answer
    plain: Answer


@dataclass(frozen=True, slots=True)
class Composed:
    """Injected answers that must equal the reference's."""

    name: str
    proves: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was asked. `exact` begins with the whole prefix and no fact at all; `straight` and `permuted`
    hold the same blobs; `left_at_hand` counts blobs that outlived being forgotten."""

    exact: tuple[Exact, ...]
    composed: tuple[Composed, ...]
    straight: Answer
    permuted: Answer
    left_at_hand: int


# -- asking --------------------------------------------------------------------------------------------------


class _Subject:
    """The engine under test. Every prompt has a salt of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked = 0

    def keep(self, context: Ids, *facts: Ids, owner: str = OWNER) -> list[Kept]:
        """One blob per fact, each encoded after `context` and the facts before it, in one request."""
        ids, spans = context, []
        for fact in facts:
            spans.append(Span(len(ids), len(ids) + len(fact)))
            ids += fact
        return self._encode([EncodeRequest(owner, ids, tuple(spans))])

    def keep_each(self, pairs: Iterable[tuple[Ids, Ids]]) -> list[Kept]:
        """One blob per (context, fact), in a request each."""
        return self._encode(
            [
                EncodeRequest(OWNER, context + fact, (Span(len(context), len(context) + len(fact)),))
                for context, fact in pairs
            ]
        )

    def _encode(self, requests: Sequence[EncodeRequest]) -> list[Kept]:
        kept = []
        for request, result in zip(requests, self._engine.encode(requests), strict=True):
            if result.error is not None:
                raise BrokenEngineError(Check("encode", "facts are encoded at all", result.error, None))
            for span, ref in zip(request.spans, result.refs, strict=True):
                kept.append(Kept(request.ids[: span.start], request.ids[span.start : span.stop], ref.key))
        return kept

    def ask(
        self, parts: Sequence[Kept], text: Ids, *, owner: str = OWNER, due: Sequence[Kept] | None = None
    ) -> Answer:
        """Answer from the blobs of `parts`, of which the leading `due` (default: all) have to be injected."""
        segments = (*(Segment(part.ids, part.key) for part in parts), Segment(text))
        tokens = sum(len(part.ids) for part in (parts if due is None else due))
        return Answer(tuple(parts), text, tokens, self._generate(owner, segments))

    def read(self, parts: Sequence[Kept], text: Ids, *, owner: str = OWNER) -> Answer:
        """Answer from the same ids, all of them prefilled."""
        ids = tuple(token for part in parts for token in part.ids) + text
        return Answer((), ids, 0, self._generate(owner, (Segment(ids),)))

    def _generate(self, owner: str, segments: tuple[Segment, ...]) -> Completion:
        self._asked += 1
        return self._engine.generate(Prompt(owner, segments, salt=f"verify {self._asked}"), _OPTIONS)

    def forget(self, blob: Kept) -> int:
        """Forget a blob; returns how many copies are still at hand."""
        self._engine.forget(OWNER, [blob.key])
        return len(self._engine.at_hand(OWNER, [blob.key]))


def gather(engine: Engine, material: Material, seed: int, say: Say) -> Evidence:
    """Ask everything of `engine`.

    Raises:
        BrokenEngineError: an encode failed.
    """
    subject, question = _Subject(engine), material.question
    say("facts in the order in which they were encoded")
    (preamble,) = subject.keep((), material.preamble, owner=PUBLIC_OWNER)
    chain = subject.keep(material.preamble, *material.facts)
    few = [preamble, *chain[:3]]

    def exact(
        name: str,
        proves: str,
        parts: Sequence[Kept],
        due: Sequence[Kept] | None = None,
        owner: str = OWNER,
    ) -> Exact:
        injected = subject.ask(parts, question, due=due, owner=owner)
        return Exact(name, proves, injected, subject.read(parts, question, owner=owner))

    whole = exact(
        "whole prefix",
        f"{len(chain)} facts, each encoded after all before it, give the plain prompt's answer",
        [preamble, *chain],
    )
    none = exact("k = 0", "the preamble alone, shared by all owners, is injected", [preamble])
    one = exact("k = 1", "one fact is injected", [preamble, chain[0]])
    say("what must be refused")
    wrong = replace(few[2], ids=few[2].ids[::-1])
    other_ids = exact(
        "other ids",
        "a blob is not injected where the prompt has other token ids; the answer is the plain one",
        [*few[:2], wrong, few[3]],
        due=few[:2],
    )
    other_owner = exact(
        "another owner", "nobody is injected with somebody else's facts", few, due=[preamble], owner=OTHER
    )
    left = subject.forget(few[2])
    forgotten = exact(
        "forgotten", "a forgotten fact is not injected; the answer is the plain one", few, due=few[:2]
    )

    say("facts that stand elsewhere than they were encoded")
    alone = subject.keep_each((material.preamble, fact) for fact in material.facts)
    every = subject.ask([preamble, *alone], question)
    moved = tuple(_moved(subject, material))
    say("facts in another order, and facts that repeat")
    some = alone[:PERMUTED]
    straight = subject.ask([preamble, *some], question)
    permuted = subject.ask([preamble, *_shuffled(some, seed)], question)
    first, second, third = some[:3]
    repeated = subject.ask([preamble, second, first, first, third, second], question)
    return Evidence(
        exact=(whole, none, one, other_ids, other_owner, forgotten),
        composed=(
            Composed(
                "moved", "facts encoded at 4 positions, injected at 16, are as if computed there", moved
            ),
            Composed(f"k = {len(alone)}", "facts encoded without each other are injected together", (every,)),
            Composed("order", "facts are injected in any order", (permuted,)),
            Composed("repetition", "a fact is injected as often as it stands in the prompt", (repeated,)),
        ),
        straight=straight,
        permuted=permuted,
        left_at_hand=left,
    )


def _moved(subject: _Subject, material: Material) -> Iterable[Answer]:
    """Four facts, encoded at four positions p, each injected at four positions q."""
    facts, strangers = material.facts[:4], material.strangers
    number = len(material.facts)
    contexts = [
        (),
        *(material.preamble + _joined(strangers[:n]) for n in (0, 1 + number // 10, 1 + number // 3)),
    ]
    blobs = subject.keep_each(zip(contexts, facts, strict=False))
    pads = [(), *(material.preamble + _joined(strangers[-n:]) for n in (1, 1 + number // 8, 1 + number // 2))]
    for turn, pad in enumerate(pads):
        shown = blobs[turn % len(blobs) :] + blobs[: turn % len(blobs)]
        yield subject.ask([*(subject.keep((), pad) if pad else []), *shown], material.question)


def _joined(facts: Iterable[Ids]) -> Ids:
    return tuple(token for fact in facts for token in fact)


def _shuffled(blobs: Sequence[Kept], seed: int) -> list[Kept]:
    """In an order in which no blob stands where it stood."""
    chance, places = random.Random(seed), list(range(len(blobs)))
    while any(place == number for number, place in enumerate(places)):
        chance.shuffle(places)
    return [blobs[place] for place in places]


def longest(material: Material) -> int:
    """Tokens of the longest prompt and its answer that `gather` asks."""
    whole = len(material.preamble) + sum(map(len, material.facts)) + len(material.question)
    moved = (
        len(material.preamble)
        + sum(map(len, material.strangers[-1 - len(material.facts) // 2 :]))
        + sum(map(len, material.facts[:4]))
        + len(material.question)
    )
    return max(whole, moved) + ANSWER_TOKENS


# -- judging -------------------------------------------------------------------------------------------------


def judge(evidence: Evidence, reference: Reference, dtype: str, say: Say) -> list[Check]:
    """Compare everything; `reference` has its weights, rounded to `dtype`."""
    say("the reference: plain prompts")
    plain = max(_from_reference(pair.plain, reference) for pair in evidence.exact)
    same, two = SAME_ENGINE, TWO_ENGINES
    if dtype != "float32":
        same = two = NOISE_FACTOR * plain
    why = "with nothing injected the engine computes what the reference does"
    checks = [Check("plain", why, plain, NOISE[dtype])]
    for pair in evidence.exact:
        injected, read = pair.injected.completion, pair.plain.completion
        checks.append(Check(pair.name, pair.proves, apart(injected, read), same))
        checks.append(_counted(pair.name, [pair.injected]))
        if dtype == "float32":
            differing = sum(a != b for a, b in zip(injected.token_ids, read.token_ids, strict=True))
            checks.append(Check(f"{pair.name}: answer tokens that differ", "", differing, 0))
    checks.append(Check("forgotten: blobs still at hand", "", evidence.left_at_hand, 0))
    for group in evidence.composed:
        say(f"the reference: {group.name}")
        value = max(_from_reference(answer, reference) for answer in group.answers)
        checks.append(Check(group.name, group.proves, value, two))
        checks.append(_counted(group.name, group.answers))
    say("the reference: controls")
    return checks + _controls(evidence, reference, CONTROL_FACTOR * two)


def _counted(name: str, answers: Sequence[Answer]) -> Check:
    return Check(f"{name}: injected tokens off by", "", max(answer.miscounted for answer in answers), 0)


def _controls(evidence: Evidence, reference: Reference, bound: float) -> list[Check]:
    """That the checks above can fail: each wrong memory gives an answer that they would not let through."""
    whole, none = evidence.exact[:2]
    shifted = evidence.composed[0].answers[0]
    right, wrong = _table(shifted, reference), _table(shifted, reference, moved=False)
    found = (
        (
            "no memory",
            "facts left out would be noticed",
            apart(whole.injected.completion, none.plain.completion),
        ),
        (
            "order",
            "facts in another order would be noticed",
            apart(evidence.straight.completion, evidence.permuted.completion),
        ),
        (
            "position",
            "keys left rotated to where they were encoded would be noticed",
            _farthest(right, wrong),
        ),
    )
    return [Check(f"control: {name}", why, value, bound, control=True) for name, why, value in found]


Logprobs = Mapping[int, float]


def apart(one: Completion, other: Completion) -> float:
    """The largest difference of log-probabilities, up to the first step after which the answers differ."""
    told = zip(one.token_ids, other.token_ids, strict=True)
    steps = 1 + next((step for step, (a, b) in enumerate(told) if a != b), ANSWER_TOKENS)
    return _farthest((one.logprobs or ())[:steps], (other.logprobs or ())[:steps])


def _from_reference(answer: Answer, reference: Reference) -> float:
    """The largest difference between the engine's log-probabilities and the reference's."""
    return _farthest(answer.completion.logprobs or (), _table(answer, reference))


def _table(answer: Answer, reference: Reference, *, moved: bool = True) -> list[Logprobs]:
    """The reference's likeliest tokens at each step of the answer given, and those that the engine named."""
    tokens = answer.completion.token_ids
    parts = [(part.context, part.ids) for part in answer.parts]
    rows = reference.logprobs(parts, answer.text + tokens[:-1], len(tokens), moved=moved)
    table: list[Logprobs] = []
    for row, named in zip(rows, answer.completion.logprobs or (), strict=True):
        best: list[int] = row.topk(min(TOP, len(row))).indices.tolist()
        table.append({token: float(row[token]) for token in (*best, *named)})
    return table


def _farthest(one: Sequence[Logprobs], other: Sequence[Logprobs]) -> float:
    """The largest difference between two tables with a row per step.

    A token that one list lacks counts with the least it can differ: from the last that the list holds.
    """
    found = 0.0
    for mine, theirs in zip(one, other, strict=True):
        for these, those in ((mine, theirs), (theirs, mine)):
            end = min(those.values())
            for token, value in these.items():
                off = abs(value - those[token]) if token in those else max(0.0, value - end)
                found = max(found, math.inf if math.isnan(off) else off)
    return found
