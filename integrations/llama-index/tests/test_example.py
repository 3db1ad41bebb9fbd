"""The example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama_index_documents.py"


@pytest.mark.engine
def test_documents_and_memories(tmp_path: Path) -> None:
    environment = {**os.environ, "INFERSCALE_HOME": str(tmp_path / "home")}
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "app")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=840)
    assert done.returncode == 0, done.stderr[-3000:]
    maya, omar = done.stdout.split("omar: What am I allergic to?")
    assert "walnuts" in maya.splitlines()[2]
    assert "fish" in omar.splitlines()[1]
    assert "walnuts" not in omar
    assert "fish" not in maya
    for said in (maya, omar):
        assert sum("  injected " in line for line in said.splitlines()) == 6
        assert sum("  read " in line and "kitchen closes at ten" in line for line in said.splitlines()) == 1
        assert all(int(line.split()[0]) > 0 for line in said.splitlines() if "tokens injected" in line)
