"""What a folder of a Hugging Face model holds: its configuration, tokenizer and weights, or an error that says what
is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from inferscale_memory.engine.hf.families import attention_implementation
from inferscale_memory.errors import ConfigurationError, EngineError, first_line
from inferscale_memory.model_files.fingerprint import read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(folder: Path) -> Any:
    """The configuration in `folder`. Raises ConfigurationError."""
    kind = read_config(folder).get("model_type")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a configuration class raises on values it does not like
        raise ConfigurationError(
            f"transformers {transformers.__version__} cannot read the config.json of {folder} (a {kind}): "
            f"{first_line(error)}; pass another model, or update transformers"
        ) from error


def resolve_dtype(dtype: str, config: Any) -> str:
    """`dtype`, a name of `DTYPES`; for "auto" that of the checkpoint. Raises ConfigurationError."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigurationError(f"dtype={dtype!r} is unknown: pass one of auto, {', '.join(DTYPES)}")
    if dtype != "auto":
        return dtype
    own = str(config.get_text_config().dtype or "float32").removeprefix("torch.")
    if own not in DTYPES:
        raise ConfigurationError(f"the checkpoint is of dtype {own}: pass one of {', '.join(DTYPES)}")
    return own


def resolve_device(device: str | None) -> torch.device:
    """`device`, tried; for None CUDA where there is any. Raises ConfigurationError."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigurationError(
            f"device={device!r} cannot be used here ({first_line(error)}): pass cpu, or None to choose"
        ) from error
    return torch.device(device)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`. Raises ConfigurationError."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"{folder} has no readable tokenizer ({first_line(error)}): download the model again"
        ) from error


def load_model(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model in `folder`, all of its weights read. Raises EngineError."""
    try:
        with _no_progress_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention_implementation(config),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:
        # Whatever transformers and safetensors raise on a folder that is not whole.
        raise EngineError(
            f"{folder} could not be loaded ({first_line(error)}): "
            "download the model again, or pass a decoder-only one"
        ) from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise EngineError(f"{folder} lacks weights ({missing}, ...): download the model again")
    return model


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """What vLLM ends an answer on too: the tokenizer's and the generation config's end of sequence."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    ends = own if isinstance(own, list) else [own]
    return frozenset(token for token in (*ends, tokenizer.eos_token_id) if token is not None)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers' own bars would draw over ours."""
    wanted = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if wanted:
            hf_logging.enable_progress_bar()
