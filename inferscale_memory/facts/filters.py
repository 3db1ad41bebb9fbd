"""Filters as an app gives them, read once for every store: ids are literal, and values are what was stored.

mem0 knows `"*"` as a wildcard, and hands it to the store for any key. An id is never one, wherever it stands: apps pass
names that users have chosen. So the mirror asks every store for an id of that name (`literal`), and a part of an AND
narrows what stands beside it (`conjunction`), where mem0 lets it take the place of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inferscale_memory.arguments import MAX_DEPTH, as_id, as_json, as_mapping, as_number, refusal
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.facts.scope import IDS
from inferscale_memory.facts.text import read_date
from inferscale_memory.index.filters import IDENTITIES, WILDCARD

_LOGIC = {"AND": "AND", "OR": "OR", "NOT": "NOT", "$and": "AND", "$or": "OR", "$not": "NOT"}
_MOMENTS = frozenset(("created_at", "updated_at"))
_ORDER = frozenset(("gt", "gte", "lt", "lte"))

Filters = Mapping[str, Any]


def as_filters(value: object, name: str = "filters") -> dict[str, Any]:
    """Filters in mem0's spelling, whose ids are text and whose operands are as values are stored.

    Raises:
        ConfigurationError: no dictionary, an id that is none, an operand that no value can be compared with, or more
            than `MAX_DEPTH` levels.
    """
    return _read(value, name, MAX_DEPTH, outermost=True)


def _read(value: object, name: str, depth: int, *, outermost: bool) -> dict[str, Any]:
    if depth <= 0:
        raise ConfigurationError(f"{name.split('[')[0]} are nested more than {MAX_DEPTH} levels deep: flatten them")
    read: dict[str, Any] = {}
    besides: list[dict[str, Any]] = []
    for key, condition in as_mapping(value, name).items():
        where = f"{name}[{key!r}]" if len(name) < MAX_DEPTH else name
        if logic := _LOGIC.get(key):
            if not isinstance(condition, list | tuple):
                raise refusal(where, condition, "a list of filters")
            parts = [_read(part, where, depth - 1, outermost=False) for part in condition]
            if logic in read:  # in both spellings
                besides.append({logic: parts})
            else:
                read[logic] = parts
        elif outermost and key in IDS:
            if condition is not None:  # as an argument that is not given
                read[key] = as_id(condition, where)
        elif key in IDENTITIES:
            read[key] = _condition(condition, where, as_id)
        else:
            read[as_json(key, name)] = _condition(condition, where, _moment if key in _MOMENTS else _operand)
    if besides:
        read["AND"] = [*read.get("AND", ()), *besides]
    return read


def _condition(condition: Any, where: str, operand: Callable[[Any, str], Any]) -> Any:
    """A value, a list of them, or operators with theirs."""
    if isinstance(condition, Mapping):
        return {
            operator: _values(value, where, operand if operator in _ORDER or operand is as_id else _operand)
            for operator, value in as_mapping(condition, where).items()
        }
    return _values(condition, where, _operand if operand is _moment else operand)


def _values(value: Any, where: str, operand: Callable[[Any, str], Any]) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return [operand(one, where) for one in value]
    return None if value is None else operand(value, where)


def _operand(value: Any, where: str) -> Any:
    """A value that stored ones can be compared with."""
    read = as_json(value, where)
    if read != read:
        raise refusal(where, value, "a value that something can be equal to")
    return read


def _moment(value: Any, where: str) -> Any:
    """The operand of a comparison of times, as mem0 writes them: ISO text. Seconds since the epoch are one too."""
    read = as_json(value, where)
    when = read_date(read if isinstance(read, str) else as_number(read, where))
    if when is None:
        raise refusal(where, value, "a date: ISO text such as '2016-01-31', a datetime, or seconds since the epoch")
    return when.isoformat()


# -- on their way to a store ---------------------------------------------------------------------------------


def literal(filters: Any) -> Any:
    """`filters` as a store is given them, in which no id is a wildcard. The very same object where there is none."""
    if not isinstance(filters, Mapping):
        return filters
    changed: dict[str, Any] = {}
    for key, condition in filters.items():
        if key in _LOGIC and isinstance(condition, list | tuple):
            parts = [literal(part) for part in condition]
            if any(new is not old for new, old in zip(parts, condition, strict=True)):
                changed[key] = parts
        elif key in IDENTITIES and isinstance(condition, str) and condition == WILDCARD:
            changed[key] = {"eq": WILDCARD}  # the one spelling that is a wildcard in no store
    return {**filters, **changed} if changed else filters


def conjunction(filters: Filters, read: Callable[[Filters], dict[str, Any]]) -> dict[str, Any]:
    """What mem0's `read` makes of filters, with every part of their ANDs still in it.

    mem0 writes the parts of an AND over each other and over what stands beside them: `{"user_id": "ada", "AND":
    [{"user_id": "ben"}]}` would find Ben's memories. Parts that say something else of the same key stay apart.
    """
    if not isinstance(filters, Mapping) or not isinstance(filters.get("AND"), list):
        return read(filters)
    together: dict[str, Any] = {key: value for key, value in filters.items() if key != "AND"}
    flat: list[Any] = []
    apart: list[dict[str, Any]] = []
    for part in filters["AND"]:
        fits = isinstance(part, Mapping) and all(
            key not in _LOGIC
            and (isinstance(value, str) or key not in IDENTITIES)  # mem0 counts on text there
            and (key not in together or _merges(together[key], value))
            for key, value in part.items()
        )
        if not fits:
            apart.append(conjunction(part, read))
            continue
        flat.append(part)
        for key, value in part.items():
            both = isinstance(value, Mapping) and key in together
            together[key] = {**together[key], **value} if both else value
    beside = {key: value for key, value in filters.items() if key != "AND"}
    processed = read({**beside, "AND": flat} if flat else beside)
    return {**processed, "$and": apart} if apart else processed


def _merges(one: Any, other: Any) -> bool:
    """Whether two conditions on a key are one condition of every store: different bounds of one range."""
    return (
        isinstance(one, Mapping)
        and isinstance(other, Mapping)
        and not one.keys() & other.keys()
        and {*one, *other} <= _ORDER
    )
