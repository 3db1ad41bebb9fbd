"""What one call of the user's does: its turns, the facts it writes, and what it makes forgotten.

A coroutine that is cancelled leaves threads behind that still write for it. A batch must never be carried out while
one of them is at work in the store: what has become of a fact is not known before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from inferscale_memory.facts.scope import Scope
from inferscale_memory.journal import Forgotten, Intent, Turn


@dataclass(slots=True)
class Batch:
    """One call.

    Attributes:
        path: the write path whose call this is.
        scope, turns: whose turns they are.
        taken: numbers of the turns that became facts word for word.
        shown: digest of a text, as mem0 keeps it -> ids of the facts with it that mem0 was shown.
        expected: ids of the facts that the store was given, whatever came of it.
        written: ids of the facts that were written.
        forgotten: what the journal has forgotten.
        whole: the call itself where it deletes everything of a scope.
        lost: the facts that go: `announced` by id first, `told` when it has happened.
        begun: numbers under which the journal has noted all this.
        resumed: the call was cut off by a crash, and is finished at the next start, which is no reason to start an
            engine.
        full: the disk was, for one fact at least.
        cut_off: it did not end by itself, so mem0 may not have come to write its history.
    """

    path: Any
    scope: Scope = field(default_factory=Scope)
    turns: Sequence[Turn] = ()
    taken: set[int] = field(default_factory=set)
    shown: dict[str, set[str]] = field(default_factory=dict)
    expected: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    forgotten: list[Forgotten] = field(default_factory=list)
    whole: Intent | None = None
    lost: list[Intent] = field(default_factory=list)
    announced: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    begun: list[int] = field(default_factory=list)
    resumed: bool = False
    full: bool = False
    cut_off: bool = False
    _open: bool = True
    _at_work: int = 0
    _changed: Condition = field(default_factory=Condition)

    @contextmanager
    def changing(self) -> Iterator[bool]:
        """Within the block nobody else changes the batch; False where it has been carried out already."""
        with self._changed:
            yield self._open

    def enter(self) -> bool:
        """The store is at work for the batch until `leave`; False where it has been carried out already."""
        with self._changed:
            self._at_work += self._open
            return self._open

    def leave(self) -> None:
        with self._changed:
            self._at_work -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """Wait for the store. What comes later is another batch's."""
        with self._changed:
            self._changed.wait_for(lambda: not self._at_work)
            self._open = False
