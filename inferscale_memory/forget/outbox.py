"""Tells the engine what to forget.

The text of a deleted memory is gone whatever the engine answers, so a failure of the engine is never the caller's. What
could not be sent is kept in the journal and sent again with the next deletion, at `flush` and at the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import Lock

from inferscale_memory.engine.base import Engine
from inferscale_memory.engine.known_blobs import KnownBlobs
from inferscale_memory.engine.lazy import LazyEngine
from inferscale_memory.errors import ClosedError
from inferscale_memory.journal import Journal, PendingForget

_log = logging.getLogger(__name__)


class Outbox:
    """The calls of `forget` from one memory to its engine."""

    def __init__(self, journal: Journal, engine: LazyEngine, at_hand: KnownBlobs) -> None:
        self._pending = journal.pending_forgets
        self._engine = engine
        self._at_hand = at_hand
        self._lock = Lock()

    @property
    def pending(self) -> int:
        """How many calls are still to be made."""
        return self._pending.count()

    def send(self, wanted: Iterable[PendingForget]) -> None:
        """Have the engine drop blobs and cached blocks. An engine in this process that was never started holds none;
        a server is told later."""
        calls = list(wanted)
        self._at_hand.drop(key for call in calls for key in call.keys)
        engine = self._engine.started
        if engine is None:
            failed = calls if self._engine.outlives_us else []
        else:
            self.retry()
            failed = [call for call in calls if not _made(engine, call)]
        if failed:
            self._pending.add(failed)

    def retry(self) -> None:
        """Make the pending calls again."""
        engine = self._engine.started
        if engine is not None and self._pending.count():
            with self._lock:
                self._pending.remove(
                    [number for number, call in self._pending.all().items() if _made(engine, call)]
                )

    def start(self) -> None:
        """Take over what an earlier process left pending. If its engine lived in that process, the blobs are gone and
        the calls are dropped."""
        if self._engine.started is None and not self._engine.outlives_us and not self._engine.forked:
            self._pending.remove(list(self._pending.all()))
        self.retry()


def _made(engine: Engine, call: PendingForget) -> bool:
    try:
        engine.forget(call.owner, list(call.keys), list(call.tags))
        return True
    except ClosedError:  # the engine was closed meanwhile
        return False
    except Exception as error:
        _log.warning(
            "the engine could not be told to forget %d blobs (%s): it will be told again with the next deletion, at "
            "flush() and at the next start",
            len(call.keys),
            error,
        )
        return False
