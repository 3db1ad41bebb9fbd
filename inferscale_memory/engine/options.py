"""What a memory's configuration says of its engine, checked when the memory is made and before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from inferscale_memory.engine.environment import installed_engine
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.model_files.folder import check_model

PROVIDERS = ("vllm", "transformers", "remote")
TRANSFORMERS_OPTIONS = frozenset({"dtype", "device", "blob_bytes", "secret"})
REMOTE_OPTIONS = frozenset({"base_url", "tokenizer", "model", "api_key", "home", "timeout", "tool_parser"})
VLLM_OPTIONS = frozenset({"dtype", "device_bytes", "host_bytes", "home", "tool_parser"})
"""Those of our own; vLLM's engine arguments come on top."""
BLOB_OPTIONS = frozenset({"device_bytes", "host_bytes"})
_OURS_ALONE = frozenset({"model", "kv_transfer_config"})
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_WELL_KNOWN = frozenset(
    {
        "max_model_len",
        "enforce_eager",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "quantization",
        "revision",
        "seed",
        "block_size",
        "num_gpu_blocks_override",
        "kv_cache_dtype",
    }
)
"""Engine arguments for which vLLM need not be imported, which takes seconds."""


def check_options(spec: Mapping[str, Any]) -> None:
    """Raises ConfigurationError on an engine's options that cannot work, as far as that is to be seen without loading
    a model, importing an engine, or asking a network."""
    options = dict(spec)
    provider = options.pop("provider", None)
    if provider is not None and provider not in PROVIDERS:
        raise ConfigurationError(
            f"engine provider {provider!r} is unknown{_meant(provider, PROVIDERS)}: use {' or '.join(PROVIDERS)}, or "
            "an Engine"
        )
    blobs = options.pop("blobs", {})
    if not isinstance(blobs, Mapping):
        raise ConfigurationError(
            f"blobs of an engine is a {type(blobs).__name__}: pass a dict of byte budgets"
        )
    if provider == "remote":
        _check_remote(options, blobs)
        return
    _check_names("blobs of an engine", blobs, BLOB_OPTIONS, "leave out")
    model = options.pop("model", None)
    dtype = options.get("dtype", "auto")
    if dtype not in _DTYPES:
        raise ConfigurationError(
            f"dtype={dtype!r} is unknown{_meant(dtype, _DTYPES)}: use one of {', '.join(_DTYPES)}"
        )
    if (provider or installed_engine()) == "vllm":
        _check_vllm(options)
    else:
        _check_names(
            "a transformers engine", options, TRANSFORMERS_OPTIONS, "or take provider vllm: leave out"
        )
    if model is not None:
        if not isinstance(model, str) and not hasattr(model, "__fspath__"):
            raise ConfigurationError(
                f"model of an engine is a {type(model).__name__}: pass a folder or a hub id"
            )
        check_model(model, revision=options.get("revision"))


def _check_remote(options: Mapping[str, Any], blobs: Mapping[str, Any]) -> None:
    if blobs:
        raise ConfigurationError(
            "blobs of a remote engine lie at its server: leave them out, and pass --device-bytes and --host-bytes to "
            "`inferscale serve`"
        )
    if "base_url" not in options:
        raise ConfigurationError(
            f"a remote engine needs base_url and takes {', '.join(sorted(REMOTE_OPTIONS))}"
        )
    _check_names("a remote engine", options, REMOTE_OPTIONS, "or give them to `inferscale serve`: leave out")


def _check_vllm(options: Mapping[str, Any]) -> None:
    doubtful = options.keys() - VLLM_OPTIONS - _WELL_KNOWN
    if not doubtful:
        return
    known = _vllm_arguments()
    if known is not None:
        _check_names(
            "vLLM",
            {name: options[name] for name in doubtful},
            known | VLLM_OPTIONS,
            "leave out",
            listed=False,
        )


def _vllm_arguments() -> frozenset[str] | None:
    """Names of vLLM's engine arguments; None where it cannot be imported, which its start will say."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
    except ImportError:
        return None
    return frozenset(field.name for field in fields(AsyncEngineArgs)) - _OURS_ALONE


def _check_names(
    what: str, options: Mapping[str, Any], known: Collection[str], remedy: str, *, listed: bool = True
) -> None:
    unknown = sorted(str(name) for name in options if name not in known)
    if not unknown:
        return
    meant = "".join(_meant(name, known) for name in unknown[:1])
    takes = f"takes {', '.join(sorted(known))}" if listed else f"has no engine argument {unknown[0]!r}"
    raise ConfigurationError(f"{what} {takes}{meant}; {remedy} {', '.join(unknown)}")


def _meant(name: object, known: Collection[str]) -> str:
    close = get_close_matches(str(name), [str(one) for one in known], 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
