"""Replies that are kept for clients who ask for them later, because their answer was streamed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MOST_OF_OWNER = 64
"""The most replies kept for one owner. A client asks when its stream has ended, or never."""
MOST = 4096
"""The most replies kept in total."""


class Receipts:
    """Replies by owner and receipt. The oldest are dropped first.

    Every owner has room of its own: an owner who never asks for replies does not displace those of others, as long as
    there are no more than `MOST`.
    """

    def __init__(self) -> None:
        self._replies: OrderedDict[str, OrderedDict[str, dict[str, Any]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def keep(self, owner: str, receipt: str, reply: dict[str, Any]) -> None:
        """Keep a reply, unless the receipt is empty."""
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
        """The reply of this owner under this receipt, if there is one. Each is returned once."""
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
