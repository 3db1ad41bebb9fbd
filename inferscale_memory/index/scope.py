"""Which owners a fact belongs to and a filter can reach. It must never decide whether a fact matches: it only
says where looking is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferscale_memory.errors import StoreError

IDS = ("user_id", "agent_id", "run_id")


def trimmed(name: str, ids: Mapping[str, Any]) -> str | None:
    """The id called `name` among `ids`, trimmed as mem0 does; None where there is none."""
    value = ids.get(name)
    if value is None:
        return None
    if isinstance(value, list | tuple | dict):
        raise StoreError(f"{name} is a {type(value).__name__}: pass one id as text")
    return str(value).strip() or None


def owner_of(payload: Mapping[str, Any]) -> str:
    """The payload's user, else its agent, else its run, with the kind before it. Empty where it has none."""
    for name in IDS:
        if value := trimmed(name, payload):
            return f"{name.removesuffix('_id')}:{value}"
    return ""


def pinned(filters: Mapping[str, Any] | None) -> tuple[str, list[str]] | None:
    """An id that every match must carry: its name, and the values it can have. The most telling one, or None
    when the filter pins none; then every owner has to be looked at."""
    for name in IDS:
        values = _values(filters or {}, name)
        if values is not None:
            return name, values
    return None


def _values(filters: Mapping[str, Any], name: str) -> list[str] | None:
    condition = filters.get(name)
    if isinstance(condition, Mapping):
        condition = condition.get("eq", condition.get("in"))
    options = condition if isinstance(condition, list | tuple) else [condition]
    # An id that is no text is compared as what it is, which its owner's name does not tell.
    texts = [option.strip() for option in options if isinstance(option, str)]
    if len(texts) == len(options) and all(texts):
        return texts
    for key in ("AND", "$and"):
        parts = filters.get(key)
        for part in parts if isinstance(parts, Sequence) and not isinstance(parts, str) else ():
            found = _values(part, name) if isinstance(part, Mapping) else None
            if found is not None:
                return found
    return None
