"""Which items a filter holds for, and which namespaces a condition: LangGraph's rules, as its in-memory store has
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langgraph.store.base import ListNamespacesOp, MatchCondition

from inferscale_memory.errors import StoreError

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": lambda value, operand: bool(value == operand),
    "$ne": lambda value, operand: bool(value != operand),
    "$gt": lambda value, operand: float(value) > float(operand),
    "$gte": lambda value, operand: float(value) >= float(operand),
    "$lt": lambda value, operand: float(value) < float(operand),
    "$lte": lambda value, operand: float(value) <= float(operand),
}


def holds(filters: Mapping[str, Any] | None, value: Mapping[str, Any]) -> bool:
    """Whether every condition holds for the fields of an item's value. One that is missing counts as None.

    Raises:
        StoreError: an operator that does not exist.
        TypeError, ValueError: a comparison by size with what is no number.
    """
    return all(_equal(value.get(name), wanted) for name, wanted in (filters or {}).items())


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if any(str(key).startswith("$") for key in wanted):
            return all(_operator(name)(value, operand) for name, operand in wanted.items())
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


def _operator(name: str) -> Callable[[Any, Any], bool]:
    if name not in _OPERATORS:
        raise StoreError(f"there is no filter operator {name!r}: LangGraph knows {', '.join(_OPERATORS)}")
    return _OPERATORS[name]


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
