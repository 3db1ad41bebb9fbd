"""What travels between the parts of the store. Values only: nothing here opens, holds or decides anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.arguments import as_json
from inferscale_memory.errors import ConfigurationError, StoreError

Payload = dict[str, Any]
Floats = NDArray[np.float32]


@dataclass(slots=True)
class Hit:
    """One fact as mem0 is shown it. It is the receiver's own: mem0 changes the payloads it is given, and a
    frozen class takes three times as long to make.

    `score` is higher where the fact fits better: the cosine for a vector, BM25 for words, None where nothing
    was asked.
    """

    id: str
    score: float | None
    payload: Payload


@dataclass(frozen=True, slots=True)
class Row:
    """A stored fact: where it lies, its vector as it was given, and its payload.

    `place` is the row in the file: its owner's number above, its number within the owner below.
    """

    place: int
    id: str
    vector: Floats
    payload: Payload


@dataclass(slots=True)
class OwnerChange:
    """What one transaction did to one owner, for the slab in memory.

    Attributes:
        before: the owner's counter of changes that the transaction found.
        after: the one it left; None where the owner has no facts any more.
        put: rows that are new, or new at their place.
        dropped: places that are empty now.
    """

    before: int
    after: int | None
    put: dict[int, Row]
    dropped: set[int]


def to_json(id: str, payload: Mapping[str, Any]) -> bytes:
    """Id and payload as they are stored. Text stays literal, so that looking for it in the file finds it."""
    try:
        text = json.dumps([id, payload], ensure_ascii=False, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the payload of {id} cannot be stored ({error}): pass text, numbers, booleans, lists and mappings"
        ) from error
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: no UTF-8 has it, JSON's escapes do
        return json.dumps(json.loads(text), separators=(",", ":")).encode()


def from_json(stored: bytes | memoryview) -> tuple[str, Payload]:
    """The reverse of `to_json`."""
    id, payload = json.loads(bytes(stored))
    return id, payload


def _plain(value: Any) -> Any:
    try:
        return as_json(value, "the payload")
    except ConfigurationError as error:
        raise TypeError(str(error)) from error
