"""What composing is measured against: a plain copy of as many bytes as were injected."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

COLD_BYTES = 512 * 2**20
"""More than any processor's cache holds."""
_TIMES = 15


class PlainCopy:
    """Copies within the memory of one device. What is copied wanders through more memory than the processor's cache
    holds, so that neither side is in it, as what composing reads and writes is not."""

    def __init__(self, device: str | None = None, *, cold_bytes: int = COLD_BYTES) -> None:
        """`device`: such as "cuda" or "cpu"; None takes CUDA where there is any."""
        import torch

        self._torch = torch
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._cold = cold_bytes
        self._source = self._fresh(cold_bytes)
        self._target = self._fresh(cold_bytes)
        self._at = 0

    def seconds(self, size: int, times: int = _TIMES) -> float:
        """Median seconds of copying `size` bytes."""
        size = max(1, size)
        if 2 * size > len(self._source):
            self._source, self._target = self._fresh(2 * size), self._fresh(2 * size)
        spent = []
        for _ in range(times):
            if self._at + size > len(self._source):
                self._at = 0
            source = self._source[self._at : self._at + size]
            target = self._target[self._at : self._at + size]
            self._at += size
            began = perf_counter()
            target.copy_(source)
            if self._device.startswith("cuda"):
                self._torch.cuda.synchronize()
            spent.append(perf_counter() - began)
        return median(spent)

    def _fresh(self, size: int) -> Any:
        return self._torch.ones(size, dtype=self._torch.uint8, device=self._device)


def row_bytes(model: Any, dtype: str) -> int:
    """Bytes of one token's keys and values, all layers.

    Args:
        model: folder of a model, or its configuration.
        dtype: "auto" for the checkpoint's own.
    """
    import torch
    from transformers import AutoConfig

    config = model if hasattr(model, "num_hidden_layers") else AutoConfig.from_pretrained(str(model))
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kind = config.dtype if dtype == "auto" else getattr(torch, dtype)
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * kind.itemsize)
