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
    def renew(self) -> None:
        """Called in a forked child, where no other thread runs: take new locks, and give up what is the parent's."""
        ...


_workers: WeakSet[Closes] = WeakSet()
_engines: WeakSet[Closes] = WeakSet()
_forking: WeakSet[Forks] = WeakSet()


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


def _forked() -> None:
    _workers.clear()
    _engines.clear()
    for thing in list(_forking):
        thing.renew()


os.register_at_fork(after_in_child=_forked)
