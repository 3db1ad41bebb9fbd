"""Every example runs as its first lines say, and does what they say."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferscale_memory import fetch

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.engine  # real embedders, and one real engine


def output(name: str, folder: Path) -> list[str]:
    """What an example prints when it works under `folder`."""
    environment = {**os.environ, "EMBEDDER": str(fetch.embedder()), "INFERSCALE_HOME": str(folder / "home")}
    command = [sys.executable, str(EXAMPLES / name), str(folder / "app")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_swapping_the_import_is_all_there_is_to_it(tmp_path: Path) -> None:
    before, after = (EXAMPLES / "mem0_app" / name for name in ("before.py", "after.py"))
    lines = [path.read_text().splitlines() for path in (before, after)]
    changed = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
    assert changed == ["- from mem0 import Memory", "+ from inferscale_memory import Memory"]
    printed = [output(f"mem0_app/{path.name}", tmp_path / path.stem) for path in (before, after)]
    assert printed[0] == printed[1]
    assert printed[0] == [
        "maya: I am allergic to walnuts.",
        "omar: I never eat fish.",
        "maya: My sister's wedding is on 21 June in Porto.",
        "omar: 0 memories",
    ]


def test_chat_injects_what_the_app_remembers(tmp_path: Path) -> None:
    printed = output("mem0_app/and_chat.py", tmp_path)
    assert sum("  injected  " in line for line in printed) == 2
    injected, _, rest = printed[-1].partition(" tokens injected, ")
    assert int(injected) > int(rest.partition(" prefilled")[0])


def test_a_store_of_mem0s_is_brought_along(tmp_path: Path) -> None:
    printed = output("migrate_from_mem0.py", tmp_path)
    assert any(line.startswith("2 facts of 2 owners") for line in printed)
    assert any(line.startswith("2 facts: 2 copied") for line in printed)
    assert printed[-2:] == ["maya: I am allergic to walnuts.", "omar: I never eat fish."]
