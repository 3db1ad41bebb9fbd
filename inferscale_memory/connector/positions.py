"""Where a model puts positions into its keys, as far as that can be known without running it.

A blob is moved by rotating its keys again, so a layer is fit for injection in two cases only: its rotary module was
seen at work, or the model has no position in that layer's keys. A layer whose rotary module was not seen may still
have one (called past the hooks, fused into a kernel) or may read learned positions, so the absence of a rotary module
proves nothing: the model's own configuration has to say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_RUN = 8
"""Shortest run of one token that is evidence: the start-up check moves keys by half of it."""
FULL_WITHOUT_POSITION = frozenset({"cohere2", "exaone4", "exaone_moe", "afmoe"})
"""Model types whose full-attention layers have no position where other layers have a sliding window."""


def without_position(config: Any, layer: Any) -> bool:
    """Whether the model has no position in the keys of this attention layer.

    Args:
        config: the Hugging Face configuration of the text model.
        layer: vLLM's attention layer.
    """
    if getattr(layer.impl, "alibi_slopes", None) is not None:  # ALiBi biases scores by distance
        return True
    number = _number(layer.layer_name)
    for name in ("no_rope_layers", "use_rope_layers"):  # both are lists in which 0 means "no rotation"
        flags = getattr(config, name, None)
        if isinstance(flags, list) and flags:
            return number is not None and number < len(flags) and not flags[number]
    if getattr(config, "position_embedding_type", None) == "nope":
        return True
    bases = getattr(config, "layer_rope_theta", None)
    if isinstance(bases, list) and number is not None and number < len(bases):
        return not bases[number]
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, Mapping) and parameters.get("rope_theta", 1) in (0, None):
        return True
    types = getattr(config, "layer_types", None)
    if getattr(config, "model_type", None) in FULL_WITHOUT_POSITION and isinstance(types, list):
        here = types[number] if number is not None and number < len(types) else None
        return "sliding_attention" in types and here == "full_attention"
    return False


def repeated_slots(
    new: Iterable[Any], scheduled: Mapping[str, int], block_size: int
) -> NDArray[np.int64] | None:
    """Slots [tokens] of a prompt that begins with one token again and again, as far as this step computes them; None
    where no prompt does.

    All those tokens have the same hidden state in every layer, wherever they stand: attention over equal values gives
    that value whatever the scores. So they show what the model makes of one and the same key at several positions.

    Args:
        new: vLLM's data of the requests that are new in this step.
        scheduled: tokens of this step per request.
    """
    for request in new:
        ids = request.prompt_token_ids
        if not ids or request.num_computed_tokens:
            continue
        most = min(len(ids), scheduled[request.req_id])
        run = next((at for at in range(most) if ids[at] != ids[0]), most)
        if run >= MIN_RUN:
            positions = np.arange(run, dtype=np.int64)
            table = np.asarray(request.block_ids[0], dtype=np.int64)
            return table[positions // block_size] * block_size + positions % block_size
    return None


def _number(layer_name: str) -> int | None:
    """Number of the decoder layer in a module name such as `model.layers.3.self_attn.attn`."""
    return next((int(part) for part in layer_name.split(".") if part.isdigit()), None)
