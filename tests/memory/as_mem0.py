"""Our faces under mem0's names, as mem0's own tests will meet them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import mem0
import mem0.memory.main

from inferscale_memory.memory import AsyncMemory, Memory


@contextmanager
def ours_as_mem0s() -> Iterator[None]:
    """Within the block `mem0.Memory`, `mem0.AsyncMemory` and the same names in `mem0.memory.main` are ours."""
    faces = {"Memory": Memory, "AsyncMemory": AsyncMemory}
    with patch.multiple(mem0, **faces), patch.multiple(mem0.memory.main, **faces):
        yield
