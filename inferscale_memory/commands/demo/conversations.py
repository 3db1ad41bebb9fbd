"""Conversations to remember and questions to ask: our own file, or one of LoCoMo's. Values only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from inferscale_memory.errors import ConfigurationError

LOCOMO_DATE = "%I:%M %p on %d %B, %Y"
OURS = "two_users.json"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message."""

    speaker: str
    text: str


@dataclass(frozen=True, slots=True)
class Session:
    """Turns said in one sitting."""

    date: datetime
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the substrings (lower case) of which a right answer holds one."""

    text: str
    answers: tuple[str, ...]

    def is_right(self, answer: str) -> bool:
        return any(wanted in answer.lower() for wanted in self.answers)


@dataclass(frozen=True, slots=True)
class User:
    """One owner's conversation."""

    user_id: str
    name: str
    sessions: tuple[Session, ...]
    questions: tuple[Question, ...]

    @property
    def turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


def load(path: Path | None = None) -> list[User]:
    """Users of a conversation file; ours when none is named.

    Raises:
        ConfigurationError: no such file, or neither our format nor LoCoMo's.
    """
    path = _ours() if path is None else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as JSON ({error}); name a conversation file"
        ) from None
    if isinstance(data, list) and data:
        data = data[0]
    try:
        if "users" in data:
            return [_own_user(user) for user in data["users"]]
        return [_locomo_user(path.stem, data)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is neither a conversation file like examples/conversations/{OURS} nor one of LoCoMo's "
            f"({type(error).__name__}: {error})"
        ) from None


def _ours() -> Path:
    """Beside this file in an installed package, in examples/ in a checkout."""
    here = Path(__file__).parent
    places = (here / "conversations" / OURS, here.parents[2] / "examples" / "conversations" / OURS)
    for place in places:
        if place.is_file():
            return place
    raise ConfigurationError(
        f"the demo's conversation is missing ({places[1]}); reinstall, or pass --data FILE"
    )


def _own_user(user: Mapping[str, Any]) -> User:
    sessions = tuple(
        Session(
            datetime.fromisoformat(session["date"]),
            tuple(Turn(turn["speaker"], turn["text"]) for turn in session["turns"]),
        )
        for session in user["sessions"]
    )
    questions = tuple(
        Question(item["question"], tuple(answer.lower() for answer in item["answers"]))
        for item in user["questions"]
    )
    return User(user["user_id"], user["name"], sessions, questions)


def _locomo_user(name: str, data: Mapping[str, Any]) -> User:
    """LoCoMo: session_N with session_N_date_time, and `qa`; category 5 has no answer and is left out."""
    said = data.get("conversation", data)
    numbers = sorted(
        int(key.removeprefix("session_"))
        for key, value in said.items()
        if key.startswith("session_") and key.removeprefix("session_").isdigit() and isinstance(value, list)
    )
    sessions = tuple(
        Session(
            datetime.strptime(said[f"session_{number}_date_time"], LOCOMO_DATE),
            tuple(Turn(turn["speaker"], turn["text"]) for turn in said[f"session_{number}"]),
        )
        for number in numbers
    )
    if not sessions:
        raise ValueError("no sessions")
    questions = tuple(
        Question(item["question"], (str(item["answer"]).lower(),))
        for item in data.get("qa", [])
        if item.get("category") != 5 and "answer" in item
    )
    return User(name, f"{said['speaker_a']} and {said['speaker_b']}", sessions, questions)
