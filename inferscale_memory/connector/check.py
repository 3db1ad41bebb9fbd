"""The start-up check: on the first real step, prove on this very engine that blobs can work.

For every attention layer of that step: (1) a pattern written through the backend's own cache update must change what
attention reads; (2) the step's own keys, caught before rotation, rotated and written by the code that will inject
blobs, must give the layer's output again. Layouts and kernels change between releases of the engine; whatever does
not pass is refused, and everything is served as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferscale_memory.connector.compose import Composer, unsupported_rotary

MIN_TOKENS = 2
"""Tokens a step must have to prove anything: attention over one token ignores its key."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


class Noise:
    """Random numbers of our own: the engine samples from torch's global generator, on every rank for itself."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        """Of the shape, dtype and device of `like`, standard normal."""
        return torch.empty_like(like).normal_(generator=self._generator)


class StartupCheck:
    """Collects one step's layers, then judges them. Leaves the cache as it found it."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._noise = Noise(layers[0].kv_cache.device)
        self._seen: dict[int, tuple[Any | None, torch.Tensor, torch.Tensor]] = {}
        self._calls: dict[int, tuple[tuple[Any, ...], torch.Tensor]] = {}
        self._handles = [
            layer.register_forward_hook(self._after(number)) for number, layer in enumerate(layers)
        ]

    def on_layer(self, number: int, module: Any | None, keys: torch.Tensor, values: torch.Tensor) -> None:
        """A layer's rotary module, and keys before rotation and values of all tokens of the step."""
        self._seen[number] = (module, keys.clone(), values.clone())

    def _after(self, number: int) -> Any:
        def hook(layer: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
            if len(args) >= 3:
                self._calls[number] = (tuple(a.clone() for a in args[:3]), output.clone())

        return hook

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def rotations(self) -> list[Any | None]:
        return [self._seen[number][0] for number in range(len(self._layers))]

    def verdict(
        self, composer: Composer, positions: torch.Tensor, slots: torch.Tensor, metadata: Any
    ) -> str | None:
        """Why blobs cannot be used with this model and backend; None when they can.

        Args:
            positions, slots: of the step's tokens, [tokens].
            metadata: the step's attention metadata by layer name.
        """
        if len(self._calls) < len(self._layers):
            return "an attention layer is not called in a way that can be followed"
        rotated = composer.rotate(
            torch.stack([self._seen[n][1] for n in range(len(self._layers))]), positions
        )
        for number, layer in enumerate(self._layers):
            problem = self._judge(composer, number, layer, rotated[number], slots, metadata)
            if problem is not None:
                return f"layer {layer.layer_name}: {problem}"
        return None

    def _judge(
        self,
        composer: Composer,
        number: int,
        layer: Any,
        rotated: torch.Tensor,
        slots: torch.Tensor,
        metadata: Any,
    ) -> str | None:
        (query, key, value), output = self._calls[number]
        tokens = len(slots)
        query = query.view(-1, layer.num_heads, layer.head_size)[:tokens]
        key = key.view(-1, layer.num_kv_heads, layer.head_size)[:tokens]
        value = value.view(-1, layer.num_kv_heads, layer.head_size)[:tokens]
        expected = output.view(-1, layer.num_heads, layer.head_size)[:tokens]

        def attend() -> torch.Tensor:
            out = torch.empty_like(expected)
            layer.impl.forward(
                layer, query, key, value, layer.kv_cache, metadata[layer.layer_name], output=out
            )
            return out

        noise = (self._noise.normal(key), self._noise.normal(value))
        try:
            composer.write_layer(number, *noise, slots)
            if torch.equal(attend(), expected):
                return "attention does not read what the backend's cache update writes"
            composer.write_layer(number, rotated, self._seen[number][2], slots)
            bound = TOLERANCE.get(expected.dtype, 2e-2) * float(expected.abs().max().clamp(min=1.0))
            difference = float((attend() - expected).abs().max())
            if not difference <= bound:
                return f"attention over re-rotated keys differs by {difference:.2g} (bound {bound:.2g})"
        finally:
            composer.write_layer(number, key, value, slots)
        return None


def unsupported_layers(layers: Sequence[Any]) -> str | None:
    """Why these attention layers cannot be injected into, as far as can be seen without running them."""
    if not layers:
        return "it has no attention layers with a paged KV cache"
    shapes = {(getattr(x, "num_kv_heads", None), getattr(x, "head_size", None)) for x in layers}
    if len(shapes) > 1:
        return f"its layers differ in KV heads or head size: {sorted(map(str, shapes))}"
    for layer in layers:
        kind = type(layer).__name__
        if kind != "Attention":
            return f"layer {layer.layer_name} is {kind}, not plain attention"
        if getattr(layer, "kv_sharing_target_layer_name", None):
            return f"layer {layer.layer_name} shares another layer's KV cache"
        if getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
            return f"layer {layer.layer_name} has values of another size than keys"
        if not hasattr(layer.impl, "do_kv_cache_update") or getattr(
            layer.attn_backend, "forward_includes_kv_cache_update", True
        ):
            return f"attention backend {layer.attn_backend.get_name()} writes its cache inside attention"
    return None


def unsupported_rotations(rotations: Sequence[Any | None]) -> str | None:
    """The first rotary module that cannot be re-rotated, if any."""
    return next((reason for reason in map(unsupported_rotary, rotations) if reason), None)
