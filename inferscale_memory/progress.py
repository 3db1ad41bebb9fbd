"""How far long work is, on stderr: a bar or a spinner on a terminal, elsewhere a line at least every 10 seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL_S = 10.0
"""Longest silence, in seconds, where there is no terminal."""


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[..., None]]:
    """The progress of `total` equal pieces of work; calling the result with a count moves it on (default 1)."""
    console = _console()
    if console.is_terminal:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda count=1: progress.advance(task, count)
        return
    lines = Lines(what, total)
    with _repeated(lambda: _print(console, lines.line())):
        yield lines.advance
    _print(console, lines.line())


@contextmanager
def steps(what: str) -> Iterator[Callable[[str], None]]:
    """The progress of work whose pieces have names; calling the result with a name says what is being done now."""
    console = _console()
    if console.is_terminal:
        with console.status(f"{what} ...") as status:
            yield lambda step: status.update(f"{what}: {step}")
        return
    now = ["starting"]
    began = time.monotonic()

    def step(name: str) -> None:
        now[0] = name
        _print(console, f"{what}: {name}")

    with _repeated(lambda: _print(console, f"{what}: {now[0]}, {_duration(time.monotonic() - began)} so far")):
        yield step


class Lines:
    """What a bar says where it cannot be drawn: how much is done, and about how long the rest takes.

    Any thread may advance it.
    """

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._total = total
        self._clock = clock
        self._began = clock()
        self._done = 0
        self._lock = Lock()

    def advance(self, count: int = 1) -> None:
        with self._lock:
            self._done += count

    def line(self) -> str:
        """Such as "Asking: 30 of 120 (25%), 0:20 so far, about 1:00 left"."""
        with self._lock:
            done = self._done
        seconds = self._clock() - self._began
        said = f"{self._what}: {done} of {self._total}"
        if self._total:
            said += f" ({100 * done // self._total}%)"
        said += f", {_duration(seconds)} so far"
        if 0 < done < self._total:
            said += f", about {_duration(seconds * (self._total - done) / done)} left"
        return said


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


@contextmanager
def _repeated(say: Callable[[], None]) -> Iterator[None]:
    """Call `say` every `INTERVAL_S` seconds, in a thread, until the block ends."""
    ended = Event()

    def work() -> None:
        while not ended.wait(INTERVAL_S):
            say()

    thread = Thread(target=work, name="inferscale-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False)
