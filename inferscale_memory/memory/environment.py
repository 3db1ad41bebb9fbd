"""Where everything lies, and what must be settled for mem0.

It must never overrule what the user has set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def home() -> Path:
    """The folder under which everything is written: `INFERSCALE_HOME`, or `~/.inferscale`."""
    return Path(os.environ.get("INFERSCALE_HOME") or "~/.inferscale").expanduser().absolute()


def prepare_mem0() -> None:
    """Keep mem0's own files under `home()`, and keep it from phoning home unless the user asked for that.

    mem0 reads both when it is imported. Where that has happened already its files stay where they are, and
    its switch is turned off: telemetry also opens a second store, which one memory of a process can have.
    """
    os.environ.setdefault("MEM0_DIR", str(home() / "mem0"))
    if "MEM0_TELEMETRY" not in os.environ:
        os.environ["MEM0_TELEMETRY"] = "False"
        for name in ("mem0.memory.telemetry", "mem0.memory.main"):
            if (module := sys.modules.get(name)) is not None:
                module.__dict__["MEM0_TELEMETRY"] = False
