"""Facts to store, and vectors that go with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DIMS = 8


def vector(seed: int, dims: int = DIMS) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


def fact(text: str, user: str = "ada", **more: Any) -> dict[str, Any]:
    return {"data": text, "user_id": user, **more}
