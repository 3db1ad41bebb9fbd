"""Which files of a folder belong to one vector store: its journal, and mem0's history.

Any number of stores may share a folder, and what one of them forgets must never be looked for in the files of
another. The first to come has the plain names, so a folder that was made before keeps its files; the others have a
digest of their place in theirs.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from inferscale_memory.journal.schema import connect, repair
from inferscale_memory.storage.sqlite import is_damage, open_to_read, says_sqlite, transaction

_PLACE = (
    *(
        "path",
        "host",
        "port",
        "url",
        "cluster_url",
        "redis_url",
        "valkey_url",
        "mongo_uri",
        "connection_string",
    ),
    *(
        "workspace_url",
        "endpoint",
        "service_name",
        "cloud_id",
        "contact_points",
        "keyspace",
        "dbname",
        "db_name",
    ),
    *("database", "database_name", "tenant", "catalog", "schema", "namespace", "region", "region_name"),
    *("environment", "project_id", "index_id", "deployment_index_id", "vector_bucket_name", "table_name"),
    *("index_name", "collection_name"),
)
"""What mem0's configurations say about where a store is. Keys and passwords change, the store stays the same."""
_SECRETS = re.compile(r"(?<=//)[^/@]*@|(?:password|pwd)=[^&;\s]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """Paths of one store's own files."""

    journal: Path
    history: Path

    @classmethod
    def of(cls, folder: Path, store: str) -> StoreFiles:
        """The files of `store`, a name as `name_of` gives it, where it is not the first of its folder."""
        return cls(folder / f"journal-{store}.sqlite", folder / f"history-{store}.db")

    @classmethod
    def known(cls, folder: Path, store: str) -> StoreFiles:
        """The files that are `store`'s now, or would be; nothing is written. Raises `sqlite3.Error` on a file that
        cannot be used."""
        first, own = cls(folder / "journal.sqlite", folder / "history.db"), cls.of(folder, store)
        if own.journal.exists() or not first.journal.exists() or not first.journal.stat().st_size:
            return own if own.journal.exists() else first
        inside = None
        try:
            db, inside = open_to_read(first.journal)
            with closing(db):
                claimed = db.execute("SELECT store FROM whose").fetchone()
        except sqlite3.DatabaseError as error:  # nobody's, or damaged: then it is moved aside
            if is_damage(error) and not says_sqlite(first.journal):
                raise
            claimed = None
        finally:
            if inside is not None:
                inside.cleanup()
        return first if claimed is None or claimed[0] == store else own

    @classmethod
    def claimed(cls, folder: Path, store: str) -> StoreFiles:
        """The files that are `store`'s from now on; the journal has been checked and, where it was damaged, repaired.
        Raises `sqlite3.Error` and `OSError` on a folder or file that cannot be used."""
        first = cls(folder / "journal.sqlite", folder / "history.db")
        own = cls.of(folder, store)
        if own.journal.exists():
            repair(own.journal)
            return own
        return first if _claim(first.journal, store) else own


def name_of(config: Any, folder: Path) -> str:
    """Tells the stores of a folder apart: a digest of provider, place and collection. `config` is mem0's
    configuration of a vector store. A place within the folder may move with it."""
    own = config.config
    told = {name: own.get(name) if isinstance(own, dict) else getattr(own, name, None) for name in _PLACE}
    place = {
        name: _said(name, value, folder)
        for name, value in told.items()
        if isinstance(value, str | int | list)
    }
    return blake2b(repr((str(config.provider), place)).encode(), digest_size=6).hexdigest()


def _said(name: str, value: Any, folder: Path) -> str:
    text = _SECRETS.sub("", str(value))
    place = Path(text).expanduser()
    # Not every text: what is none is the same wherever the process was started.
    if "://" in text or not isinstance(value, str) or not (name == "path" or place.is_absolute()):
        return text
    place, inside = place.resolve(), folder.resolve()  # one store, whatever link leads to it
    return str(place.relative_to(inside) if place.is_relative_to(inside) else place)


def _claim(journal: Path, store: str) -> bool:
    """Whether a journal is this store's: its own, or nobody's until now."""
    repair(journal)
    with closing(connect(journal)) as db, transaction(db):
        db.execute("CREATE TABLE IF NOT EXISTS whose (store TEXT NOT NULL) STRICT")
        db.execute("INSERT INTO whose SELECT ? WHERE NOT EXISTS (SELECT 1 FROM whose)", (store,))
        return bool(db.execute("SELECT store = ? FROM whose", (store,)).fetchone()[0])
