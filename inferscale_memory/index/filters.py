"""mem0's filters, read once and evaluated on columns before any top-k is taken.

The syntax is mem0's (docs.mem0.ai, "metadata filtering"), in both spellings in which it arrives at a store:
`AND`, `OR`, `NOT` from `get_all`, and `$or`, `$not` from `search`. What a filter says must never depend on how many
facts there are, nor on their order.

A condition holds only for a value that is there, so `ne` and `nin` do not match a fact that lacks the key; that
is how mem0's Qdrant and pgvector stores answer. `{"NOT": [{"key": value}]}` matches it. A list in the payload
matches where one of its elements does, and `ne` / `nin` where none of them is the operand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.arguments import as_json
from inferscale_memory.errors import ConfigurationError, StoreError

Mask = NDArray[np.bool_] | None
"""Which rows match, `[rows]`; None is all of them."""

WILDCARD = "*"
"""As a value: any. As an id it is a name like any other, which a user may have chosen."""
IDENTITIES = frozenset(("user_id", "agent_id", "run_id", "actor_id"))
"""Keys whose values are names of somebody or something."""
_LOGIC = {"AND": "AND", "$and": "AND", "OR": "OR", "$or": "OR", "NOT": "NOT", "$not": "NOT"}
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?)?$")


class Column(Protocol):
    """The values of one key: `values[codes[row]]` is the row's, None where it has none."""

    values: list[Any]

    @property
    def codes(self) -> NDArray[np.int32]: ...


class Table(Protocol):
    """What a condition is evaluated on."""

    def __len__(self) -> int: ...
    def column(self, key: str) -> Column: ...


class Condition(Protocol):
    def mask(self, table: Table) -> Mask: ...


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every part holds; with no parts, always."""

    parts: tuple[Condition, ...]

    def mask(self, table: Table) -> Mask:
        found: Mask = None
        for part in self.parts:
            one = part.mask(table)
            if one is not None:
                found = one if found is None else found & one
        return found


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one part holds."""

    parts: tuple[Condition, ...]

    def mask(self, table: Table) -> Mask:
        found = np.zeros(len(table), dtype=np.bool_)
        for part in self.parts:
            one = part.mask(table)
            if one is None:
                return None
            found |= one
        return found


@dataclass(frozen=True, slots=True)
class NoneOf:
    """No part holds."""

    parts: tuple[Condition, ...]

    def mask(self, table: Table) -> Mask:
        found = AnyOf(self.parts).mask(table)
        return np.zeros(len(table), dtype=np.bool_) if found is None else ~found


@dataclass(frozen=True, slots=True)
class Test:
    """One operator on one key. It is asked once per distinct value, not per row."""

    __test__ = False  # pytest: this is none of yours

    key: str
    holds: Callable[[Any], bool]

    def mask(self, table: Table) -> Mask:
        column = table.column(self.key)
        hits = [self.holds(value) for value in column.values]
        if all(hits):
            return None
        mask: NDArray[np.bool_] = np.asarray(hits, dtype=np.bool_)[column.codes]
        return mask


def read(filters: Mapping[str, Any] | None) -> Condition:
    """The condition that `filters` say.

    Raises:
        StoreError: an operator that does not exist, or an operand it cannot take.
    """
    if not filters:
        return AllOf(())
    if not isinstance(filters, Mapping):
        raise StoreError(f"filters are a {type(filters).__name__}: pass a mapping of keys to conditions")
    parts: list[Condition] = []
    for key, value in filters.items():
        if key in _LOGIC:
            parts.append(_logical(_LOGIC[key], key, value))
        elif str(key).startswith("$"):
            raise _unknown(key)
        else:
            parts += _tests(key, value)
    return AllOf(tuple(parts))


def _logical(logic: str, key: str, value: Any) -> Condition:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, Mapping) for v in value):
        raise StoreError(f"{key} needs a list of at least one filter, not {value!r}")
    parts = tuple(read(part) for part in value)
    if logic == "AND":
        return AllOf(parts)
    return AnyOf(parts) if logic == "OR" else NoneOf(parts)


def _tests(key: str, value: Any) -> list[Condition]:
    if isinstance(value, str) or not isinstance(value, Mapping):
        if isinstance(value, list | tuple | set | frozenset):
            return [Test(key, _in(key, list(value)))]
        wildcard = isinstance(value, str) and value == WILDCARD and key not in IDENTITIES
        return [Test(key, _present if wildcard else _eq(key, value))]
    if not value:
        raise StoreError(f"the filter on {key!r} is empty: pass a value, or one of {_known()}")
    tests: list[Condition] = []
    for operator, operand in value.items():
        if operator not in _OPERATORS:
            raise _unknown(operator, key)
        tests.append(Test(key, _OPERATORS[operator](key, operand)))
    return tests


