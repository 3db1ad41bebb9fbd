"""Looks for a text everywhere a memory could have left it, so that forgetting need not be believed.

It must never show or write the text, and answers for the literal text alone: what says the same in other words is
another text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from inferscale_memory.memory.core import Core
from inferscale_memory.storage.file_search import search_files, spellings


@dataclass(frozen=True, slots=True)
class Place:
    """A byte in a file at which the text begins."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found of a text.

    Attributes:
        found: places in files, in any case of its letters, as it is or escaped as JSON. A letter that takes more
            bytes in the other case, as "ß" and "SS", is known only in the case of the text that is looked for.
        blobs: keys of the blobs that the engine holds of facts that say it, or behind a window that does.
        pending: how often the engine still has to be told to forget, whatever it was: it has failed when it was told,
            and may hold blobs of any text that was deleted before.
    """

    found: tuple[Place, ...]
    blobs: tuple[str, ...]
    pending: int = 0

    @property
    def clean(self) -> bool:
        """Whether it is nowhere."""
        return not self.found and not self.blobs and not self.pending


def audited(core: Core, files: Sequence[Path], text: str) -> Audit:
    """`text` has words in it."""
    found = search_files(files, spellings(text.strip()))
    places = tuple(Place(file, offset) for file, offset in found)
    return Audit(places, tuple(core.blobs_saying(text.strip())), core.outbox.pending)


def files_of(folder: Path, mem0: Any) -> list[Path]:
    """Every file of a memory: its folder, and what its configuration of mem0 puts elsewhere."""
    store = getattr(getattr(mem0, "vector_store", None), "config", None)
    places = [
        folder,
        *(getattr(owner, name, None) for owner, name in ((mem0, "history_db_path"), (store, "path"))),
    ]
    files = (file for place in places if isinstance(place, str | Path) for file in _files(Path(place)))
    return sorted({file.absolute() for file in files})


def _files(place: Path) -> Iterator[Path]:
    """The files in a folder, or a file and what SQLite puts beside it."""
    if place.is_dir():
        yield from (file for file in place.rglob("*") if file.is_file())
    elif place.is_file():
        yield from (file for file in place.parent.glob(f"{escape(place.name)}*") if file.is_file())
