"""How a program ends that has not closed its memory: with its own status, quietly, and nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.memory import Memory
from tests.memory import ending
from tests.models import tiny_model

WAYS = {
    "end": 0,
    "raise": 1,
    "exit": 3,
    "interrupt": -signal.SIGINT,
    "terminate": -signal.SIGTERM,
    "many": 0,
    "async": 0,
    "worker": 0,
    "daemon": 0,
}
LOUD = ("terminate called", "Fatal", "EngineDead", "Exception ignored", "stay text", "was never awaited")


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended, and the folder of its memory."""

    status: int
    out: str
    err: str
    folder: Path

    @property
    def loud(self) -> list[str]:
        return [line for line in self.err.splitlines() if any(word in line for word in LOUD)]


def ended(place: Path, engine: dict[str, Any], *ways: str) -> dict[str, Ended]:
    """Programs that have ended in these ways, their memories under `place`."""
    place.mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "tests.memory.ending", str(place), json.dumps(engine), *ways],
        timeout=600,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MEM0_DIR": str(place / "mem0"), "HF_HUB_OFFLINE": "1"},
    )
    read = {way: [(place / f"{way}.{part}").read_text() for part in ("status", "out", "err")] for way in ways}
    return {way: Ended(int(status), out, err, place / way) for way, (status, out, err) in read.items()}


def remembered(folder: Path) -> set[str]:
    """What the memory in `folder` holds when it is opened again."""
    with Memory.from_config(ending.configuration(folder, {"provider": "transformers"})) as memory:
        facts = memory.get_all(filters=ending.ADA, top_k=100)["results"]
        return {fact["memory"].split(":")[0] for fact in facts}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """One that has ended in each way. Its model is one whose encodes take a moment."""
    place = tmp_path_factory.mktemp("ends")
    model = tiny_model("llama", place / "model", num_hidden_layers=8, intermediate_size=1024)
    return ended(place, {"provider": "transformers", "model": str(model), "device": "cpu"}, *WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_ends_while_facts_are_encoded_ends_as_it_would_without_them(
    programs: dict[str, Ended], way: str
) -> None:
    program = programs[way]
    assert program.status == WAYS[way], program.err[-2000:]
    assert program.loud == []
    acknowledged = {line for line in program.out.splitlines() if "tokens" not in line}
    assert len(acknowledged) >= 7
    folders = [program.folder / str(number) for number in range(3)] if way == "many" else [program.folder]
    assert set().union(*(remembered(folder) for folder in folders)) == acknowledged


def test_a_thread_that_goes_on_after_the_main_one_can_still_ask(programs: dict[str, Ended]) -> None:
    assert "tokens" in programs["worker"].out
