"""What is asked of an engine, through the `Engine` protocol and nothing else.

Two kinds of question carry everything:

- *Exact* pairs. Where every fact was encoded behind precisely what precedes it in the prompt, an injected
  answer is the plain one. The same engine gives both, under salts of their own, so that neither hits the
  other's blocks. What must be refused is such a pair too: the answer stays the plain one.
- *Composed* facts stand elsewhere than they were encoded, and no text has their keys. Nothing behind the
  `Engine` protocol computes them a second way, so their answers are held against `Reference`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from inferscale_memory.commands.verify.material import Ids, Material
from inferscale_memory.engine.base import Completion, EncodeRequest, Engine, SamplingOptions, Span
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment

OWNER, OTHER = "verify", "verify another"
ANSWER_TOKENS = 16
TOP = 20
"""Log-probabilities asked for at each step: as many as vLLM gives."""
PERMUTED = 12
"""Most facts whose order is changed: each costs the reference a copy of its context."""

_OPTIONS = SamplingOptions(max_tokens=ANSWER_TOKENS, temperature=0.0, logprobs=TOP, ignore_eos=True)
Say = Callable[[str], None]


class BrokenEngineError(Exception):
    """The engine could not do at all what is checked; says why."""


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
    """All that was asked.

    Attributes:
        exact, composed: what is compared.
        whole, bare: of the answers compared, one with all facts and one with none.
        permuted, straight: an answer, and its blobs in the order they do not have there.
        moved: an answer whose facts stand elsewhere than they were encoded.
        left_at_hand: blobs that outlived being forgotten.
    """

    exact: tuple[Exact, ...]
    composed: tuple[Composed, ...]
    whole: Answer
    bare: Answer
    permuted: Answer
    straight: tuple[Kept, ...]
    moved: Answer
    left_at_hand: int


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
                raise BrokenEngineError(result.error)
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
    straight = (preamble, *alone[:PERMUTED])
    permuted = subject.ask([preamble, *_shuffled(straight[1:], seed)], question)
    first, second, third = alone[:3]
    repeated = subject.ask([preamble, second, first, first, third, second], question)
    return Evidence(
        exact=(whole, none, one, other_ids, other_owner, forgotten),
        composed=(
            Composed("moved", "facts encoded at 4 positions, injected at 16, are as computed there", moved),
            Composed(f"k = {len(alone)}", "facts encoded without each other are injected together", (every,)),
            Composed("order", "facts are injected in any order", (permuted,)),
            Composed("repetition", "a fact is injected as often as it stands in the prompt", (repeated,)),
        ),
        whole=whole.injected,
        bare=none.plain,
        permuted=permuted,
        straight=straight,
        moved=moved[0],
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
