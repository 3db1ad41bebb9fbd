"""The memory that is read: its stores, opened by mem0 itself, without its LLM and without its embedder.

It must never write to it, and never take a part of it for the whole: mem0's stores list a hundred rows unless they
are told how many, some of them list no more than they please, and a wrong path opens as an empty store.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import mem0
from mem0.configs.base import MemoryConfig
from mem0.utils.factory import VectorStoreFactory

from inferscale_memory.errors import ConfigurationError
from inferscale_memory.index.collection import Collection
from inferscale_memory.mem0_adapter.environment import home
from inferscale_memory.mem0_adapter.private import entity_collection_name, vector_store_list_rows
from inferscale_memory.memory.config import Settings

Row = tuple[str, dict[str, Any]]
"""Id and payload."""

OURS = ("engine", "injection", "folder")
PAGE = 1000
_GROWTH = 10
_COUNTS = ("points_count", "count", "row_count", "num_entities", "vectors_count")
_EVENT = (
    "memory_id",
    "old_memory",
    "new_memory",
    "event",
    "created_at",
    "updated_at",
    "is_deleted",
    "actor_id",
    "role",
)


class Source:
    """A memory to be read.

    Args:
        config: mem0's configuration of it, or ours. One that names no vector store is ours if it has a word of ours
            in it, and else means mem0's default.

    Raises:
        ConfigurationError: there is nothing where it says.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = read_config(config)
        wanted = self.config.vector_store
        self._folder = _folder(wanted)
        if self._folder is not None and not self._folder.exists():
            raise ConfigurationError(
                f"there is no {wanted.provider} store at {self._folder}: correct its path"
            )
        self._memory = mem0.Memory.__new__(mem0.Memory)  # mem0 knows best where its entities lie
        self._memory.config = self.config
        self._memory.vector_store = VectorStoreFactory.create(wanted.provider, wanted.config)
        self._memory.collection_name = wanted.config.collection_name
        self._memory._entity_store = None

    def facts(self) -> Iterator[Row]:
        return rows(self._memory.vector_store)

    def entities(self) -> Iterator[Row]:
        """What mem0's search finds facts by; nothing where it never made any. The question must not make them."""
        name = entity_collection_name(self.config.vector_store.provider, self._memory.collection_name)
        if not self._has(name):
            return iter(())
        return rows(self._memory.entity_store)

    def history(self) -> dict[str, list[dict[str, Any]]]:
        """Memory id -> its events in order; empty where there is no history."""
        path = Path(self.config.history_db_path)
        events: dict[str, list[dict[str, Any]]] = {}
        if not path.is_file():
            return events
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            known = {row[1] for row in db.execute("PRAGMA table_info(history)")}
            columns = [name for name in _EVENT if name in known]
            if "memory_id" not in columns:
                return events
            order = "created_at, rowid" if "created_at" in known else "rowid"
            for row in db.execute(f"SELECT {', '.join(columns)} FROM history ORDER BY {order}"):
                event = dict(zip(columns, row, strict=True))
                events.setdefault(str(event["memory_id"]), []).append(event)
        return events

    def close(self) -> None:
        for store in (self._memory.vector_store, self._memory._entity_store):
            if getattr(store, "is_local", False) or isinstance(getattr(store, "client", None), Collection):
                store.client.close()

    def _has(self, collection: str) -> bool:
        if self.config.vector_store.provider == "faiss":
            return self._folder is not None and (self._folder / f"{collection}.faiss").exists()
        listed = self._memory.vector_store.list_cols()
        names = getattr(listed, "collections", listed) or ()
        return collection in {str(getattr(name, "name", name)) for name in names}


def read_config(config: Mapping[str, Any]) -> MemoryConfig:
    """mem0's configuration object of a dictionary of mem0's or ours."""
    store = config.get("vector_store") or {}
    if any(word in config for word in OURS) or store.get("provider") == "inferscale":
        return Settings.read(config).mem0
    parts = {name: config[name] for name in ("vector_store", "history_db_path") if name in config}
    return MemoryConfig(**{"history_db_path": str(_mem0s_folder() / "history.db"), **parts})


def _mem0s_folder() -> Path:
    """Where mem0 writes when nobody told it otherwise. We tell it, when it is imported with us."""
    told = Path(os.environ.get("MEM0_DIR") or "")
    return Path("~/.mem0").expanduser() if told in (Path(), home() / "mem0") else told


def rows(store: Any) -> Iterator[Row]:
    """Everything in a store of mem0's, in pages where it has any."""
    if callable(getattr(getattr(store, "client", None), "scroll", None)) and hasattr(
        store, "collection_name"
    ):
        return _scrolled(store)
    return _listed(store)


def _scrolled(store: Any) -> Iterator[Row]:
    """Qdrant's pages, which mem0's `list` shows the first of."""
    offset = None
    while True:
        page, offset = store.client.scroll(
            collection_name=store.collection_name,
            limit=PAGE,
            offset=offset,
            with_payload=True,
            with_vectors=False,
        )
        yield from (_row(found) for found in page)
        if offset is None:
            return


def _listed(store: Any) -> Iterator[Row]:
    """What `list` gives when it is asked for more and more, until it gives less than that."""
    limit, found = PAGE, list[Row]()
    while True:
        before = len(found)
        try:
            found = [_row(row) for row in vector_store_list_rows(store.list(filters=None, top_k=limit))]
        except Exception as error:
            if not before:
                raise
            raise ConfigurationError(
                f"the source lists {before} facts, and fails when it is asked for more ({error}): migrate it user "
                "by user, or into a store that lists all first"
            ) from error
        if len(found) < limit:
            break
        limit *= _GROWTH
    if before and len(found) == before and _count(store) != before:
        raise ConfigurationError(
            f"the source lists {before} facts however many it is asked for, and may hold more: migrate it user by "
            "user, or into a store that lists all first"
        )
    yield from found


def _row(found: Any) -> Row:
    return str(found.id), dict(found.payload or {})


def _count(store: Any) -> int | None:
    """How many rows the store says it has, if it says so."""
    with suppress(Exception):
        told = store.col_info()
        for name in _COUNTS:
            value = told.get(name) if isinstance(told, Mapping) else getattr(told, name, None)
            if isinstance(value, int):
                return value
    return None


def _folder(store: Any) -> Path | None:
    """Where a store that lies in files does."""
    path = getattr(store.config, "path", None)
    elsewhere = any(getattr(store.config, name, None) for name in ("client", "url", "host"))
    return Path(path).expanduser() if path and not elsewhere else None
