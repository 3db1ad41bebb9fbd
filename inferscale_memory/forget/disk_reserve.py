"""A little room on the disk, kept for deleting: on a full disk a deletion needs some before it gives any back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inferscale_memory.errors import StoreError

BYTES = 2 << 20
_NAME = "reserve"
_SPARE = 8
"""It is first taken where the disk has so many times as much room besides: it is for a disk that fills up, not for one
that is full."""
_LITTLE = 128 << 10
"""It is taken again where so many bytes are left besides."""


class Reserve:
    """A file of one memory's folder that holds nothing but room."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _NAME

    def keep(self, besides: int = _SPARE * BYTES) -> None:
        """Take the room, if there is so much besides."""
        with suppress(OSError):
            if self._file.exists() or shutil.disk_usage(self._file.parent).free < BYTES + besides:
                return
            with self._file.open("xb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, BYTES)
                else:
                    file.write(bytes(BYTES))

    def give(self) -> bool:
        """Give the room back, if there is hardly any besides it; whether that was done."""
        with suppress(OSError):
            if self._file.exists() and shutil.disk_usage(self._file.parent).free < BYTES:
                self._file.unlink()
                return True
        return False

    def check(self) -> None:
        """Raises StoreError where nothing more is to be stored: what is left of the disk is for deleting."""
        with suppress(OSError):
            if self._file.exists() or shutil.disk_usage(self._file.parent).free >= BYTES:
                return
            raise StoreError(
                f"the disk of {self._file.parent} is full: free some room, or delete memories, which needs none"
            )

    @contextmanager
    def given(self) -> Iterator[None]:
        """The room is there for what happens within the block."""
        given = self.give()
        try:
            yield
        finally:
            self.keep(_LITTLE if given else _SPARE * BYTES)  # or somebody else takes it
