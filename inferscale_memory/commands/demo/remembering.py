"""A conversation becomes memories, with its progress on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from inferscale_memory.commands.demo.conversations import Question, Session, User
from inferscale_memory.progress import bar


def messages(session: Session) -> list[dict[str, str]]:
    """A session as chat APIs write it."""
    return [
        {
            "role": "assistant" if turn.speaker == "Assistant" else "user",
            "name": turn.speaker,
            "content": turn.text,
        }
        for turn in session.turns
    ]


def remember(memory: Any, users: Sequence[User]) -> int:
    """Write every turn as a memory, and wait until all are encoded; returns how many."""
    total = sum(user.turns for user in users)
    with bar(f"Writing {total} turns", total) as advance:
        for user in users:
            for session in user.sessions:
                memory.add(messages(session), user_id=user.user_id, infer=False, timestamp=session.date)
                advance(len(session.turns))
    with bar("Encoding each once", total) as advance:
        done = 0

        def progress(encoded: int, _: int) -> None:
            nonlocal done
            advance(max(0, encoded - done))
            done = max(done, encoded)

        memory.flush(progress)
    return total


def alternating(users: Sequence[User]) -> list[tuple[User, Question]]:
    """Every user's questions, one of each user in turn."""
    columns = [[(user, question) for question in user.questions] for user in users]
    return [pair for row in zip_longest(*columns) for pair in row if pair is not None]
