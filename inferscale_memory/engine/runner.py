"""How a face waits: what lets one method body serve the sync and the async face.

Bodies are coroutines over a `Waiting`. Under the sync face nothing in them ever suspends, so `run` drives them
to their end in place; under the async face whatever blocks goes to a thread. Neither may block an event loop,
and context variables must hold on both sides of every thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from inferscale_memory.coroutines import run as run  # what drives the bodies of the sync face
from inferscale_memory.engine.base import Completion, Engine, SamplingOptions
from inferscale_memory.prompt import Prompt

P = ParamSpec("P")
T = TypeVar("T")
_MISSING = object()


class Waiting(Protocol):
    """Direct calls, or threads."""

    async def call(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What `work` returns. It may block."""
        ...

    async def settle(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The same, to its end: cancelled, it raises only then."""
        ...

    async def result(self, value: Any) -> Any:
        """What a method of this face has as its result, from what calling it returned."""
        ...

    async def generate(self, engine: Engine, prompt: Prompt, options: SamplingOptions) -> Completion: ...

    def within(self, manager: AbstractContextManager[None]) -> AbstractAsyncContextManager[None]:
        """A block within `manager`, whose beginning and end may block. Context variables that it sets hold
        in the block."""
        ...


class Direct:
    """The sync face: everything happens here and now."""

    async def call(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return work(*args, **options)

    async def settle(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return work(*args, **options)

    async def result(self, value: Any) -> Any:
        return value

    async def generate(self, engine: Engine, prompt: Prompt, options: SamplingOptions) -> Completion:
        return engine.generate(prompt, options)

    @asynccontextmanager
    async def within(self, manager: AbstractContextManager[None]) -> AsyncIterator[None]:
        with manager:
            yield


class Threads:
    """The async face: what blocks runs in threads, and the engine answers through its own async twin."""

    async def call(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.to_thread(work, *args, **options)

    async def settle(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await _finished(copy_context(), partial(work, *args, **options))

    async def result(self, value: Any) -> Any:
        return await value

    async def generate(self, engine: Engine, prompt: Prompt, options: SamplingOptions) -> Completion:
        return await engine.agenerate(prompt, options)

    @asynccontextmanager
    async def within(self, manager: AbstractContextManager[None]) -> AsyncIterator[None]:
        """A manager resets the variables it has set in the context it has set them in. So both its ends run
        in one context of their own, and what they set is copied for the block."""
        before, own = copy_context(), copy_context()
        try:
            await _finished(own, manager.__enter__)
        except asyncio.CancelledError as error:
            await _finished(own, manager.__exit__, type(error), error, error.__traceback__)
            raise
        set_here = [(var, var.set(own[var])) for var in own if before.get(var, _MISSING) is not own[var]]
        try:
            yield
        except BaseException as error:
            if not await _finished(own, manager.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await _finished(own, manager.__exit__, None, None, None)
        finally:
            for var, token in reversed(set_here):
                var.reset(token)


async def _finished(context: Context, work: Callable[..., T], *args: Any) -> T:
    """What `work` returns in a thread and in `context`. Cancelled, it raises only when `work` has ended: half
    of a beginning or an end would be worse than a late answer."""
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(None, partial(context.run, work, *args))
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:
            break
    result = future.result()
    if cancelled is not None:
        raise cancelled
    return result
