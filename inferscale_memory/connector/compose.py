"""Composing on the worker: one gather, one rotation, one engine op per layer.

The engine's own operators move the tensors: the model's own rotary module rotates, the attention backend's own cache
update writes, unless start-up proved another writer equal to it. Nothing here knows a page layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from inferscale_memory.connector.metadata import Load, Slots
from inferscale_memory.kv.arena import Arena
from inferscale_memory.kv.tier import Rows

ROTARY = frozenset(
    {
        "RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "NTKScalingRotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
)
"""Rotary modules of vLLM whose rotation depends on the position alone. Others are refused by name."""

STAGE_BYTES = 64 * 2**20
"""Default of `stage_bytes`."""


class DirectWriter(Protocol):
    """Writes into the paged cache what the engine's operator would, for all layers at once."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, rows: Rows, slots: Slots) -> None:
        """`keys` are rotated, [layers, tokens, kv_heads, head_dim]; values are rows `rows` of the arena's."""
        ...


class Composer:
    """Rotates gathered keys to where their tokens now stand and writes them into the paged cache.

    Attributes:
        direct: writes instead of the engine's operator, where start-up proved it equal (`pages.prove`).

    Args:
        layers: attention layers of this rank in the order of the arena's layer axis.
        rotations: for each layer, its rotary module, or None for a layer without rotation.
        stage_bytes: most bytes gathered at one time; longer compositions are written in parts.
    """

    def __init__(
        self,
        arena: Arena,
        layers: Sequence[Any],
        rotations: Sequence[Any | None],
        *,
        stage_bytes: int = STAGE_BYTES,
    ) -> None:
        self.stage_bytes = stage_bytes
        self._arena = arena
        self._layers = tuple(layers)
        self._rotated = _by_module(rotations)
        self._stage_rows = max(1, stage_bytes // arena.shape.row_bytes)
        self._staged: dict[str, torch.Tensor] = {}
        self.direct: DirectWriter | None = None

    def write(self, loads: Sequence[Load]) -> None:
        """Carry out all loads of a step: they are one composition to the hardware."""
        rows = np.concatenate([load.rows for load in loads])
        positions = np.concatenate([load.positions for load in loads])
        slots = np.concatenate([load.slots for load in loads])
        for start in range(0, len(rows), self._stage_rows):
            part = slice(start, start + self._stage_rows)
            self._write_part(rows[part], positions[part], slots[part])

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate keys [layers, tokens, kv_heads, head_dim] to `positions` [tokens], in place; returns them.

        Where one module rotates all layers it takes one call: to it, another layer's tokens are just more tokens.
        """
        for module, layers in self._rotated:
            if len(layers) == len(keys):
                _rotate(module, positions.repeat(len(keys)), keys.flatten(0, 1))
            else:
                for layer in layers:
                    _rotate(module, positions, keys[layer])
        return keys

    def write_layer(self, number: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write one layer's rotated keys and values [tokens, kv_heads, head_dim] by the engine's own op."""
        layer = self._layers[number]
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    def _write_part(self, rows: Rows, positions: NDArray[np.int64], slots: Slots) -> None:
        arena = self._arena
        index = arena.index(rows)
        keys = arena.gather(arena.keys, index, self._stage("keys", len(rows)))
        self.rotate(keys, torch.from_numpy(positions).to(arena.device))
        if self.direct is not None:
            self.direct.write(keys, arena.values, rows, slots)
            return
        values = arena.gather(arena.values, index, self._stage("values", len(rows)))
        where = torch.from_numpy(slots).to(arena.device)
        for number in range(len(self._layers)):
            self.write_layer(number, keys[number], values[number], where)

    def _stage(self, name: str, tokens: int) -> torch.Tensor:
        """Room for gathered rows [layers, tokens, kv_heads, head_dim], kept between steps: fresh memory costs more
        than the copy into it."""
        layers, _, heads, head_dim = self._arena.keys.shape
        needed = layers * tokens * heads * head_dim
        if name not in self._staged or self._staged[name].numel() < needed:
            self._staged[name] = self._arena.keys.new_empty(needed)
        return self._staged[name][:needed].view(layers, tokens, heads, head_dim)


def unsupported_rotary(module: Any | None) -> str | None:
    """Why keys rotated by `module` cannot be re-rotated, if they cannot."""
    if module is None or type(module).__name__ in ROTARY:
        return None
    return f"its rotary embedding {type(module).__name__} may depend on more than the position"


def _rotate(module: Any, positions: torch.Tensor, keys: torch.Tensor) -> None:
    """Rotate contiguous keys [tokens, kv_heads, head_dim] in place; the model's module is given them as its query."""
    flat = keys.view(len(keys), -1)
    # Not module(...): an encode of the same step has its hooks on the module, and these keys are not the model's.
    rotated = module.forward(positions, flat, None)[0]
    if rotated.data_ptr() != flat.data_ptr():
        flat.copy_(rotated)


def _by_module(rotations: Sequence[Any | None]) -> list[tuple[Any, list[int]]]:
    """(module, the layers it rotates)."""
    groups: dict[int, tuple[Any, list[int]]] = {}
    for number, module in enumerate(rotations):
        if module is not None:
            groups.setdefault(id(module), (module, []))[1].append(number)
    return list(groups.values())
