"""A language model that says which answers are right: any server that speaks OpenAI's chat completions.

A judge sees the question, the gold answer and what was said, never along which path it was said. A verdict is kept with
its record, so a run that is judged again asks only for what has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx

from inferscale_memory.errors import EngineError

_TASK = (
    "You grade answers to questions about people's conversations. An answer is right when it says the same thing as "
    "the reference answer; it may be longer, shorter or in other words, and a date may be written in another way. It "
    "is wrong when it says something else, leaves out what was asked, or says that it does not know. Reply with one "
    "word: RIGHT or WRONG."
)
_VERDICT = re.compile(r"\b(right|wrong)\b", re.IGNORECASE)
_PATIENCE_S = 120.0
_VERDICT_TOKENS = 512
"""Room for a model that thinks before it answers."""


class Judge:
    """Asks one model.

    Args:
        url: base of the API, such as `http://localhost:8000/v1`.
        model: its name there.
        key: bearer token; empty for none.
    """

    def __init__(self, url: str, model: str, key: str = "") -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers, timeout=_PATIENCE_S)
        self._model = model

    def verdict(self, question: str, gold: str, said: str) -> float:
        """1.0 for a right answer, 0.0 for a wrong one.

        Raises:
            EngineError: no answer, or one that is no verdict.
        """
        if not said.strip():
            return 0.0
        asked = f"Question: {question}\nReference answer: {gold}\nAnswer to grade: {said.strip()}"
        body = {
            "model": self._model,
            "temperature": 0.0,
            "max_tokens": _VERDICT_TOKENS,
            "messages": [{"role": "system", "content": _TASK}, {"role": "user", "content": asked}],
        }
        try:
            reply = self._client.post("chat/completions", json=body)
            reply.raise_for_status()
            text = _content(reply.json())
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(
                f"the judge at {self._client.base_url} gave no answer ({error}): check --judge, --judge-model and "
                "INFERSCALE_JUDGE_KEY, then run the same command again"
            ) from error
        found = _VERDICT.findall(text)
        if not found:
            raise EngineError(f"the judge said {text[:80]!r}, neither RIGHT nor WRONG: use a more able model")
        return float(found[-1].lower() == "right")

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _content(reply: Any) -> str:
    """Raises ValueError on what is no chat completion."""
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError("it is no chat completion") from error
    return content if isinstance(content, str) else ""


def unjudged(
    records: list[dict[str, Any]], verdicts: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """Records with an answer and without a verdict."""
    return [
        record
        for record in records
        if record.get("said") is not None and (record["setting"], record["question"]) not in verdicts
    ]
