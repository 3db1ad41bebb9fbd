"""The private names of mem0 that this package uses. mem0 may change any of them in a release, so a new version is
checked against this module first.

Private functions and constants are imported from here alone. Private attributes and methods of mem0's objects have to
be used where the objects are; `MEMBERS` lists them.
"""

from __future__ import annotations

from typing import Any

from mem0.memory.main import _UNSET as UNSET
from mem0.memory.main import _build_filters_and_metadata as build_filters_and_metadata
from mem0.memory.main import _entity_collection_name as entity_collection_name
from mem0.memory.main import _normalize_expiration_date as normalize_expiration_date
from mem0.memory.main import _normalize_iso_timestamp_to_utc as normalize_iso_timestamp_to_utc
from mem0.memory.main import _validate_and_trim_entity_id as validate_and_trim_entity_id
from mem0.memory.main import _vector_store_list_rows as vector_store_list_rows
from mem0.memory.storage import SQLiteManager

__all__ = [
    "MEMBERS",
    "UNSET",
    "build_filters_and_metadata",
    "entity_collection_name",
    "history_lock",
    "normalize_expiration_date",
    "normalize_iso_timestamp_to_utc",
    "validate_and_trim_entity_id",
    "vector_store_list_rows",
]

_MEMORY = (
    "_delete_memory",  # compared with mem0's: a bulk delete must not bypass one that an app has replaced
    "_entity_store",  # overridden by a guarded property; read where it must not be opened
    "_get_all_from_vector_store",  # overridden: expired memories are hidden
    "_has_advanced_operators",  # called, as mem0's search does before it lists
    "_process_metadata_filters",  # called and overridden: mem0 loses parts of an AND
    "_search_vector_store",  # overridden: expired memories are hidden
)

MEMBERS: dict[str, tuple[str, ...]] = {
    "mem0.memory.main.Memory": _MEMORY,
    "mem0.memory.main.AsyncMemory": _MEMORY,
    "mem0.memory.storage.SQLiteManager": ("_lock",),
    "mem0.vector_stores.faiss.FAISS": (
        "_parse_output",
        "_save",  # overridden: a failed write is an error
        "_should_normalize",
    ),
}
"""Private attributes and methods, by the class of mem0 that has them."""


def history_lock(manager: SQLiteManager) -> Any:
    """The lock under which mem0 uses the connection of its history file."""
    return manager._lock
