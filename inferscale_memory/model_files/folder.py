"""The folder of a model that is named by its path, or by its id at the Hugging Face hub.

Everything of this library works on a folder: what is named by an id is taken from the hub's cache, and fetched where it
is not there. The same files have the same fingerprint, wherever they came from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from inferscale_memory.errors import ConfigurationError, first_line
from inferscale_memory.model_files.fingerprint import WEIGHTS, read_config

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXTS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def model_folder(model: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of `model`, a path or a hub id such as "org/name".

    What the hub's cache holds whole is taken as it is; otherwise the hub is asked, unless HF_HUB_OFFLINE forbids it.

    Args:
        revision: a branch, tag or commit at the hub.
        weights: whether they are needed too; a client needs the tokenizer alone.

    Raises:
        ConfigurationError: no such folder, and nothing of that id.
    """
    folder = Path(model).expanduser()
    if folder.is_dir() or not is_hub_id(model):
        read_config(folder)
        return folder
    cached = _cached(str(model), revision)
    if cached is not None and (not weights or _whole(cached)):
        return cached
    return _fetched(str(model), revision, weights)


def check_model(model: str | Path, *, revision: str | None = None) -> None:
    """Raises ConfigurationError where `model_folder` is sure to: nothing is fetched to find out."""
    from huggingface_hub import constants

    folder = Path(model).expanduser()
    if folder.is_dir() or not is_hub_id(model):
        read_config(folder)
    elif constants.HF_HUB_OFFLINE:
        model_folder(model, revision=revision)


def cached_folder(model: str | Path, *, revision: str | None = None) -> Path | None:
    """The folder of a model that is on this machine; None where it would have to be fetched."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    return _cached(str(model), revision) if is_hub_id(model) else None


def is_hub_id(model: str | Path) -> bool:
    """Whether `model`, which is no folder here, may be the id of a model at the hub."""
    return isinstance(model, str | Path) and _ID.fullmatch(str(model)) is not None


def _cached(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return folder if (folder / "config.json").is_file() else None


def _whole(folder: Path) -> bool:
    """Whether a snapshot has all of its weights: a fetch may have been interrupted."""
    for index in folder.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            continue
        if all((folder / name).is_file() for name in names):
            return True
    return not any(folder.glob("*.index.json")) and any(
        path.is_file() for pattern in WEIGHTS for path in folder.glob(pattern)
    )


def _fetched(model: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download

    def get(patterns: list[str]) -> Path:
        options: dict[str, Any] = {
            "revision": revision,
            "allow_patterns": patterns,
            "ignore_patterns": ["*/*"],
        }
        return Path(snapshot_download(model, **options))

    if constants.HF_HUB_OFFLINE:
        raise ConfigurationError(
            f"no model folder at {model}, and the hub's cache ({constants.HF_HUB_CACHE}) does not hold all of a model "
            f"of that name; the hub is not asked for it, because HF_HUB_OFFLINE is set: unset it, fetch the model "
            f"where there is a network (`hf download {model}`), or pass the folder of a downloaded model (`inferscale "
            "fetch` prints one)"
        )
    try:
        folder = get([*_TEXTS, *(["*.safetensors"] if weights else [])])
        if weights and not _whole(folder):
            folder = get([*_TEXTS, "*.bin"])
    except Exception as error:  # whatever the hub's client and its transport raise
        raise ConfigurationError(
            f"no model folder at {model}, and no model of that name could be fetched from the hub "
            f"({first_line(error)}): correct the name, see to the network and to HF_TOKEN, or pass the folder of a "
            "downloaded model (`inferscale fetch` prints one)"
        ) from error
    read_config(folder)
    return folder
