"""The name of a model's folder as far as keys, values and token ids depend on it.

Every engine names one folder and dtype alike, so that what one of them computed is addressed alike by all.
This module never loads a model and imports no tensor library: it must be cheap on the client's side too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from inferscale_memory.errors import ConfigurationError

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
CHUNK = 64 * 1024
CHUNKS = 64


def model_fingerprint(folder: Path, *, dtype: str, extra: Sequence[str] = ()) -> str:
    """32 hex digits (BLAKE2b-128) that name a model folder and the dtype it is computed in.

    Hashed are config.json (as canonical JSON), the tokenizer's files and chat template (whole), and of every
    weight file its name, its size and 64 evenly spread chunks of 64 KiB, which tells fine-tunes of one shape
    apart and reads 4 MiB of a file of any size. A weight file changed in a few places only, between the
    chunks, keeps its name: after patching weights by hand pass what was done as `extra`.

    Args:
        dtype: resolved name of the compute dtype, such as "bfloat16"; never "auto".
        extra: whatever else changes keys and values, such as an override of the rotary embedding.

    Raises:
        ConfigurationError: no such folder, or no model in it.
    """
    hasher = blake2b(digest_size=16)
    for name, content in _fields(folder, dtype, extra):
        for part in (name.encode(), content):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
    return hasher.hexdigest()


def read_config(folder: Path) -> dict[str, object]:
    """config.json of a model folder.

    Raises:
        ConfigurationError: no such folder, no config.json in it, or one that is not a JSON object.
    """
    remedy = "pass the folder of a downloaded Hugging Face model (`inferscale fetch` prints one)"
    if not folder.is_dir():
        raise ConfigurationError(f"no model folder at {folder}: {remedy}")
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{folder} has no config.json, so it holds no model: {remedy}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is unreadable ({error}): download the model again") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} is not a JSON object: download the model again")
    return config


def _fields(folder: Path, dtype: str, extra: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    config = read_config(folder)
    yield "config", json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    yield "dtype", dtype.encode()
    for item in extra:
        yield "extra", item.encode()
    for path in _files(folder, TOKENIZER):
        yield path.name, path.read_bytes()
    weights = _files(folder, WEIGHTS)
    if not weights:
        raise ConfigurationError(
            f"{folder} has no weights ({', '.join(WEIGHTS)}): download the model again, or convert it"
        )
    for path in weights:
        yield path.name, path.stat().st_size.to_bytes(8, "little") + b"".join(_sample(path))


def _files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _sample(path: Path) -> Iterator[bytes]:
    """The first chunk, the last, and those between at even distances; the whole of a small file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= CHUNK * CHUNKS:
            yield file.read()
            return
        for number in range(CHUNKS):
            file.seek((size - CHUNK) * number // (CHUNKS - 1))
            yield file.read(CHUNK)
