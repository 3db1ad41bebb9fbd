"""Where each family of transformers models has its keys before RoPE, and how they become a cache again.

Nothing is guessed: a family, rotary variant or attention pattern that is not listed here is refused by name.
Rotation is the modeling file's own function fed by the model's own rotary module, and the cache is filled
through its own `update`, so a composition is what prefill would have left, whatever the variant and window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from inferscale_memory.errors import EngineError
from inferscale_memory.kv.arena import Shape

Reader = Callable[[torch.Tensor, Shape], torch.Tensor]
"""From a module's output to the keys (or values) of its layer, [tokens, kv_heads, head_dim]."""


def _projected(output: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[1, tokens, kv_heads * head_dim]: what k_proj and v_proj return."""
    return output[0].view(-1, shape.kv_heads, shape.head_dim)


def _normed(output: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[1, tokens, kv_heads, head_dim]: Qwen3 norms before it transposes."""
    return output[0]


def _normed_heads_first(output: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[1, kv_heads, tokens, head_dim]: Gemma-3 norms after it transposes."""
    return output[0].transpose(0, 1)


def _fused_keys(output: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[1, tokens, queries | keys | values]: the middle of Phi-3's qkv_proj."""
    width = shape.kv_heads * shape.head_dim
    return output[0, :, -2 * width : -width].view(-1, shape.kv_heads, shape.head_dim)


def _fused_values(output: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[1, tokens, queries | keys | values]: the end of Phi-3's qkv_proj."""
    width = shape.kv_heads * shape.head_dim
    return output[0, :, -width:].view(-1, shape.kv_heads, shape.head_dim)


@dataclass(frozen=True, slots=True)
class _Family:
    """Which submodule of a layer's `self_attn` yields keys before rotation and values, and how to read it."""

    keys: tuple[str, Reader] = ("k_proj", _projected)
    values: tuple[str, Reader] = ("v_proj", _projected)


FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(keys=("k_norm", _normed)),
    "phi3": _Family(keys=("qkv_proj", _fused_keys), values=("qkv_proj", _fused_values)),
    "gemma2": _Family(),
    "gemma3_text": _Family(keys=("k_norm", _normed_heads_first)),
}
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Those whose frequencies are the same at every running length."""
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def refusal(config: Any) -> str | None:
    """Why blobs cannot be used with a model of this configuration; None when they can."""
    family = config.model_type
    if family not in FAMILIES:
        return (
            f"model family {family!r} is not supported by the transformers engine "
            f"(supported: {', '.join(FAMILIES)})"
        )
    for parameters in _rope_variants(config).values():
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            return (
                f"rotary variant {rope_type!r} of this {family} model is not supported: its frequencies may "
                "depend on the running length, so keys cannot be moved "
                f"(supported: {', '.join(sorted(ROPE_TYPES))})"
            )
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        return f"layers of type {', '.join(sorted(unknown))} in this {family} model are not supported"
    if getattr(config, "use_bidirectional_attention", None):
        return (
            f"this {family} model attends in both directions: what a token's keys are depends on later tokens"
        )
    return None


def token_shape(config: Any, dtype: torch.dtype) -> Shape:
    """What one token's keys and values measure in a model that is not refused."""
    return Shape(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        dtype=dtype,
    )


def attention_implementation(config: Any) -> str | None:
    """Eager where scores are soft-capped, which transformers leaves out under SDPA; else the default."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) is not None else None


def _rope_variants(config: Any) -> dict[str | None, dict[str, Any]]:
    """Rotary parameters by layer type; under None where all layers share one."""
    parameters = config.rope_parameters
    if any(isinstance(value, dict) for value in parameters.values()):
        return {kind: value for kind, value in parameters.items() if kind in config.layer_types}
    return {None: parameters}


@dataclass(slots=True)
class Captured:
    """Keys before RoPE and values of one forward, by layer, each [kept, kv_heads, head_dim]."""

    layers: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def data(self) -> torch.Tensor:
        """As a blob has them: [layers, 2, kept, kv_heads, head_dim].

        Raises:
            EngineError: a layer was not seen.
        """
        missing = [
            layer for layer in range(self.layers) if layer not in self.keys or layer not in self.values
        ]
        if missing:
            raise EngineError(
                f"no keys were seen in layers {missing}: update transformers to a supported version"
            )
        pairs = [torch.stack((self.keys[layer], self.values[layer])) for layer in range(self.layers)]
        return torch.stack(pairs)


class AttentionLayers:
    """The attention layers of one loaded model, as far as blobs concern them."""

    def __init__(self, model: Any, shape: Shape) -> None:
        config = model.config
        self.shape = shape
        self._config = config
        self._family = FAMILIES[config.model_type]
        self._attention = [layer.self_attn for layer in model.model.layers]
        self._rotary = model.model.rotary_emb
        self._rotate = sys.modules[type(model).__module__].apply_rotary_pos_emb
        self._variants = {
            kind: [i for i in range(len(self._attention)) if kind is None or config.layer_types[i] == kind]
            for kind in _rope_variants(config)
        }

    @contextmanager
    def capture(self, keep: slice | torch.Tensor) -> Iterator[Captured]:
        """Catch keys and values of the forward run inside, of the tokens `keep` picks from it."""
        captured = Captured(self.shape.layers)
        handles = []
        for layer, attention in enumerate(self._attention):
            for (name, read), into in (
                (self._family.keys, captured.keys),
                (self._family.values, captured.values),
            ):
                hook = _catch(read, self.shape, keep, layer, into)
                handles.append(attention.get_submodule(name).register_forward_hook(hook))
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def compose(self, keys: torch.Tensor, values: torch.Tensor) -> DynamicCache:
        """The cache that a prefill of these tokens, from position 0 on, would have left.

        Args:
            keys: before RoPE, [tokens, layers, kv_heads, head_dim].
            values: of the same shape.
        """
        cache = DynamicCache(config=self._config)
        positions = torch.arange(len(keys), device=keys.device)[None]
        for kind, layers in self._variants.items():
            chosen = keys if len(self._variants) == 1 else keys[:, layers]
            heads = chosen.flatten(1, 2)[None]  # [1, tokens, layers * kv_heads, head_dim]
            cos, sin = self._rotary(heads, positions, *(() if kind is None else (kind,)))
            # Layers are just more heads. There is no query to rotate: it is passed with no heads.
            _, rotated = self._rotate(heads[:, :, :0], heads, cos, sin, unsqueeze_dim=2)
            rotated = rotated.view_as(chosen)
            for place, layer in enumerate(layers):
                cache.update(_one_batch(rotated[:, place]), _one_batch(values[:, layer]), layer)
        return cache


def _one_batch(layer: torch.Tensor) -> torch.Tensor:
    """[tokens, kv_heads, head_dim] as a cache has it: [1, kv_heads, tokens, head_dim]."""
    return layer.transpose(0, 1)[None]


def _catch(
    read: Reader, shape: Shape, keep: slice | torch.Tensor, layer: int, into: dict[int, torch.Tensor]
) -> Callable[[torch.nn.Module, Any, torch.Tensor], None]:
    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        into[layer] = read(output, shape)[keep].clone()

    return hook
