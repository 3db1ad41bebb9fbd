"""Replies kept for clients that ask for them later: those whose answer was streamed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MOST_OF_OWNER = 64
"""Most replies kept for one owner. A client asks when its stream has ended, or never."""
MOST = 4096
"""Most replies kept in all."""


class Receipts:
    """Replies by owner and receipt, the oldest dropped first.

    Every owner has room of its own: nobody's receipts are dropped because somebody else never asks for theirs, until
    there are more than `MOST`.
    """

    def __init__(self) -> None:
        self._replies: OrderedDict[str, OrderedDict[str, dict[str, Any]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def keep(self, owner: str, receipt: str, reply: dict[str, Any]) -> None:
        """Keep a reply; an empty receipt asks for none."""
        if not receipt:
            return
        own = self._replies.setdefault(owner, OrderedDict())
        self._replies.move_to_end(owner)
        self._count += receipt not in own
        own[receipt] = reply
        own.move_to_end(receipt)
        if len(own) > MOST_OF_OWNER:
            self._drop(owner)
        elif self._count > MOST:
            self._drop(next(iter(self._replies)))

    def take(self, owner: str, receipt: str) -> dict[str, Any] | None:
        """The reply of this owner under this receipt, which is told once."""
        own = self._replies.get(owner)
        if own is None or receipt not in own:
            return None
        reply = own.pop(receipt)
        self._count -= 1
        if not own:
            del self._replies[owner]
        return reply

    def _drop(self, owner: str) -> None:
        own = self._replies[owner]
        own.popitem(last=False)
        self._count -= 1
        if not own:
            del self._replies[owner]
