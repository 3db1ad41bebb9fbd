"""A program that forks with an open memory: the child searches and adds, is told where to ask, and hangs nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_model


def forked(folder: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """What `tests.memory.forking` has seen."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.memory.forking", str(folder / "memory"), json.dumps(engine)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=Path(__file__).parents[2],
        # With one thread torch would have none to miss in the child.
        env={**os.environ, "MEM0_DIR": str(folder / "mem0"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [line for line in done.stderr.splitlines() if "Traceback" in line or "Exception ignored" in line]
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def assert_children_search_and_add_and_ask_nobody(seen: dict[str, Any]) -> None:
    first, second = seen["children"]
    assert first["status"] == second["status"] == 0
    assert first["seen"]["found"] == ["I live in Porto"]
    assert first["seen"]["added"] == ["I like tea"]
    assert len(first["seen"]["refused"]) == 5
    for sentence in first["seen"]["refused"]:
        assert "before this process was forked" in sentence
        assert "in the process that uses it" in sentence
    assert first["seen"]["again"] == {"seen": ["I like tea", "I live in Vienna"], "status": 0}
    assert second["seen"] == ["I like tea"]
    assert seen["parent"] == {"facts": ["I like tea", "I live in Vienna"], "injected": 2}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fork")
    model = tiny_model("llama", folder / "model")
    return forked(folder, {"provider": "transformers", "model": str(model), "device": "cpu"})


def test_children_search_and_add_are_told_where_to_ask_and_leave_the_parent_as_it_was(seen: dict[str, Any]) -> None:
    assert_children_search_and_add_and_ask_nobody(seen)


def test_a_child_may_start_the_engine_that_its_parent_had_not(seen: dict[str, Any]) -> None:
    assert seen["unused"] == {"seen": "length", "status": 0}


@pytest.mark.engine
def test_children_of_a_process_with_vllm(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "model")
    options = {"dtype": "float32", "max_model_len": 2048, "block_size": 32, "num_gpu_blocks_override": 300}
    assert_children_search_and_add_and_ask_nobody(
        forked(tmp_path, {"provider": "vllm", "model": str(model), "enforce_eager": True, **options})
    )
