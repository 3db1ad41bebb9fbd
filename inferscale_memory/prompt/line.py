"""How one fact is written down: one line of text that carries its date and ends in a newline.

The line must depend on nothing but the fact itself: its tokens are encoded once and injected anywhere.
"""

from __future__ import annotations

from datetime import datetime


def fact_line(text: str, *, when: datetime | None, speaker: str | None = None) -> str:
    """`- [2026-01-05] Maya: ...` and a newline; no brackets without a date, no name without a speaker.

    Args:
        text: the fact. Newlines and other runs of white space become single spaces, so it can neither end its
            line nor imitate a heading or a turn.
        when: when it was said. The date is taken as it stands: bring it to the user's time zone first.
        speaker: who said it.
    """
    date = "" if when is None else f"[{when.date().isoformat()}] "
    name = "" if speaker is None or not speaker.strip() else f"{_one_line(speaker)}: "
    return f"- {date}{name}{_one_line(text)}\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())
