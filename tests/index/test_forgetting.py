"""What was deleted or replaced is in no file any more when the call returns."""

from __future__ import annotations

import random
import sqlite3
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from inferscale_memory.index import Collection, file
from tests.index.facts import DIMS, fact, vector


def found(folder: Path, words: list[str]) -> list[str]:
    """Those of `words` that are in any file, read by another process: SQLite's locks belong to processes, and
    go when any handle of theirs is closed."""
    (folder / "../words").write_text("\n".join(words))
    grep = ["grep", "-aohF", "-f", str(folder / "../words"), "-r", str(folder)]
    return sorted(set(run(grep, capture_output=True, text=True, errors="replace").stdout.split()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def facts(folder: Path) -> Collection:
    return Collection(folder / "facts.sqlite", "facts", dims=DIMS)


def test_what_is_stored_is_found_by_grepping(folder: Path, facts: Collection) -> None:
    facts.put(["a"], [vector(1)], [fact("secretword Grüße")])
    assert found(folder, ["secretword", "Grüße"]) == ["Grüße", "secretword"]


@pytest.mark.parametrize("how", ["delete", "update", "put", "clear", "move"])
def test_replaced_and_deleted_text_is_gone_from_the_files(folder: Path, facts: Collection, how: str) -> None:
    scope: dict[str, Any] = {"agent_id": "secretagent", "run_id": "secretrun"}
    facts.put(["kept"], [vector(2)], [fact("keptword")])
    facts.put(["secretid"], [vector(1)], [fact("secretword", "secretuser", **scope)])
    facts.search_words("secretword", 5)
    if how == "delete":
        facts.delete(["secretid"])
    elif how == "update":
        facts.update("secretid", payload=fact("other"))
    elif how == "put":
        facts.put(["secretid"], [vector(3)], [fact("other")])
    elif how == "move":
        facts.update("secretid", payload=fact("other", "ben"))
    else:
        facts.clear()
    gone = ["secretword", "secretuser", "secretagent", "secretrun"]
    gone += ["secretid"] if how in ("delete", "clear") else []
    assert found(folder, gone) == []
    assert found(folder, ["keptword"]) == ([] if how == "clear" else ["keptword"])


def test_nothing_deleted_survives_thousands_of_random_changes(
    folder: Path, facts: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that lie in a B-tree fail this, secure_delete or not: rebalancing it leaves copies behind."""
    monkeypatch.setattr(facts.file, "_scrub", lambda needed=True: None)  # once is enough, and quicker
    draw = random.Random(1)
    live: dict[str, str] = {}
    gone: list[str] = []
    made = 0

    def words(n: int) -> list[str]:
        nonlocal made
        made += n
        return [f"w{number:06d}x{draw.randrange(10**6):06d}" for number in range(made - n, made)]

    def payload(word: str) -> dict[str, Any]:
        long = 4000 if draw.random() < 0.02 else 600
        return fact(
            f"{word} {'y' * draw.randrange(10, long)}", f"user{draw.randrange(50)}", run_id=f"r{word}"
        )

    for _ in range(500):
        new = words(8)
        facts.put(new, [vector(1)] * 8, [payload(word) for word in new])
        live |= dict(zip(new, new, strict=True))
        [word] = words(1)
        id = draw.choice(list(live))
        gone.append(live[id])
        facts.update(id, payload=payload(word))
        live[id] = word
        for count in (3, 3):
            ids = draw.sample(list(live), count)
            facts.delete(ids)
            gone += [live.pop(id) for id in ids]
    assert len(gone) > 3000
    monkeypatch.undo()
    facts.file._scrub()
    assert found(folder, [word for word in gone if word not in live]) == []  # an updated fact keeps its id
    assert found(folder, list(live.values())) == sorted(live.values())


def test_what_a_killed_process_left_in_the_log_is_gone_when_the_file_is_opened(folder: Path) -> None:
    code = (
        "import os, sys; from inferscale_memory.index.file import FactFile\n"
        "import numpy as np; FactFile._scrub = lambda *args: None\n"
        "from pathlib import Path; f = FactFile(Path(sys.argv[1]), 'facts', 2)\n"
        "f.put(['a', 'b'], np.ones((2, 2), 'f4'), [{'data': 'secretword'}, {'data': 'keptword'}])\n"
        "f.delete(['a']); os._exit(9)"
    )
    assert run([sys.executable, "-c", code, str(folder / "facts.sqlite")]).returncode == 9
    assert found(folder, ["secretword"]) == ["secretword"]
    again = Collection(folder / "facts.sqlite", "facts")
    assert found(folder, ["secretword", "keptword"]) == ["keptword"]
    assert [hit.id for hit in again.first()] == ["b"]


def test_a_reader_that_does_not_end_is_said_and_caught_up_with(
    folder: Path,
    facts: Collection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file, "_SCRUB_PATIENCE", 0.05)
    facts.put(["a", "b"], [vector(1), vector(2)], [fact("secretword"), fact("other")])
    reader = sqlite3.connect(folder / "facts.sqlite", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM facts").fetchone()
    facts.delete(["a"])
    assert facts.get("a") is None, "it is deleted nevertheless"
    assert "does not end" in caplog.text
    reader.execute("COMMIT")
    facts.put(["c"], [vector(3)], [fact("more")])
    assert found(folder, ["secretword"]) == []
