"""The documentation names what is there: files, layers and options."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from inferscale_memory import Injection

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "inferscale_memory"
ABOUT_CODE = ["CONTRIBUTING.md", "docs/design/index.md", "docs/design/journey.md"]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ABOUT_CODE)
def test_every_file_and_folder_that_a_page_on_the_code_names_exists(page: str) -> None:
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", text(page))
    assert named, "the page names no files any more"
    # A file may be named without its folder once the folder is clear.
    alone = {path.name for path in PACKAGE.rglob("*.py")}
    missing = [
        name
        for name in named
        if name not in alone and not (PACKAGE / name).exists() and not (ROOT / name).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", ABOUT_CODE[:2])
def test_the_layers_of_the_house_are_those_that_lint_checks(page: str) -> None:
    contracts = tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    table = text(page).partition("| layer, from the top |")[2].partition("\n\n")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    documented = [name for cell in first_cells for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)]
    assert documented == [name for layer in layers for name in layer.split(" | ")]


def test_every_option_of_injection_is_on_the_page_that_lists_them() -> None:
    section = text("docs/mem0-drop-in.md").partition("## How memories are encoded and placed")[2]
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], flags=re.MULTILINE)
    documented = [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(documented) == sorted(field.name for field in fields(Injection))
