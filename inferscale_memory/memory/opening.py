"""How the files of a memory are opened: to be written, where that cannot be to be read, and as far as they are whole.

What was acknowledged and is not there any more is said when the memory is opened. It must never throw a file away:
a damaged one is moved aside.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from inferscale_memory.errors import ConfigurationError, StoreError
from inferscale_memory.fetch import EMBEDDER
from inferscale_memory.forget.disk_reserve import Reserve
from inferscale_memory.index.collection import Collection
from inferscale_memory.index.file import FactFile
from inferscale_memory.journal import Journal
from inferscale_memory.journal.salvage import set_aside
from inferscale_memory.mem0_adapter.rows import rows_of
from inferscale_memory.memory.config import Settings
from inferscale_memory.memory.store_files import StoreFiles, name_of
from inferscale_memory.storage.sqlite import has_no_room, is_full, is_sound, is_writable

_log = logging.getLogger(__name__)

IN_MEMORY = ":memory:"
_FEW = 2_000
"""So many facts are looked for one by one at every start; beyond that only where the store holds too few."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The files of one memory.

    Attributes:
        history: the file whose copy stands in for mem0's history; None where mem0 opens its own.
        why: what keeps the memory from being written; empty where nothing does.
    """

    journal: Journal
    history: Path | None = None
    why: str = ""


def open_files(settings: Settings, reserve: Reserve) -> Opened:
    """The journal of the store, whose history goes with it.

    Raises:
        ConfigurationError: a file that cannot be opened, by name.
    """
    name = name_of(settings.mem0.vector_store, settings.folder)
    path, journal, why = settings.folder / "journal.sqlite", None, ""
    gap = timedelta(seconds=settings.injection.session_gap)
    reserve.give()  # on a full disk not even reading goes without a little room
    try:
        files = StoreFiles.known(settings.folder, name)
        if not is_writable(files.journal):
            why = f"{settings.folder} cannot be written"
        else:
            try:
                files = StoreFiles.claimed(settings.folder, name)
                path = files.journal
                journal = Journal(path, session_gap=gap, checked=True)
            except (sqlite3.Error, StoreError) as error:
                if not is_full(error) and not has_no_room(path):
                    raise
                why = f"the disk of {settings.folder} is full"
        path = files.journal
        if journal is None:
            journal = Journal(path, session_gap=gap, in_memory=True)
    except (sqlite3.Error, OSError, StoreError) as error:
        raise ConfigurationError(
            f"the journal {path} cannot be opened ({error}): pass another folder, set INFERSCALE_HOME, or move that "
            "file away"
        ) from error
    try:
        return Opened(journal, _settle_history(settings, files, why), why)
    except BaseException:
        journal.close()
        raise


def _settle_history(settings: Settings, files: StoreFiles, why: str) -> Path | None:
    """Where mem0 keeps its history. A file that it can open stays; of one that cannot be written it gets a copy."""
    if settings.own_history:
        settings.mem0.history_db_path = str(files.history)
    named = getattr(settings.mem0, "history_db_path", None)
    if not isinstance(named, str) or named == IN_MEMORY:
        return None
    path = Path(named).expanduser()
    if path.is_file() and not is_sound(path):
        if not settings.own_history or why:
            raise ConfigurationError(
                f"the history {path} is damaged, or is no SQLite file: move it away, or pass another history_db_path"
            )
        _log.warning(
            "the history %s was damaged and is %s now: the memories are whole, but what they said before and when is "
            "not known any more. Delete that file when you have no more use for it",
            path,
            set_aside(path),
        )
    if not why and is_writable(path):
        return None
    settings.mem0.history_db_path = IN_MEMORY
    return path


def check_losses(store: Any, journal: Journal) -> None:
    """Say what the journal has acknowledged and the store does not hold, and the other way round."""
    known, file = journal.facts.count(), fact_file(store)
    if file is None:
        if known and not _lists_any(store):
            _log.warning(
                "the vector store holds none of the %d memories that %s has acknowledged: look whether it is the right "
                "one, or put a backup of it in its place",
                known,
                journal.path,
            )
        return
    held = file.count()
    if not known:
        if held and journal.is_new():
            _log.warning(
                "%s holds %d memories, and the journal %s knows of none: if that file was deleted, put a backup in its "
                "place; else they are entered in it as they are recalled, without the messages that they came from",
                file.path,
                held,
                journal.path,
            )
        return
    if known > _FEW and held >= known:
        return
    ids = journal.facts.all_ids()
    missing = [name for name, there in zip(ids, file.holds(ids), strict=True) if not there]
    if missing:
        _log.warning(
            "%d of the %d memories that %s has acknowledged are not in %s any more (%s): put a backup of that file in "
            "its place, or forget them with delete_all()",
            len(missing),
            known,
            journal.path,
            file.path,
            ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else ""),
        )


def check_embedder(store: Any, embedder: Any, journal: Journal) -> None:
    """Note by which model the vectors of a store are made.

    Raises:
        StoreError: they were made by another one.
    """
    name = embedder_name(embedder)
    if name is None:
        return
    file = fact_file(store)
    if file is not None:
        file.claim(name)
        return
    known = journal.embedder()
    if known not in (None, name) and _lists_any(store):
        raise StoreError(
            f"the memories of this store were embedded by {known!r}, not by {name!r}, whose vectors cannot be compared "
            f"with theirs: use {known!r}, or copy them into a new store with `inferscale migrate --from --to`"
        )
    if known != name:
        journal.note_embedder(name)


def embedder_name(embedder: Any) -> str | None:
    """The name of an embedder's model, without its publisher or its folder: a model that was fetched is the same.
    None where the embedder does not say it."""
    config = getattr(embedder, "config", None)
    model = getattr(config, "model", None)
    if model is None and type(embedder).__name__ == "LocalEmbedder":
        return EMBEDDER.name
    if not isinstance(model, str) or not model.strip("/"):
        return None
    return Path(model).name.removesuffix(":latest")


def fact_file(store: Any) -> FactFile | None:
    """The file behind a store of this library, or behind its mirror."""
    client = getattr(store, "client", None)
    return client.file if isinstance(client, Collection) else None


def _lists_any(store: Any) -> bool:
    """Whether the store holds a row, as far as it says."""
    try:
        return bool(rows_of(store.list(top_k=1)))
    except Exception as error:  # whatever stores raise
        _log.info("the store does not list what it holds: %s", error)
        return True
