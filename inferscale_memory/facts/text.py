"""What a fact says in a prompt, read from what mem0 keeps about it.

The words depend on the fact's payload alone, so a fact has the same line wherever it comes from: a write, a
search result, or a store that somebody else filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from hashlib import blake2b
from typing import Any

from inferscale_memory.prompt import fact_line

_DATE_FORMATS = (
    "%d %B %Y",
    "%d %B, %Y",
    "%B %d, %Y",
    "%d %b %Y",
    "%b %d, %Y",
    "%I:%M %p on %d %B, %Y",  # LoCoMo
)


@dataclass(frozen=True, slots=True)
class Words:
    """Text, speaker ("" for nobody) and date of a fact."""

    text: str
    speaker: str
    when: datetime | None

    @property
    def line(self) -> str:
        return fact_line(self.text, when=self.when, speaker=self.speaker or None)

    @property
    def digest(self) -> str:
        """Tells two lines apart."""
        return line_digest(self.line)


def line_digest(line: str) -> str:
    """Tells two lines apart."""
    return blake2b(line.encode(), digest_size=16).hexdigest()


def words_of(payload: Mapping[str, Any]) -> Words:
    """The words of a fact, from its payload in the vector store.

    Its date is the app's own `date`, else when mem0 created it. Its speaker is the name that came with the
    message, else the app's own `speaker`, else the role.
    """
    own = payload.get("date")
    when = read_date(own if own not in (None, "") else payload.get("created_at"))
    speaker = payload.get("actor_id") or payload.get("speaker") or str(payload.get("role") or "").capitalize()
    return Words(str(payload.get("data") or ""), str(speaker), when)


def payload_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The payload behind one of mem0's search results."""
    payload = {**(result.get("metadata") or {}), **result, "data": result.get("memory")}
    payload.pop("metadata", None)
    return payload


def read_date(value: Any) -> datetime | None:
    """A moment out of a datetime, a date, seconds since the epoch, or text that says one. None out of all
    else: a fact with a date nobody can read is better undated than misdated."""
    if isinstance(value, datetime):
        return value
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day)
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
        return _read_text(str(value or "").strip())
    except (ValueError, OverflowError, OSError):
        return None


def _read_text(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        for form in _DATE_FORMATS:
            try:
                return datetime.strptime(text, form)
            except ValueError:
                continue
    return None
