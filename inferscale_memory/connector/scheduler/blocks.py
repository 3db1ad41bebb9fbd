"""Where prompt positions are in vLLM's paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.connector.metadata import Slots

NULL_BLOCK = 0
"""vLLM's placeholder for blocks that slid out of an attention window. Nothing may be written there."""


def slots_of(blocks: Sequence[int], positions: NDArray[np.int64], block_size: int) -> Slots:
    """The slot of each position, [tokens]: its block's id times the block size, plus its offset within the block."""
    table = np.asarray(blocks, dtype=np.int64)
    return table[positions // block_size] * block_size + positions % block_size
