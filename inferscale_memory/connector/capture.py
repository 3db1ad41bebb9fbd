"""Catching keys before rotation, in a forward that vLLM runs anyway.

Within one step that has an encode, a pre-hook on every rotary module sees positions, queries and keys before
rotation, and the pre-hook on the attention layer that follows sees the values. Hooks stand only for that step.

A row is found by the slot it is written to, never by its position in the batch: requests share steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

from inferscale_memory.connector.metadata import Slots
from inferscale_memory.kv.arena import Arena
from inferscale_memory.kv.tier import Rows

OnLayer = Callable[[int, Any | None, torch.Tensor, torch.Tensor], None]
"""(layer number, its rotary module, keys before rotation [tokens, kv_heads, head_dim], values likewise)."""


class Hooks:
    """For one step: calls `on_layer` for every attention layer, in the order of the forward.

    Args:
        layers: attention layers; their index is the layer number.
        rotaries: the model's rotary modules.
        select: rows of the step to hand on, as an index tensor; called once, at the first hook.

    Attributes:
        positions: positions of the selected rows, as the model gave them to its first rotary module.
        problem: why nothing can be trusted, if so.
        fired: numbers of the layers that were seen.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        rotaries: Sequence[Any],
        select: Callable[[], torch.Tensor],
        on_layer: OnLayer,
    ) -> None:
        self._layers = layers
        self._rotaries = rotaries
        self._select = select
        self._on_layer = on_layer
        self._rows: torch.Tensor | None = None
        self._pending: tuple[Any, torch.Tensor] | None = None
        self._handles: list[Any] = []
        self.positions: torch.Tensor | None = None
        self.problem: str | None = None
        self.fired: set[int] = set()

    def __enter__(self) -> Hooks:
        for rotary in self._rotaries:
            self._handles.append(rotary.register_forward_pre_hook(self._before_rotary, with_kwargs=True))
        for number, layer in enumerate(self._layers):
            hook = self._guarded(number)
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_rotary(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the keys aside: most rotary kernels rotate them in place."""
        if self.problem is not None:
            return
        try:
            key = kwargs["key"] if "key" in kwargs else args[2] if len(args) > 2 else None
            if self.positions is None:
                positions = kwargs["positions"] if "positions" in kwargs else args[0]
                self.positions = positions[..., self._wanted()]
            if key is not None:
                self._pending = (module, key.index_select(0, self._wanted()))
        except Exception as error:
            self.problem = f"catching keys failed: {error!r}"

    def _guarded(self, number: int) -> Callable[..., None]:
        def before_attention(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.problem is not None:
                return
            try:
                self._before_attention(number, layer, args, kwargs)
            except Exception as error:
                self.problem = f"catching values failed: {error!r}"

        return before_attention

    def _before_attention(
        self, number: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        key = kwargs["key"] if "key" in kwargs else args[1]
        value = kwargs["value"] if "value" in kwargs else args[2]
        pending, self._pending = self._pending, None
        rows = self._wanted()
        module, keys = pending if pending is not None else (None, key.index_select(0, rows))
        shape = (len(rows), layer.num_kv_heads, layer.head_size)
        self._on_layer(number, module, keys.view(shape), value.index_select(0, rows).view(shape))
        self.fired.add(number)

    def _wanted(self) -> torch.Tensor:
        if self._rows is None:
            self._rows = self._select()
        return self._rows


def rows_of(slots: Slots, slot_mapping: torch.Tensor) -> torch.Tensor:
    """Row of the step in which each of `slots` is written. Raises LookupError when one is not in this step."""
    wanted = torch.from_numpy(np.ascontiguousarray(slots)).to(slot_mapping.device)
    ordered, order = torch.sort(slot_mapping.to(torch.int64))
    at = torch.searchsorted(ordered, wanted).clamp_(max=len(ordered) - 1)
    if not bool((ordered[at] == wanted).all()):
        raise LookupError("a slot to be kept is not written in this step")
    return order[at]


def into_arena(arena: Arena, rows: Rows, modules: dict[int, Any | None]) -> OnLayer:
    """A hook's receiver that writes each layer into arena `rows` and notes the layer's rotary module."""
    index = arena.index(rows)

    def on_layer(number: int, module: Any | None, keys: torch.Tensor, values: torch.Tensor) -> None:
        if number in modules and modules[number] is not module:
            raise RuntimeError(f"layer {number} was rotated by another module than at start-up")
        arena.write_layer(index, number, keys, values)

    return on_layer
