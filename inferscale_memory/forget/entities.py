"""mem0's entity store: which memories name which people, places and things.

mem0 unlinks a deleted memory only where its process has opened that store before. Here it is opened. It must never
take away an entity that another memory names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from inferscale_memory.facts.scope import Scope
from inferscale_memory.mem0_adapter.rows import MOST, rows_of

_log = logging.getLogger(__name__)


class Entities:
    """The entities of one memory."""

    def __init__(self, store: Callable[[], Any]) -> None:
        """`store` opens mem0's entity store, or gives the one that is open."""
        self._store = store

    def unlink(self, scope: Scope, gone: Callable[[str], bool]) -> set[str]:
        """Remove the links to memories that are gone, and entities that no other memory names: their texts."""
        texts, alone = set[str](), list[Any]()
        store = self._opened()
        if store is None:
            return texts
        for row in rows_of(store.list(filters=scope.ids, top_k=MOST)):
            payload = row.payload or {}
            linked = payload.get("linked_memory_ids")
            if not isinstance(linked, list):
                continue
            left = [name for name in linked if not gone(name)]
            if not left:
                alone.append(row.id)
                texts.add(str(payload.get("data") or ""))
            elif left != linked:
                store.update(vector_id=row.id, vector=None, payload={**payload, "linked_memory_ids": left})
        if alone and hasattr(store, "delete_many"):
            store.delete_many(alone)
        else:
            for row_id in alone:
                store.delete(vector_id=row_id)
        return texts

    def clear(self) -> None:
        """Remove all of them."""
        store = self._opened()
        if store is not None:
            store.reset()

    def _opened(self) -> Any:
        try:
            return self._store()
        except Exception as error:  # then nothing of it is in use either
            _log.warning("the entity store cannot be opened: %s", error)
            return None
