"""LoCoMo conversations as facts and questions. Values only; the files (CC BY-NC) are the user's."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from inferscale_memory.errors import ConfigurationError
from inferscale_memory.prompt import fact_line

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
"""The fifth, adversarial, is left out, as everybody does."""
_DATE = "%I:%M %p on %d %B, %Y"


@dataclass(frozen=True, slots=True)
class Fact:
    """One memory: a turn, or what somebody drew out of turns.

    Attributes:
        session, place: which session it is from, and its number in the conversation: facts are in order.
        dated: whether its line says when.
    """

    text: str
    speaker: str
    when: datetime
    session: int
    place: int
    dated: bool = True

    @property
    def line(self) -> str:
        return fact_line(self.text, when=self.when if self.dated else None, speaker=self.speaker or None)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its gold answer and its category (a key of `CATEGORIES`).

    Attributes:
        evidence: places of the turns that the answer is in; -1 for one that is not in the conversation.
    """

    text: str
    answer: str
    category: int
    name: str
    evidence: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one owner remembers, and what is asked about it."""

    name: str
    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]

    def sample(self, count: int | None, seed: int) -> list[Question]:
        """`count` of the questions, the same ones for the same seed; more of them contain fewer."""
        drawn = sorted(self.questions, key=lambda question: random.Random(f"{seed} {question.name}").random())
        return drawn if count is None else drawn[:count]

    def beginning(self, count: int) -> Conversation:
        """Only its first `count` turns, and the questions whose evidence lies in them."""
        asked = (
            question
            for question in self.questions
            if question.evidence and all(0 <= place < count for place in question.evidence)
        )
        return replace(self, facts=self.facts[:count], questions=tuple(asked))


def load(
    folder: Path, names: Sequence[str] = (), facts: Path | None = None, *, dated: bool = True
) -> list[Conversation]:
    """Conversations of `folder`, in order of their names.

    Args:
        names: those to load, as `26` or `conv-26`; all when empty.
        facts: JSON of extracted facts to use instead of raw turns: {conversation: [{"text", "date", and if known
            "speaker", "session"}, ...]}, dates in ISO form.
        dated: whether the facts' lines say when.

    Raises:
        ConfigurationError: no such files, or files of another form.
    """
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if names:
        wanted = {name if name.startswith("conv-") else f"conv-{name}" for name in names}
        missing = wanted - {path.stem for path in paths}
        if missing:
            raise ConfigurationError(f"{folder} has no {', '.join(sorted(missing))}: name what is there")
        paths = [path for path in paths if path.stem in wanted]
    if not paths:
        raise ConfigurationError(f"{folder} holds no conversations: pass a folder of LoCoMo's conv-*.json")
    extracted = None if facts is None else _read(facts)
    return [_conversation(path, extracted, dated) for path in paths]


def _conversation(path: Path, extracted: Any, dated: bool) -> Conversation:
    data = _read(path)
    try:
        turns, said = _turns(data.get("conversation", data))
        if extracted is not None:
            turns = [_extracted(item, place) for place, item in enumerate(extracted[path.stem])]
        questions = [
            Question(
                str(item["question"]),
                str(item["answer"]),
                int(item["category"]),
                f"{path.stem} {number}",
                tuple(said.get(turn, -1) for turn in _names(item.get("evidence", ()))),
            )
            for number, item in enumerate(data["qa"])
            if item.get("category") in CATEGORIES and item.get("answer") not in (None, "")
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is not a conversation of LoCoMo's ({type(error).__name__}: {error}): leave it out of the folder"
        ) from error
    return Conversation(path.stem, tuple(replace(turn, dated=dated) for turn in turns), tuple(questions))


def _turns(data: Mapping[str, Any]) -> tuple[list[Fact], dict[str, int]]:
    """The turns, and the place of each by the name that evidence calls it."""
    numbers = sorted(int(key.removeprefix("session_")) for key in data if key[8:].isdigit())
    facts: list[Fact] = []
    places: dict[str, int] = {}
    for number in numbers:
        when = datetime.strptime(data[f"session_{number}_date_time"], _DATE)
        for turn in data[f"session_{number}"]:
            text = str(turn["text"])
            if turn.get("blip_caption"):
                text = f"{text} [shares {turn['blip_caption']}]"
            if text.strip():
                places[str(turn.get("dia_id"))] = len(facts)
                facts.append(Fact(text, str(turn["speaker"]), when, number, len(facts)))
    return facts, places


def _names(evidence: Sequence[Any]) -> list[str]:
    """Names of turns; some entries hold several."""
    return [name for entry in evidence for name in re.split(r"[;,\s]+", str(entry)) if name]


def _extracted(item: Mapping[str, Any], place: int) -> Fact:
    when = datetime.fromisoformat(item["date"])
    return Fact(str(item["text"]), str(item.get("speaker", "")), when, int(item.get("session", place)), place)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON ({error}): pass another file") from error
