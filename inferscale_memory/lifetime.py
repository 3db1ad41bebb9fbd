"""The two moments in a process's life that objects with threads have to know of: its end, and a fork.

At the end, a daemon thread that is still inside torch or vLLM aborts the process: the interpreter unwinds it through
C++ that forbids that. So what owns a thread is closed before, by a hook of `atexit`. After a fork, the child has the
objects of its parent and none of its threads; whoever held a lock will never let it go. So each object gets a chance
to renew itself before anything else runs in the child.

Objects are known by weak references: none lives longer because of this.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
from typing import Any, Protocol
from weakref import WeakSet

_log = logging.getLogger(__name__)


class Closes(Protocol):
    def close(self) -> None:
        """Closing twice is harmless."""
        ...


class Forks(Protocol):
    def _renew(self) -> None:
        """Called in a forked child, where no other thread runs: take new locks, and give up what is the parent's."""
        ...


class Files(Protocol):
    def before_fork(self) -> None:
        """Wait for the transaction under way, and close."""
        ...

    def after_fork(self) -> None:
        """In the parent and in the child. What is used is opened again."""
        ...


_workers: WeakSet[Closes] = WeakSet()
_engines: WeakSet[Closes] = WeakSet()
_forking: WeakSet[Forks] = WeakSet()
_files: WeakSet[Files] = WeakSet()
_away: list[Files] = []


def close_at_exit(thing: Closes, *, engine: bool = False) -> None:
    """Have `thing` closed when the process ends, after the app's own threads and before the interpreter goes. What
    uses engines is closed before the engines."""
    (_engines if engine else _workers).add(thing)
    # The latest hook runs first. Libraries that were imported since the last call (multiprocessing, vLLM) have hooks
    # that end processes which `thing` still needs.
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def renew_after_fork(thing: Forks) -> None:
    """Have `thing` renewed in every child that this process forks."""
    _forking.add(thing)


def closed_over_fork(thing: Files) -> None:
    """Have the SQLite connections of `thing` closed whenever this process forks. SQLite keeps in memory which locks a
    process holds, and the system does not hand them on: a child that knows of them would go on without any."""
    _files.add(thing)


def leave_behind(*things: Any) -> None:
    """Keep `things`, which a forked child has from its parent, from ever being finalized in it: an SQLite connection
    would be closed with the parent's log, a vLLM would be shut down."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(
            ctypes.py_object(thing)
        )  # a list would be cleared at the end of the process


def _close_all() -> None:
    for thing in [*_workers, *_engines]:
        try:
            thing.close()
        except Exception as error:
            _log.debug("%s could not be closed at the end of the process: %s", type(thing).__name__, error)


def _before_fork() -> None:
    for thing in list(_files):
        thing.before_fork()
        _away.append(thing)


def _after_fork() -> None:
    while _away:
        _away.pop().after_fork()


def _forked() -> None:
    _after_fork()
    _workers.clear()
    _engines.clear()
    for thing in list(_forking):
        thing._renew()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked)
