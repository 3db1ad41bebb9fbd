"""Every public call of a memory, and of what stands on one, raises ClosedError once that is closed.

A call that is under way when another thread closes the memory fails somewhere below, in the words of SQLite, of mem0 or
of a vector store. Its caller sees ClosedError all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import getattr_static, iscoroutinefunction, isfunction
from typing import Any, TypeVar

from inferscale_memory.errors import ClosedError

C = TypeVar("C", bound=type)

CHECK = "_check_open"
"""The method of a guarded class that raises ClosedError where an instance is closed."""


def guarded(cls: C) -> C:
    """A class all of whose public methods but `close` are guarded, inherited ones too."""
    for name in dir(cls):
        method = getattr_static(cls, name)
        if isfunction(method) and not name.startswith("_") and name != "close":
            setattr(cls, name, _guarded(method))
    return cls


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    if iscoroutinefunction(method):

        @wraps(method)
        async def acall(itself: Any, *args: Any, **options: Any) -> Any:
            with _open(itself):
                return await method(itself, *args, **options)

        return acall

    @wraps(method)
    def call(itself: Any, *args: Any, **options: Any) -> Any:
        with _open(itself):
            return method(itself, *args, **options)

    return call


@contextmanager
def _open(itself: Any) -> Iterator[None]:
    check = getattr(type(itself), CHECK, lambda itself: None)  # mem0's own tests call methods with stand-ins
    check(itself)
    try:
        yield
    except ClosedError:
        raise
    except Exception as error:
        try:
            check(itself)
        except ClosedError as closed:
            raise closed from error
        raise
