"""A small disk of a test's own: a tmpfs where that may be mounted, which root may. Elsewhere the same is brought about
by what binds anybody but root: page limits and modes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, run
from typing import Any

MEGABYTES = 20


class Disk:
    """A folder that can be filled and made read-only."""

    def __init__(self, folder: Path, *, mounted: bool) -> None:
        self.folder = folder
        self._mounted = mounted

    def fill(self, memory: Any, *, left: int = 0) -> None:
        """Leave so many bytes, besides what the memory keeps for itself."""
        if not self._mounted:
            for db in (memory._core.journal.database.connection, memory.vector_store.client.file._files.writer):
                pages = db.execute("PRAGMA page_count").fetchone()[0]
                size = db.execute("PRAGMA page_size").fetchone()[0]
                db.execute(f"PRAGMA max_page_count = {pages + left // size}")
            return
        with (self.folder / "filling").open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(self.folder / "filling", (self.folder / "filling").stat().st_size - left)

    def empty(self) -> None:
        (self.folder / "filling").unlink(missing_ok=True)

    @contextmanager
    def read_only(self) -> Iterator[None]:
        if self._mounted:
            run(["mount", "-o", "remount,ro", self.folder], check=True)
        else:
            self._set_modes(0o555, 0o444)
        try:
            yield
        finally:
            if self._mounted:
                run(["mount", "-o", "remount,rw", self.folder], check=True)
            else:
                self._set_modes(0o755, 0o644)

    def _set_modes(self, of_folders: int, of_files: int) -> None:
        for path in [self.folder, *self.folder.rglob("*")]:
            path.chmod(of_folders if path.is_dir() else of_files)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder)]
    mounted = run(mount, stderr=DEVNULL, check=False).returncode == 0
    try:
        yield Disk(folder, mounted=mounted)
    finally:
        if mounted:
            run(["umount", "--lazy", folder], check=True)
