"""Tells the engine what to forget.

A text that is deleted is gone whatever the engine says, so its failure must never be the caller's: what it could not
be told is noted in the journal, and it is told again at the next forgetting, at `flush` and at the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import Lock

from inferscale_memory.engine.base import Engine
from inferscale_memory.engine.known_blobs import AtHand
from inferscale_memory.engine.lazy import LazyEngine
from inferscale_memory.errors import ClosedError
from inferscale_memory.journal import Journal, Owed

_log = logging.getLogger(__name__)


class Telling:
    """One memory's line to its engine."""

    def __init__(self, journal: Journal, engine: LazyEngine, at_hand: AtHand) -> None:
        self._owed = journal.owed
        self._engine = engine
        self._at_hand = at_hand
        self._lock = Lock()

    @property
    def pending(self) -> int:
        """How many calls the engine still has to hear."""
        return self._owed.count()

    def forget(self, wanted: Iterable[Owed]) -> None:
        """Take blobs and cached blocks from the engine. One that was never started holds nothing, unless it is a
        server, which hears of it later."""
        calls = list(wanted)
        self._at_hand.drop(key for call in calls for key in call.keys)
        engine = self._engine.started
        if engine is None:
            failed = calls if self._engine.outlives_us else []
        else:
            self.again()
            failed = [call for call in calls if not _told(engine, call)]
        if failed:
            self._owed.owe(failed)

    def again(self) -> None:
        """Tell what could not be told before."""
        engine = self._engine.started
        if engine is not None and self._owed.count():
            with self._lock:
                self._owed.settle(
                    [number for number, call in self._owed.all().items() if _told(engine, call)]
                )

    def start(self) -> None:
        """What is owed since another process lived. If its engine lived there too, nobody is left to be told."""
        if self._engine.started is None and not self._engine.outlives_us and not self._engine.forked:
            self._owed.settle(list(self._owed.all()))
        self.again()


def _told(engine: Engine, call: Owed) -> bool:
    try:
        engine.forget(call.owner, list(call.keys), list(call.tags))
        return True
    except ClosedError:  # nobody is left to be told now
        return False
    except Exception as error:
        _log.warning(
            "the engine could not be told to forget %d blobs (%s): it is told again at the next forgetting, at "
            "flush() and at the next start",
            len(call.keys),
            error,
        )
        return False
