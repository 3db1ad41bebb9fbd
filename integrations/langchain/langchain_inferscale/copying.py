"""Copies share the memory or engine behind an object, as copies of a database's client share its connection. What is
pickled carries a configuration; an open memory or a running engine has no place in a file or another process, so
pickling one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import PurePath
from typing import Any, ClassVar, Self

from inferscale_memory.errors import CopyError


def sharing(things: Iterable[Any], memo: dict[int, Any] | None) -> dict[int, Any]:
    """The memo of a `deepcopy`, which from now on leaves each of `things` as it is."""
    memo = {} if memo is None else memo
    memo.update({id(thing): thing for thing in things})
    return memo


def picklable(name: str, thing: Any) -> None:
    """Raises CopyError for an open memory or engine, and for a configuration that has one in it."""
    if not _is_plain(thing):
        raise unpicklable(name)


def unpicklable(name: str) -> CopyError:
    """The error that refuses to pickle an object over an open memory or engine."""
    return CopyError(
        f"{name} cannot be pickled with an open memory or engine behind it: pickle the memory's configuration, and "
        f"make the {name} from it in the other process"
    )


class Shared:
    """A class whose copies share what `_shared` names (its memory, locks and threads), and that is not pickled."""

    _shared: ClassVar[tuple[str, ...]]

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = self.__copy__()
        memo[id(self)] = twin
        kept = {name: getattr(self, name) for name in self._shared}
        copied = {name: deepcopy(value, memo) for name, value in vars(self).items() if name not in kept}
        twin.__dict__.update(copied)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unpicklable(type(self).__name__)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | bytes | int | float | PurePath)
