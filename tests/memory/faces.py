"""Both faces behind one way of calling, so that one test can say what holds for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from inspect import isawaitable
from typing import Any

import mem0

from inferscale_memory.memory import AsyncMemory, Memory

OURS: dict[str, Any] = {"sync": Memory, "async": AsyncMemory}
MEM0S: dict[str, Any] = {"sync": mem0.Memory, "async": mem0.AsyncMemory}
assert not set(OURS.values()) & set(MEM0S.values())


class Settled:
    """A memory or session of either face, each of whose methods gives its result.

    Attributes:
        itself: the object behind it.
    """

    def __init__(self, itself: Any, run: Callable[[Any], Any]) -> None:
        self.itself = itself
        self._run = run

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.itself, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            result = found(*args, **options)
            if isawaitable(result) and not isinstance(result, AsyncMemory):
                result = self._run(result)
            return self._pieces(result) if isinstance(result, AsyncIterator) else result

        return call

    def _pieces(self, pieces: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._run(_next(pieces))
            except StopAsyncIteration:
                return


async def _next(pieces: AsyncIterator[Any]) -> Any:
    return await anext(pieces)


class Loop:
    """An event loop that outlives single calls."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Any) -> Any:
        async def settled() -> Any:
            return await work

        return self._runner.run(settled())

    def close(self) -> None:
        self._runner.close()
