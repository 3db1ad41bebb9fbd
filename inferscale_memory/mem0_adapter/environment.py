"""Where everything lies, and what must be settled for mem0.

It must never overrule what the user has set, as far as that can work.
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
    """Keep mem0's own files under `home()`, and keep it from phoning home unless the user asked for that.

    mem0 reads both when it is imported. Where that has happened already its files stay where they are, and
    its switch is turned off: telemetry also opens a second store, which one memory of a process can have.

    The import of mem0 fails where it cannot make its folder. Then a temporary one takes its place: it holds nothing
    that a memory needs.
    """
    folder = os.environ["MEM0_DIR"] = os.environ.get("MEM0_DIR") or str(home() / "mem0")
    if "mem0.memory.setup" not in sys.modules and not _can_be_written(Path(folder)):
        os.environ["MEM0_DIR"] = mkdtemp(prefix="mem0-")
        _log.warning(
            "mem0's folder %s cannot be written, %s takes its place: set INFERSCALE_HOME or MEM0_DIR to a folder that "
            "can",
            folder,
            os.environ["MEM0_DIR"],
        )
    if "MEM0_TELEMETRY" not in os.environ:
        os.environ["MEM0_TELEMETRY"] = "False"
        for name in ("mem0.memory.telemetry", "mem0.memory.main"):
            if (module := sys.modules.get(name)) is not None:
                module.__dict__["MEM0_TELEMETRY"] = False


def _can_be_written(folder: Path) -> bool:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    return False
