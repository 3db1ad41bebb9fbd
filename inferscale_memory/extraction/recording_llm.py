"""The LLM as mem0 sees it while an `add` is under way: what it answers is heard here first.

mem0 neither tells a failed call from others by its type nor keeps what was said. It must change nothing about an LLM
beyond refusing an answer mem0 would misread, and nothing at all outside of an `add`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mem0.memory.utils import remove_code_blocks

from inferscale_memory.arguments import as_plain, repaired
from inferscale_memory.errors import ExtractionError, InferScaleError
from inferscale_memory.extraction.instructions import (
    NOTHING,
    CopiedError,
    ExtractionLLMError,
    TooMuchError,
    check_answer,
    says_nothing,
)
from inferscale_memory.journal import Turn


class Attempt:
    """One call of `add`.

    Attributes:
        failure: what its LLM raised, or what was wrong with its answer; None while nothing was.
        texts: the facts that its LLM has drawn, whether mem0 writes them or not.
        turns: what it is about, as the log has it.
        copied: its LLM has copied its instructions instead, so it got nothing out of the messages.
    """

    def __init__(self, memory: Any) -> None:
        self.failure: Exception | None = None
        self.texts: list[str] = []
        self.turns: Sequence[Turn] = ()
        self.copied = False
        self._memory = memory

    def of(self, memory: Any) -> bool:
        return self._memory is memory

    def error(self, mem0s: Exception) -> Exception:
        """What the caller is to see instead of `mem0s`: errors of ours keep their words, and say what to do."""
        if isinstance(self.failure, ExtractionError):
            return self.failure
        if isinstance(self.failure, InferScaleError):
            return ExtractionLLMError(f"{self.failure}. The messages are kept: retry_failed() tries again")
        return mem0s

    @property
    def reason(self) -> str:
        """Why it failed. Words of others than us may hold what a user said."""
        ours = isinstance(self.failure, InferScaleError)
        return str(self.failure) if ours else f"the LLM raised {type(self.failure).__name__}"


# A context variable, because asyncio.to_thread carries it along.
_attempt: ContextVar[Attempt | None] = ContextVar("inferscale_attempt", default=None)


@contextmanager
def attempt(memory: Any) -> Iterator[Attempt]:
    """Within the block, the LLM of `memory` is heard."""
    made = Attempt(memory)
    token = _attempt.set(made)
    try:
        yield made
    finally:
        _attempt.reset(token)


def in_parts_next() -> bool:
    """Whether the call under way has failed only because it is too much at once, and will be made again in parts."""
    now = _attempt.get()
    return now is not None and isinstance(now.failure, TooMuchError) and len(now.turns) > 1


def heard(memory: Any, llm: Any) -> Any:
    """`llm` as `memory` shows it to mem0: itself, unless an `add` of that memory is under way."""
    now = _attempt.get()
    return llm if now is None or not now.of(memory) else _Heard(llm, now)


class _Heard:
    """An LLM that is listened to."""

    def __init__(self, llm: Any, attempt: Attempt) -> None:
        self._llm = llm
        self._attempt = attempt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate_response(self, *args: Any, **options: Any) -> Any:
        extracting = options.get("response_format") is not None  # mem0 asks for JSON then, and never else
        if extracting and says_nothing(options.get("messages") or ()):
            return NOTHING
        try:
            answer = self._llm.generate_response(*args, **options)
            if extracting:
                answer = _whole(answer)
                self._attempt.texts += check_answer(answer)
        except CopiedError:
            self._attempt.copied = True
            return NOTHING
        except Exception as error:
            self._attempt.failure = error
            raise
        return answer


def _whole(answer: Any) -> Any:
    """An answer without half characters, which JSON may spell as escapes, and nothing can store."""
    if not isinstance(answer, str):
        return answer
    answer = repaired(answer)
    if "\\ud" not in answer.lower():
        return answer
    try:
        return json.dumps(as_plain(json.loads(remove_code_blocks(answer)), "the answer"), ensure_ascii=False)
    except (ValueError, RecursionError):  # no JSON: that is said elsewhere
        return answer