def _unknown(operator: str, key: str | None = None) -> StoreError:
    where = "" if key is None else f" on {key!r}"
    return StoreError(f"there is no filter operator {operator!r}{where}: this store knows {_known()}")


def _known() -> str:
    return f'{", ".join(_OPERATORS)}, AND, OR, NOT, and "*" as a value'


# -- operators: each takes key and operand, and gives the test of one value -----------------------------------


def _present(value: Any) -> bool:
    return value is not None


def _eq(key: str, operand: Any) -> Callable[[Any], bool]:
    operand = _scalar(key, operand)
    if operand is None:
        return lambda value: value is None
    return lambda value: any(_same(one, operand) for one in _elements(value))


def _ne(key: str, operand: Any) -> Callable[[Any], bool]:
    equal = _eq(key, operand)
    return lambda value: value is not None and not equal(value)


def _in(key: str, operand: Any) -> Callable[[Any], bool]:
    if not isinstance(operand, list | tuple | set | frozenset):
        raise StoreError(f"the filter on {key!r} needs a list of values, not {operand!r}")
    equals = [_eq(key, one) for one in operand]
    return lambda value: any(equal(value) for equal in equals)


def _nin(key: str, operand: Any) -> Callable[[Any], bool]:
    among = _in(key, operand)
    return lambda value: value is not None and not among(value)


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[str, Any], Callable[[Any], bool]]:
    def operator(key: str, operand: Any) -> Callable[[Any], bool]:
        limit = _rank(_scalar(key, operand))
        if limit is None:
            raise StoreError(
                f"the filter on {key!r} cannot order by {operand!r}: pass a number, a date or text"
            )

        def holds(value: Any) -> bool:
            ranks = (_rank(one) for one in _elements(value))
            return any(r is not None and r[0] == limit[0] and compare(r[1], limit[1]) for r in ranks)

        return holds

    return operator


def _contains(fold: Callable[[str], str]) -> Callable[[str, Any], Callable[[Any], bool]]:
    def operator(key: str, operand: Any) -> Callable[[Any], bool]:
        operand = _scalar(key, operand)
        if operand is None:
            raise StoreError(f"the filter on {key!r} cannot contain nothing: pass text")
        if not isinstance(operand, str):
            return lambda value: isinstance(value, list) and any(_same(one, operand) for one in value)
        wanted = fold(operand)

        def holds(value: Any) -> bool:
            if isinstance(value, list):
                return any(isinstance(one, str) and fold(one) == wanted for one in value)
            return isinstance(value, str) and wanted in fold(value)

        return holds

    return operator


_OPERATORS: dict[str, Callable[[str, Any], Callable[[Any], bool]]] = {
    "eq": _eq,
    "ne": _ne,
    "gt": _ordered(lambda a, b: a > b),
    "gte": _ordered(lambda a, b: a >= b),
    "lt": _ordered(lambda a, b: a < b),
    "lte": _ordered(lambda a, b: a <= b),
    "in": _in,
    "nin": _nin,
    "contains": _contains(lambda text: text),
    "icontains": _contains(str.casefold),
}


def _scalar(key: str, operand: Any) -> Any:
    """An operand as it would be stored."""
    try:
        read = as_json(operand, f"the filter on {key!r}")
    except ConfigurationError as error:
        raise StoreError(str(error)) from error
    if isinstance(read, list | dict):
        raise StoreError(f"the filter on {key!r} compares with a {type(operand).__name__}: pass one value")
    if read != read:
        raise StoreError(f"the filter on {key!r} compares with {operand!r}, which nothing is equal to: pass a number")
    return read


def _elements(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _same(value: Any, operand: Any) -> bool:
    """Equal, and of one kind: JSON's true is not 1."""
    return isinstance(value, bool) is isinstance(operand, bool) and bool(value == operand)


def _rank(value: Any) -> tuple[str, Any] | None:
    """What values are ordered by, within their kind: numbers, moments (ISO dates; UTC unless they say), text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return "number", value
    if not isinstance(value, str):
        return None
    if _DATE.match(value):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return "text", value
        return "moment", (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return "text", value
