"""Which items a filter holds for, and which namespaces a condition: LangGraph's rules, as its in-memory store has
them. Where that one fails on an item that a filter does not fit, its SQLite store's are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langgraph.store.base import ListNamespacesOp, MatchCondition

from inferscale_memory.arguments import as_plain
from inferscale_memory.errors import StoreError

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": lambda value, operand: bool(value == operand),
    "$ne": lambda value, operand: bool(value != operand),
    "$gt": lambda value, operand: value > operand,
    "$gte": lambda value, operand: value >= operand,
    "$lt": lambda value, operand: value < operand,
    "$lte": lambda value, operand: value <= operand,
}
_SIZES = ("$gt", "$gte", "$lt", "$lte")
Filters = Mapping[str, Any]


def checked(filters: Any) -> Filters:
    """A filter whose every field, operator and operand exists, whatever items it will be asked about.

    Raises:
        StoreError: it is no dictionary of fields, has an operator that LangGraph does not have, or an operand that
            has no size.
        ConfigurationError: it is nested too deep.
    """
    if filters is None:
        return {}
    if not isinstance(filters, Mapping):
        raise StoreError(f"filter must be a dictionary of fields, not a {type(filters).__name__}")
    plain: Filters = as_plain(filters, "filter")
    for name, wanted in plain.items():
        if not isinstance(name, str):
            raise StoreError(f"filter names fields, and {name!r} is no text")
        if name.startswith("$"):
            raise StoreError(
                f"filter has {name!r} where a field is named: conditions on several fields all have to hold, and "
                "LangGraph has no other way to join them"
            )
        _check(wanted, name)
    return plain


def _check(wanted: Any, name: str) -> None:
    if not isinstance(wanted, Mapping):
        return
    operators = any(str(key).startswith("$") for key in wanted)
    for key, operand in wanted.items():
        if not operators:
            _check(operand, f"{name}.{key}")
        elif key not in _OPERATORS:
            raise StoreError(
                f"filter[{name!r}] has no operator {key!r}: LangGraph knows {', '.join(_OPERATORS)}"
            )
        elif key in _SIZES and not isinstance(operand, int | float | str):
            raise StoreError(f"filter[{name!r}] compares by {key} with {operand!r}: pass a number or a text")


def holds(filters: Filters, value: Mapping[str, Any]) -> bool:
    """Whether every condition of a `checked` filter holds for an item's value. A field that is missing is None, which
    is neither larger nor smaller than anything."""
    return all(_equal(_field(value, name), wanted) for name, wanted in filters.items())


def _field(value: Mapping[str, Any], name: str) -> Any:
    """A field of this name, else, with dots in it, one of a field of a field, as LangGraph's SQLite store reads it."""
    if name in value or "." not in name:
        return value.get(name)
    found: Any = value
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if any(str(key).startswith("$") for key in wanted):
            return all(_compare(name, value, operand) for name, operand in wanted.items())
        return isinstance(value, Mapping) and all(
            _equal(value.get(key), inner) for key, inner in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(wanted)
            and all(_equal(one, other) for one, other in zip(value, wanted, strict=True))
        )
    return bool(value == wanted)


def _compare(name: str, value: Any, operand: Any) -> bool:
    if name not in _SIZES:
        return _OPERATORS[name](value, operand)
    number, bound = _number(value), _number(operand)
    if bound is None:  # a text that is no number: dates in ISO's form have the order of their letters
        return isinstance(value, str) and _OPERATORS[name](value, operand)
    return number is not None and _OPERATORS[name](number, bound)


def _number(value: Any) -> float | None:
    """A number, or a text that writes one. A whole number stays one, however large."""
    if isinstance(value, int | float):
        return value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def listed(namespaces: Sequence[tuple[str, ...]], op: ListNamespacesOp) -> list[tuple[str, ...]]:
    """Those of `namespaces` that `op` asks for, in order, cut to its depth and to its page."""
    found = {
        namespace if op.max_depth is None else namespace[: op.max_depth]
        for namespace in namespaces
        if all(_matches(condition, namespace) for condition in op.match_conditions or ())
    }
    return sorted(found)[op.offset : op.offset + op.limit]


def _matches(condition: MatchCondition, namespace: tuple[str, ...]) -> bool:
    path = condition.path
    if condition.match_type not in ("prefix", "suffix"):
        raise StoreError(f"there is no match type {condition.match_type!r}: pass 'prefix' or 'suffix'")
    if len(namespace) < len(path):
        return False
    part = (
        namespace[: len(path)]
        if condition.match_type == "prefix"
        else namespace[len(namespace) - len(path) :]
    )
    return all(wanted in ("*", label) for wanted, label in zip(path, part, strict=True))


def pinned(op: ListNamespacesOp) -> tuple[str, ...]:
    """The labels that every namespace must begin with which `op` asks for."""
    longest: tuple[str, ...] = ()
    for condition in op.match_conditions or ():
        if condition.match_type == "prefix":
            begins = condition.path[: condition.path.index("*")] if "*" in condition.path else condition.path
            longest = max(longest, tuple(begins), key=len)
    return longest
