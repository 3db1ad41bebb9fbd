"""One conversation, asked along every setting with the same recalled facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy.blobs import Blobs
from benchmarks.accuracy.encodings import Material, encoding, pinned
from benchmarks.accuracy.locomo import Conversation, Fact, Question
from benchmarks.accuracy.measures import divergence, exact_match, nll, token_f1
from benchmarks.accuracy.settings import Setting
from inferscale_memory.engine.base import Engine, SamplingOptions
from inferscale_memory.errors import ConfigurationError, EngineError
from inferscale_memory.prompt import Prompt, PromptTemplate, Segment
from inferscale_memory.prompt.compose import Fact as Line
from inferscale_memory.prompt.compose import compose

ANSWER_TOKENS = 32
_INSTRUCTION = "Answer with as few words as possible, in words of the memories where you can."


class Asker:
    """Questions about one conversation, on one engine. Blobs are encoded when a setting first needs them."""

    def __init__(self, engine: Engine, embedder: Any, conversation: Conversation, *, generate: bool) -> None:
        self._engine = engine
        self._embedder = embedder
        self._conversation = conversation
        self._generate = generate
        self._template = PromptTemplate(engine.tokenizer)
        self._fronts: dict[int, list[int]] = {}
        self._ids = [self._template.fact_ids(fact.line) for fact in conversation.facts]

    @cached_property
    def _vectors(self) -> Any:
        """[facts, dims], float32, of length 1."""
        vectors = np.asarray(
            self._embedder.embed_batch([fact.line for fact in self._conversation.facts], "add")
        )
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    @cached_property
    def _material(self) -> Material:
        return Material(self._conversation.facts, self._vectors @ self._vectors.T)

    @cached_property
    def blobs(self) -> Blobs:
        """The facts' blobs, and what they have cost."""
        preamble = self._template.encode_preamble
        return Blobs(self._engine, self._conversation.name, self._material, self._ids, preamble)

    # -- asking ----------------------------------------------------------------------------------------------

    def ask(
        self, question: Question, settings: Sequence[Setting], known: set[str]
    ) -> Iterator[dict[str, Any]]:
        """One record per setting that is not `known`, by its name; the text paths they are held against first."""
        wanted = [setting for setting in settings if setting.name not in known]
        if not wanted:
            return
        ranked = self._ranked(question)
        answer = self._answer(question)
        references: dict[Setting, torch.Tensor] = {}
        needed = {reference for setting in wanted for reference in setting.references}
        for setting in settings:
            if setting.path == "text" and (setting in wanted or setting in needed):
                scored = self._score(self._prompt(question, setting, ranked), answer, setting)
                references[setting] = scored.logprobs
                if setting in wanted:
                    yield self._record(question, setting, ranked, answer, scored, references)
        for setting in wanted:
            if setting.path != "text":
                scored = self._score(self._prompt(question, setting, ranked), answer, setting)
                yield self._record(question, setting, ranked, answer, scored, references)

    def _answer(self, question: Question) -> tuple[int, ...]:
        """Token ids of the gold answer as the model would begin it: behind a space, unless the template left one."""
        opening = self._engine.tokenizer.decode(self._template.plain(self._messages(question))[-1:])
        text = question.answer if opening[-1:].isspace() else f" {question.answer}"
        return tuple(self._engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    @staticmethod
    def _messages(question: Question) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{question.text} {_INSTRUCTION}"}]

    def _ranked(self, question: Question) -> list[int]:
        """Places of all facts, the most relevant first."""
        vector = np.asarray(self._embedder.embed(question.text, "search"), dtype=np.float32)
        return [int(place) for place in np.argsort(-(self._vectors @ vector), kind="stable")]

    def _record(
        self,
        question: Question,
        setting: Setting,
        ranked: Sequence[int],
        answer: Sequence[int],
        scored: Scores,
        references: dict[Setting, torch.Tensor],
    ) -> dict[str, Any]:
        reference = references.get(setting.plainest if setting.path == "text" else setting.as_text)
        record: dict[str, Any] = {
            "setting": setting.name,
            "conversation": self._conversation.name,
            "question": question.name,
            "category": question.category,
            "nll": nll(scored.logprobs, answer),
            "kl": None if reference is None else divergence(reference, scored.logprobs),
            "ttft_ms": 1e3 * scored.ttft_s,
            "injected_tokens": scored.injected_tokens,
            "prompt_tokens": scored.prompt_tokens,
            "refused": scored.refused,
        }
        if setting.path == "text" and setting.order != "best-last":
            first = references.get(replace(setting.plainest, order="best-last"))
            record["kl_best_last"] = None if first is None else divergence(first, scored.logprobs)
        if scored.said is not None:
            record |= {
                "said": scored.said,
                "f1": token_f1(scored.said, question.answer),
                "em": exact_match(scored.said, question.answer),
            }
        return record

    def _score(self, prompt: Prompt, answer: Sequence[int], setting: Setting) -> Scores:
        own = ANSWER_TOKENS if self._generate else 0
        scored = score(self._engine, prompt, answer, key_scale=setting.key_scale, own_tokens=own)
        if setting.path == "injected" and not scored.injected_tokens:
            raise EngineError(f"nothing was injected ({scored.refused}): give the engine more room for blobs")
        return scored

    # -- prompts ---------------------------------------------------------------------------------------------

    def _prompt(self, question: Question, setting: Setting, ranked: Sequence[int]) -> Prompt:
        messages = self._messages(question)
        owner = self._conversation.name
        if setting.path == "none":
            return Prompt(owner, (Segment(self._template.plain(messages)),))
        chosen = self._chosen(setting, ranked)
        front = self._pinned(setting.pinned)
        behind = [place for place in chosen if place not in front]
        places = [*front, *arranged(behind, setting.order, self._conversation.facts)]
        keys: dict[int, str] = {}
        preamble = None
        if setting.path == "injected":
            how = encoding(setting.encoding)
            preamble, keys = (
                self.blobs.preamble,
                self.blobs.keys(pinned(how, front) if front else how, places),
            )
        score = {place: float(-rank) for rank, place in enumerate(behind)}
        lines = [
            Line(self._ids[place], keys.get(place), None, score.get(place, 0.0), pinned=place in front)
            for place in places
        ]
        composed = compose(
            self._template.split(messages),
            lines,
            owner=owner,
            max_tokens=self._engine.max_model_len - ANSWER_TOKENS,
            preamble_key=preamble,
            text_last=setting.m,
        )
        if composed.dropped:
            raise ConfigurationError(
                f"{len(composed.dropped)} of {len(lines)} facts do not fit the model's context of "
                f"{self._engine.max_model_len}: recall less"
            )
        return composed.prompt

    def _pinned(self, count: int) -> list[int]:
        """Places of the facts that stand in front of every question's, in order."""
        if count not in self._fronts:
            self._fronts[count] = self._material.central(count) if count else []
        return self._fronts[count]

    def _chosen(self, setting: Setting, ranked: Sequence[int]) -> list[int]:
        """Places of the facts that are to stand, the most relevant first; of a whole memory, as they were said."""
        if setting.budget:
            return self._fitting(range(len(self._ids))[::-1], setting.budget)[::-1]
        return self._fitting(ranked, setting.tokens) if setting.tokens else list(ranked[: setting.k])

    def _fitting(self, places: Sequence[int], budget: int) -> list[int]:
        """The first of `places` that fit `budget` tokens together."""
        sizes = accumulate(len(self._ids[place]) for place in places)
        return [place for place, size in zip(places, sizes, strict=True) if size <= budget]


def arranged(chosen: Sequence[int], order: str, facts: Sequence[Fact]) -> list[int]:
    """Places in the order in which they stand. `chosen`: the most relevant first."""
    if order == "chronological":
        return sorted(chosen)
    if order == "sessions":
        best = list(dict.fromkeys(facts[place].session for place in chosen))
        return sorted(chosen, key=lambda place: (-best.index(facts[place].session), place))
    return list(reversed(chosen))


# -- scoring -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model thinks of an answer, and its own. `logprobs`: [answer tokens, vocab], float32."""

    logprobs: torch.Tensor
    injected_tokens: int
    prompt_tokens: int
    refused: str | None
    ttft_s: float
    said: str | None


def score(
    engine: Engine, prompt: Prompt, answer: Sequence[int], *, key_scale: float = 1.0, own_tokens: int = 0
) -> Scores:
    """Log-probabilities over each place of `answer`, and with `own_tokens` the engine's own answer, greedy, one line
    of at most so many tokens. An engine that cannot score is asked for one token after the other.

    Raises:
        ConfigurationError: keys scaled on an engine that cannot.
    """
    own = getattr(engine, "score", None)
    if own is not None:
        found = own(prompt, answer, key_scale=key_scale, own_tokens=own_tokens)
        return Scores(
            found.logprobs, found.injected_tokens, len(prompt.ids), found.refused, found.ttft_s, found.said
        )
    if key_scale != 1.0:
        raise ConfigurationError("only the transformers engine scales keys: use --engine transformers")
    rows, first = [], None
    for count in range(len(answer)):
        given = (*prompt.segments, *([Segment(tuple(answer[:count]))] if count else ()))
        asked = Prompt(prompt.owner, given, prompt.salt)
        done = engine.generate(asked, SamplingOptions(max_tokens=1, logprobs=-1, ignore_eos=True))
        first = first or done
        [place] = done.logprobs or ({},)
        row = torch.full((max(place, default=0) + 1,), -torch.inf)
        row[torch.tensor(list(place))] = torch.tensor(list(place.values()))
        rows.append(row)
    assert first is not None, "an answer has at least one token"
    longest = max(len(row) for row in rows)
    padded = [torch.nn.functional.pad(row, (0, longest - len(row)), value=-torch.inf) for row in rows]
    said = None
    if own_tokens:
        said = engine.generate(prompt, SamplingOptions(max_tokens=own_tokens, stop=("\n",))).text
    return Scores(
        torch.stack(padded), first.injected_tokens, first.prompt_tokens, first.refused, first.ttft_s, said
    )
