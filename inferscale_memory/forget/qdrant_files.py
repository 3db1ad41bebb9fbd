"""Deleted text in the files of mem0's embedded Qdrant, which leaves it in free pages.

Stores that are a server keep their files themselves, FAISS writes its own anew with every change, and the store of
this library leaves nothing. It must never change a row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

from inferscale_memory.storage.scrub import scrub

_LIVING = "SELECT 1 FROM points WHERE instr(point, CAST(:text AS BLOB)) LIMIT 1"


class QdrantFiles:
    """The files of one memory's stores. The entities lie in the same client."""

    def __init__(self, store: Callable[[], Any], lock: AbstractContextManager[None]) -> None:
        self._store = store
        self._lock = lock

    @staticmethod
    def guard(store: Any) -> None:
        """What the store deletes from now on is overwritten, as far as SQLite does that."""
        for collection in _collections(store):
            collection.storage.execute("PRAGMA secure_delete = ON")

    def scrub(self, words: Collection[str] | None) -> bool:
        """Leave nothing of these words in the files; None for whatever they were."""
        done = True
        with self._lock:
            for collection in _collections(self._store()):
                with closing(sqlite3.connect(collection.location)) as db:
                    done &= scrub(db, words, _LIVING)
        return done


def _collections(store: Any) -> Iterator[Any]:
    """Qdrant's local collections as they lie on the disk."""
    collections = getattr(getattr(getattr(store, "client", None), "_client", None), "collections", None)
    for collection in list(collections.values()) if isinstance(collections, dict) else ():
        persistence = getattr(collection, "storage", None)
        if hasattr(persistence, "location") and hasattr(persistence, "storage"):
            yield persistence
