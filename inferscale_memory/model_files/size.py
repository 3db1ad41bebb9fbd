"""How many parameters a model has, read from the headers of its weight files: nothing is loaded."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from inferscale_memory.errors import ConfigurationError
from inferscale_memory.model_files.fingerprint import read_config

_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""


def parameters(folder: Path) -> int | None:
    """Parameters of the model in `folder`; None where the files do not say.

    They say so in safetensors files of whole weights. A quantized tensor holds several weights in one element, so the
    elements of a quantized model are not its parameters.
    """
    try:
        config = read_config(folder)
        if config.get("quantization_config"):
            return None
        counts = [_elements(path) for path in sorted(folder.glob("*.safetensors"))]
    except (ConfigurationError, OSError, ValueError, AttributeError, TypeError, KeyError):
        return None
    return sum(counts) or None


def _elements(path: Path) -> int:
    """Format: eight bytes with the length of the header, then the header, a JSON object with the shape of every
    tensor (https://github.com/huggingface/safetensors#format)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path} has a header of {length} bytes")
        header = json.loads(file.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
