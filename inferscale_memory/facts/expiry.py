"""When the time of a memory is over.

mem0 keeps an `expiration_date` as a day, and counts days in UTC. Beside that day an instant is kept here where the two
differ: a moment is that moment, and a day without a time ends when it ends in the time zone of the process that was
told it (`TZ`), as a moment without a time zone is one of that zone. The same clock decides in search, listings, chat,
and what stands in every prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, date, datetime, time
from typing import Any

from inferscale_memory.journal.records import instant

DAY, MOMENT = "expiration_date", "expiration_time"
"""Keys of a payload: mem0's, and ours."""

# Whether the store shows what lives alone. A context variable: every task and thread has its own.
_hidden: ContextVar[bool] = ContextVar("inferscale_hides_expired", default=False)


def read_expiration(value: Any) -> tuple[Any, str | None]:
    """What mem0 is to be told, and the instant to keep beside it; None where mem0's own reading says the same.

    Takes a datetime, a date, or ISO text of either. Everything else is handed on for mem0 to refuse.
    """
    if isinstance(value, str):
        value = _read(value)
    if isinstance(value, datetime):
        when = value if value.tzinfo else value.astimezone()
        return when.date().isoformat(), when.isoformat()
    if isinstance(value, date):
        when = datetime.combine(value, time.max).astimezone()
        return value.isoformat(), when.isoformat() if when.utcoffset() else None
    return value, None


def _read(text: str) -> Any:
    for kind in (date, datetime):
        try:
            return kind.fromisoformat(text)
        except ValueError:
            continue
    return text


def ends(payload: Mapping[str, Any]) -> datetime | None:
    """The last instant of a memory's time; None where it has no end, or none that can be read."""
    try:
        day = date.fromisoformat(str(payload.get(DAY) or ""))
    except ValueError:
        return None
    try:
        moment = datetime.fromisoformat(str(payload.get(MOMENT) or ""))
    except ValueError:
        moment = None
    if moment is not None and moment.tzinfo and moment.date() == day:  # not left behind by another program
        return moment
    return datetime.combine(day, time.max, UTC)


def expires(payload: Mapping[str, Any]) -> str | None:
    """The same, as the journal keeps it."""
    end = ends(payload)
    return None if end is None else instant(end)


def is_expired(payload: Mapping[str, Any]) -> bool:
    """Whether a memory's time is over."""
    end = ends(payload)
    return end is not None and end <= datetime.now(UTC)


@contextmanager
def hiding_expired(hide: bool) -> Iterator[None]:
    """Within the block the store leaves out what has expired, or shows it."""
    token = _hidden.set(hide)
    try:
        yield
    finally:
        _hidden.reset(token)


def living(found: Any) -> Any:
    """What a store returned, without the rows whose time is over where those are hidden; in the same wrapping."""
    if not _hidden.get() or not isinstance(found, list | tuple) or not found:
        return found
    if isinstance(found[0], list | tuple):
        return type(found)([living(found[0]), *found[1:]])
    return [row for row in found if not is_expired(getattr(row, "payload", None) or {})]
