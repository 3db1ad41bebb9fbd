"""The four ways to an answer, timed alike: each from the question to the first token, with all that lies between.

text      the recalled facts are prefilled, as an app with memory does today
hit       the same ids again, all of it in the engine's own prefix cache: the floor
injected  the facts' blobs are placed in the cache, only the question is prefilled
none      the question alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from inferscale_memory.commands.demo.conversations import Question, User
from inferscale_memory.engine.base import Completion, SamplingOptions
from inferscale_memory.prompt import Prompt, PromptTemplate, Segment

PATHS = ("text", "injected", "hit", "none")


@dataclass(frozen=True, slots=True)
class Row:
    """One answer along one path.

    Attributes:
        k: memories recalled.
        path: one of `PATHS`.
        ttft_s: seconds from the question to the first token: retrieval, composition and prefill.
        found: whether the right words were among the recalled memories.
        right: whether the answer holds the right words.
        dropped: memories that did not fit the context.
    """

    k: int
    path: str
    user: str
    question: str
    answer: str
    right: bool
    found: bool
    dropped: int
    ttft_s: float
    completion: Completion


@dataclass(frozen=True, slots=True)
class Once:
    """One prompt along one path.

    Attributes:
        prompt: what the engine was given.
        memories: texts of the memories in it.
        dropped: memories that did not fit the context.
        search_s, compose_s: seconds for retrieval, and for building the prompt.
        before_s: seconds from the question to the call of the engine: both of them, and what lies between.
    """

    prompt: Prompt
    memories: tuple[str, ...]
    dropped: int
    search_s: float
    compose_s: float
    before_s: float
    completion: Completion

    @property
    def ttft_s(self) -> float:
        """Seconds from the question to the first token."""
        return self.before_s + self.completion.ttft_s


class Paths:
    """Takes a question along one path.

    Args:
        memory: a `Memory`, or what has an `engine` and a `prepare` like its.
    """

    def __init__(self, memory: Any, options: SamplingOptions) -> None:
        self._memory = memory
        self._engine = memory.engine
        self._template = PromptTemplate(self._engine.tokenizer)
        self._options = options

    def once(self, path: str, user_id: str, text: str, k: int, salt: str) -> Once:
        """Ask. `path` is "none", "injected", or any other name, which is prefilled as text."""
        began = perf_counter()
        if path == "none":
            ids = self._template.plain([{"role": "user", "content": text}])
            prompt, memories, dropped, search_s = Prompt(user_id, (Segment(ids),)), (), 0, 0.0
            compose_s = perf_counter() - began
        else:
            prepared = self._memory.prepare(text, user_id=user_id, top_k=k, max_tokens=self._options.max_tokens)
            prompt = prepared.prompt if path == "injected" else prepared.prompt.as_text()
            memories = tuple(memory.text for memory in prepared.memories)
            dropped, search_s, compose_s = len(prepared.dropped), prepared.search_s, prepared.compose_s
        before_s = perf_counter() - began
        completion = self._engine.generate(prompt.salted(salt), self._options)
        return Once(prompt, memories, dropped, search_s, compose_s, before_s, completion)


class Asker:
    """Asks one memory along all paths. Each question has salts of its own, so that nothing is cached by accident."""

    def __init__(self, memory: Any, *, max_tokens: int) -> None:
        self._paths = Paths(memory, SamplingOptions(max_tokens=max_tokens, stop=("\n",)))
        self._serial = 0

    def warm_up(self, user: User, question: Question, ks: Sequence[int]) -> None:
        """Once along each path, and once through the largest composition: what is measured comes after."""
        for _ in self.ask(user, question, min(ks)):
            pass
        self._one("injected", user, question, max(ks), "warm-up")

    def ask(self, user: User, question: Question, k: int, *, turn: int = 0) -> Iterator[Row]:
        """One row per path. `turn` rotates the order in which the paths are taken; a hit follows its text."""
        self._serial += 1
        salt = f"demo-{self._serial}"
        steps: list[Callable[[], list[Row]]] = [
            lambda: [self._one("injected", user, question, k, salt)],
            lambda: [self._one("text", user, question, k, salt), self._one("hit", user, question, k, salt)],
            lambda: [self._one("none", user, question, k, salt)],
        ]
        for index in range(3):
            yield from steps[(turn + index) % 3]()

    def _one(self, path: str, user: User, question: Question, k: int, salt: str) -> Row:
        once = self._paths.once(path, user.user_id, question.text, k, salt)
        return Row(
            k=k,
            path=path,
            user=user.user_id,
            question=question.text,
            answer=once.completion.text.strip(),
            right=question.is_right(once.completion.text),
            found=question.is_right("\n".join(once.memories)),
            dropped=once.dropped,
            ttft_s=once.ttft_s,
            completion=once.completion,
        )


def ttft_ms(rows: Sequence[Row], k: int, path: str) -> float:
    """Median milliseconds to the first token."""
    return 1e3 * median(row.ttft_s for row in rows if (row.k, row.path) == (k, path))


def ratio(rows: Sequence[Row], k: int, above: str, below: str) -> float:
    """Median over questions of TTFT on one path over TTFT on another: pairs share question and moment."""

    def times(path: str) -> list[float]:
        return [row.ttft_s for row in rows if (row.k, row.path) == (k, path)]

    return median(a / b for a, b in zip(times(above), times(below), strict=True))
