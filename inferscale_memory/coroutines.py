"""Running a coroutine that never suspends, in place and without an event loop.

It is what lets one body serve a sync and an async face: under the sync one, everything that is awaited has happened
when the `await` is reached. It must never be given a coroutine that waits for an event loop.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a body of the sync face has suspended: it awaits something that is not its Waiting's")
