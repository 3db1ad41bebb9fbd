"""Where everything lies, and what must be settled before mem0 is imported.

It must never overrule what the user has set.
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The folder under which everything is written: `INFERSCALE_HOME`, or `~/.inferscale`."""
    return Path(os.environ.get("INFERSCALE_HOME") or "~/.inferscale").expanduser().absolute()


def prepare_mem0() -> None:
    """Keep mem0's own files under `home()`, and keep it from phoning home unless the user asked for that."""
    os.environ.setdefault("MEM0_TELEMETRY", "False")
    os.environ.setdefault("MEM0_DIR", str(home() / "mem0"))
