"""The start-up check: on a real step, prove on this very engine that blobs can work.

The step holds a prompt that begins with one token again and again (`positions.repeated_slots`). For every attention
layer: (1) a pattern written through the backend's own cache update must change what attention reads; (2) the step's
own keys, caught before rotation, rotated and written by the code that will inject blobs, must give the layer's output
again; (3) the repeated token's key, caught at one position and moved to another, must be the key that the model itself
computed there. Layouts and kernels change between releases of the engine; whatever does not pass is refused, and
everything is served as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inferscale_memory.connector.compose import Composer, unsupported_rotary

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}

NOISE = {torch.float32: 1e-2}
"""How far the values of a repeated token may lie apart, relative to their size: 0.25 in half precision, where rounding
adds up over the layers."""
UNEXPLAINED = 0.4
"""Largest part of a key's way between two positions that our rotation may leave unexplained: a missing or doubled
rotation leaves all of it."""


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
        self,
        composer: Composer,
        positions: torch.Tensor,
        slots: torch.Tensor,
        run: torch.Tensor,
        metadata: Any,
    ) -> str | None:
        """Why blobs cannot be used with this model and backend; None when they can.

        Args:
            positions, slots: of the step's tokens, [tokens].
            run: which of these tokens are one token repeated from the beginning of its prompt.
            metadata: the step's attention metadata by layer name.
        """
        if len(self._calls) < len(self._layers):
            return "an attention layer is not called in a way that can be followed"
        problem = self._judge_moves(composer, positions, run)
        if problem is not None:
            return problem
        rotated = composer.rotate(
            torch.stack([self._seen[n][1] for n in range(len(self._layers))]), positions
        )
        for number, layer in enumerate(self._layers):
            problem = self._judge(composer, number, layer, rotated[number], slots, metadata)
            if problem is not None:
                return f"layer {layer.layer_name}: {problem}"
        return None

    def _judge_moves(self, composer: Composer, positions: torch.Tensor, run: torch.Tensor) -> str | None:
        """Move the repeated token's keys half of its run further, where the model computed them as well."""
        half = len(run) // 2
        here, there = run[:half], run[half : 2 * half]
        moved = composer.rotate(
            torch.stack([self._seen[n][1][here] for n in range(len(self._layers))]), positions[there]
        )
        layers = list(enumerate(self._layers))
        if any(getattr(layer.impl, "sinks", None) is not None for _, layer in layers):
            # A sink takes a share of attention that shrinks with the prompt: only the first layer sees equal states.
            layers = layers[:1]
        for number, layer in layers:
            (_, key, value), _ = self._calls[number]
            key, value = (part.view(-1, layer.num_kv_heads, layer.head_size).float() for part in (key, value))
            # Values have no position: what lies between them is rounding, in the keys as well.
            noise = _typical(value[there] - value[here]) / max(_typical(value[there]), 1e-9)
            if noise > NOISE.get(moved.dtype, 0.25):
                return f"layer {layer.layer_name}: its values depend on the position"
            bound = (TOLERANCE.get(moved.dtype, 2e-2) + 3 * noise) * _typical(key[there])
            way, left = _typical(key[there] - key[here]), _typical(key[there] - moved[number].float())
            if left > max(UNEXPLAINED * way, bound):
                return (
                    f"layer {layer.layer_name}: a key that was moved is not the one computed at that position: it "
                    f"differs by {left:.2g}, and both positions by {way:.2g}"
                )
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


def unsupported_rotations(
    rotations: Sequence[Any | None], layers: Sequence[Any], without_position: Callable[[Any], bool]
) -> str | None:
    """Why keys of these layers cannot be moved, if they cannot.

    Args:
        rotations: for each layer the rotary module that was seen at work, or None.
        without_position: whether the model says that a layer has no position.
    """
    for module, layer in zip(rotations, layers, strict=True):
        if module is not None:
            problem = unsupported_rotary(module)
            if problem is not None:
                return problem
        elif not without_position(layer):
            return (
                f"no rotary embedding was seen at work before layer {layer.layer_name}, and the model's configuration "
                "does not say that the layer has no position: it may have learned positions, or rotate keys where "
                "that cannot be followed"
            )
    return None


def _typical(vectors: torch.Tensor) -> float:
    """Median length of vectors [tokens, kv_heads, head_dim]: an expert's router may tip over at a token or two."""
    return float(vectors.flatten(1).norm(dim=1).median())
