"""What an engine's answers must show, and by how much.

In float32 a difference is the largest of log-probabilities (nats) over the `TOP` likeliest tokens of every
step, and its bounds are fixed: `SAME_ENGINE`, and `TWO_ENGINES` where the kernels differ too.

In half precision that is not fair and sharp at once: the grain of a logit grows with its size, unlikely
tokens are mostly grain, and greedy answers part at the first near tie. There a difference is what a drawn
token would show (log-probabilities differ, weighted by the probabilities, mean over the steps), always from
the float32 reference along the engine's own answer. Its bound is measured: `NOISE_FACTOR` times that of the
engine's *plain* answers, in which nothing is injected. That noise has a fixed bound itself, so that no engine
excuses itself. Measured in bfloat16 (SmolLM2-135M and tiny random models of three families): noise 0.01 to
0.03, injected answers at most 1.6 times it, wrong memories from 7 times it on.

That the checks can fail is checked as well: from the reference of each of three wrong memories the engine's
answers have to be off by a multiple of the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inferscale_memory.commands.verify.evidence import TOP, Answer, Evidence, Exact, Say

if TYPE_CHECKING:
    from inferscale_memory.commands.verify.reference import Reference

SAME_ENGINE = 1e-4
TWO_ENGINES = 1e-3
NOISE_FACTOR = 3.0

Logprobs = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Limits:
    """Most that plain answers may be from the reference, and least that wrong memories must be, in bounds."""

    noise: float
    control: float


LIMITS = {
    "float32": Limits(noise=TWO_ENGINES, control=100.0),
    "float16": Limits(noise=0.02, control=5.0),
    "bfloat16": Limits(noise=0.1, control=1.5),
}


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


def judge(evidence: Evidence, reference: Reference, dtype: str, say: Say) -> list[Check]:
    """Compare everything; `reference` has its weights, rounded to `dtype`."""
    fixed = dtype == "float32"
    off = _Distance(reference, _largest if fixed else _expected)
    say("the reference: plain prompts")
    noises = [off(pair.plain) for pair in evidence.exact]
    noise = max(noises) if fixed else sum(noises) / len(noises)
    same, two = (SAME_ENGINE, TWO_ENGINES) if fixed else (NOISE_FACTOR * noise, NOISE_FACTOR * noise)
    why = "with nothing injected the engine computes what the reference does"
    checks = [Check("plain", why, noise, LIMITS[dtype].noise)]
    for pair in evidence.exact:
        value = _apart(pair) if fixed else off(pair.injected, prompt=pair.plain)
        checks += [Check(pair.name, pair.proves, value, same), _counted(pair.name, [pair.injected])]
        if fixed and pair.injected is evidence.whole:
            checks.append(Check(f"{pair.name}: answer tokens that differ", "", _differing(pair), 0))
    checks.append(Check("forgotten: blobs still at hand", "", evidence.left_at_hand, 0))
    for group in evidence.composed:
        say(f"the reference: {group.name}")
        value = max(off(answer) for answer in group.answers)
        checks += [Check(group.name, group.proves, value, two), _counted(group.name, group.answers)]
    say("the reference: controls")
    in_order = replace(evidence.permuted, parts=evidence.straight)
    return checks + [
        Check(
            f"control: {name}", f"{fault} would be noticed", value, LIMITS[dtype].control * two, control=True
        )
        for name, fault, value in (
            ("no memory", "facts left out", off(evidence.whole, prompt=evidence.bare)),
            ("order", "facts left in their order", off(evidence.permuted, prompt=in_order)),
            ("position", "keys left rotated to where they were encoded", off(evidence.moved, moved=False)),
        )
    ]


def _counted(name: str, answers: Sequence[Answer]) -> Check:
    return Check(f"{name}: injected tokens off by", "", max(answer.miscounted for answer in answers), 0)


def _differing(pair: Exact) -> int:
    told = zip(pair.injected.completion.token_ids, pair.plain.completion.token_ids, strict=True)
    return sum(one != other for one, other in told)


def _apart(pair: Exact) -> float:
    """How far two answers of the engine are apart, up to the first step after which they differ."""
    one, other = pair.injected.completion, pair.plain.completion
    told = enumerate(zip(one.token_ids, other.token_ids, strict=True), start=1)
    steps = next((step for step, (a, b) in told if a != b), len(one.token_ids))
    return _largest((one.logprobs or ())[:steps], (other.logprobs or ())[:steps])


class _Distance:
    """How far an answer of the engine is from the reference, by one measure."""

    def __init__(
        self, reference: Reference, measure: Callable[[Sequence[Logprobs], Sequence[Logprobs]], float]
    ) -> None:
        self._reference = reference
        self._measure = measure

    def __call__(self, answer: Answer, *, prompt: Answer | None = None, moved: bool = True) -> float:
        """Follows the tokens of `answer`, behind its own prompt or another's; `moved`: see `Reference`."""
        asked, told = prompt or answer, answer.completion
        parts = [(part.context, part.ids) for part in asked.parts]
        text = asked.text + told.token_ids[:-1]
        rows = self._reference.logprobs(parts, text, len(told.token_ids), moved=moved)
        table: list[Logprobs] = []
        for row, named in zip(rows, told.logprobs or (), strict=True):
            best: list[int] = row.topk(min(TOP, len(row))).indices.tolist()
            table.append({token: float(row[token]) for token in (*best, *named)})
        return self._measure(told.logprobs or (), table)


def _largest(one: Sequence[Logprobs], other: Sequence[Logprobs]) -> float:
    """The largest difference of log-probabilities."""
    return max(off for step in zip(one, other, strict=True) for _, off in _offs(*step))


def _expected(one: Sequence[Logprobs], other: Sequence[Logprobs]) -> float:
    """The mean over the steps of the difference of log-probabilities, weighted by the probabilities."""
    found = 0.0
    for step in zip(one, other, strict=True):
        offs = list(_offs(*step))
        found += sum(weight * off for weight, off in offs) / sum(weight for weight, _ in offs)
    return found / len(one)


def _offs(one: Logprobs, other: Logprobs) -> Iterator[tuple[float, float]]:
    """(probability, difference) of each token of either list. One that the other list lacks differs at least
    from the last of that list."""
    for mine, theirs in ((one, other), (other, one)):
        last = min(theirs.values())
        for token, value in mine.items():
            off = abs(value - theirs[token]) if token in theirs else max(0.0, value - last)
            yield (math.exp(value), off) if math.isfinite(off) else (1.0, math.inf)
