"""The folder under which everything is written, and the settings of mem0 that a memory depends on.

What the user has set in the environment is kept wherever it can work.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

_log = logging.getLogger(__name__)


def home() -> Path:
    """The folder under which everything is written: `INFERSCALE_HOME`, or `~/.inferscale`."""
    return Path(os.environ.get("INFERSCALE_HOME") or "~/.inferscale").expanduser().absolute()


def prepare_mem0() -> None:
    """Keep mem0's own files under `home()`, and its telemetry off unless the user asked for it. The result is the same
    whether mem0 is imported before this call or after it.

    mem0 reads both settings from the environment when it is imported. If that has happened, they are also set in its
    modules. Telemetry would not only report over the network: it opens a second vector store, which only one memory of
    a process can have.

    The import of mem0 fails if its folder cannot be made. A temporary folder then takes its place, since nothing in it
    is needed by a memory.
    """
    chosen = os.environ.get("MEM0_DIR")
    folder = chosen or str(home() / "mem0")
    imported = "mem0.memory.setup" in sys.modules
    if not (imported and chosen) and not _can_be_written(Path(folder)):
        unusable, folder = folder, mkdtemp(prefix="mem0-")
        _log.warning(
            "mem0's folder %s cannot be written, so %s takes its place: set INFERSCALE_HOME or MEM0_DIR to a folder "
            "that can be written",
            unusable,
            folder,
        )
    os.environ["MEM0_DIR"] = folder
    if not chosen:
        _set_where_imported("mem0_dir", folder, "mem0.configs.base", "mem0.memory.setup", "mem0.memory.main")
    if "MEM0_TELEMETRY" not in os.environ:
        os.environ["MEM0_TELEMETRY"] = "False"
        _set_where_imported("MEM0_TELEMETRY", False, "mem0.memory.telemetry", "mem0.memory.main")


def _set_where_imported(name: str, value: object, *modules: str) -> None:
    for module in map(sys.modules.get, modules):
        if module is not None:
            module.__dict__[name] = value


def _can_be_written(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    return False
