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

from inferscale_memory.connector.crew import Crew
from inferscale_memory.connector.metadata import Load, Slots
from inferscale_memory.kv.arena import Arena, Rows

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
    """Writes into the paged cache what the engine's operator would, for several layers at once."""

    def write(
        self, layers: range, keys: torch.Tensor, values: torch.Tensor, rows: Rows, slots: Slots
    ) -> None:
        """Of `layers`: `keys` rotated, [layers, tokens, kv_heads, head_dim], and rows `rows` of `values`."""
        ...


class Composer:
    """Rotates gathered keys to where their tokens now stand and writes them into the paged cache.

    Attributes:
        direct: what writes instead of the engine's operator, where start-up proved it equal (`pages.prove`), and
            the threads it does it on.

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
        self.direct: tuple[DirectWriter, Crew] | None = None

    def write(self, loads: Sequence[Load]) -> None:
        """Carry out all loads of a step: they are one composition to the hardware."""
        rows = np.concatenate([load.rows for load in loads])
        positions = np.concatenate([load.positions for load in loads])
        slots = np.concatenate([load.slots for load in loads])
        for start in range(0, len(rows), self._stage_rows):
            part = slice(start, start + self._stage_rows)
            self._write_part(rows[part], positions[part], slots[part])

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Rotate keys [layers, tokens, kv_heads, head_dim] of the layers from `first` on to `positions` [tokens], in
        place; returns them.

        Neighbouring layers with one module take one call: to it, another layer's tokens are just more tokens.
        """
        last = first + len(keys)
        for module, layers in self._rotated:
            start, stop = max(first, layers.start), min(last, layers.stop)
            if start < stop:
                some = keys[start - first : stop - first]
                _rotate(module, positions.repeat(len(some)), some.flatten(0, 1))
        return keys

    def write_layer(self, number: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write one layer's rotated keys and values [tokens, kv_heads, head_dim] by the engine's own op."""
        layer = self._layers[number]
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    def _write_part(self, rows: Rows, positions: NDArray[np.int64], slots: Slots) -> None:
        arena, layers = self._arena, range(len(self._layers))
        index, to = arena.index(rows), torch.from_numpy(positions).to(arena.device)
        keys = self._stage("keys", len(rows))
        if self.direct is not None:
            writer, crew = self.direct

            def some(part: range) -> None:
                rotated = self.rotate(arena.gather(arena.keys, index, keys, part), to, part.start)
                writer.write(part, rotated, arena.values[part.start : part.stop], rows, slots)

            crew.share(len(layers), some)
            return
        self.rotate(arena.gather(arena.keys, index, keys, layers), to)
        values = arena.gather(arena.values, index, self._stage("values", len(rows)), layers)
        where = torch.from_numpy(slots).to(arena.device)
        for number in layers:
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


def _by_module(rotations: Sequence[Any | None]) -> list[tuple[Any, range]]:
    """(module, neighbouring layers that it rotates)."""
    groups: list[tuple[Any, range]] = []
    for number, module in enumerate(rotations):
        if module is None:
            continue
        if groups and groups[-1][0] is module and groups[-1][1].stop == number:
            groups[-1] = (module, range(groups[-1][1].start, number + 1))
        else:
            groups.append((module, range(number, number + 1)))
    return groups
