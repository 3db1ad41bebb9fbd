"""Which modules of the room need torch: a remote client uses keys and has no torch."""

from __future__ import annotations

import subprocess
import sys

BLOCK_TORCH = "import sys; sys.modules['torch'] = None; "


def test_everything_but_the_arena_is_imported_without_torch() -> None:
    rooms = "import inferscale_memory.kv.key, inferscale_memory.kv.shares, inferscale_memory.kv.store"
    result = subprocess.run([sys.executable, "-c", BLOCK_TORCH + rooms], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
