"""A process that is killed at any moment leaves what the next start makes whole again.

INFERSCALE_KILLS says how often: 20 times by default, 200 in `make soak`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen, run
from typing import Any

import pytest

from inferscale_memory.journal import Intent
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenMemory
from tests.memory.crashing import ADA, BEN, open_memory
from tests.memory.raw import files_with
from tests.memory.saying import say
from tests.memory.stores import CRASH_SAFE_STORES

KILLS = int(os.environ.get("INFERSCALE_KILLS", "20"))
ROOT = Path(__file__).parents[2]


class Expected:
    """What must be there, and what must be nowhere."""

    def __init__(self) -> None:
        self.there: dict[str, str] = {}
        self.gone: set[str] = set()
        self.begun: list[Any] = []

    def heard(self, line: list[Any]) -> None:
        what, *of = line
        if what.endswith("?"):
            self.begun = line
            return
        if what == "add":
            self.there |= of[0]
        elif what == "update":
            self.gone.add(self.there[of[0]])
            self.there[of[0]] = of[1]
        elif what == "delete":
            self.gone.add(self.there.pop(of[0]))
        elif what == "delete_all":
            self.gone.update(of[0])
        self.begun = []

    def settle(self, stored: dict[str, str], bens: list[str]) -> None:
        """What was begun and not acknowledged may have happened or not. If it did, all of it holds."""
        what, *of = self.begun or ["nothing"]
        if what == "add?":
            self.there |= {fact: text for fact, text in stored.items() if text in of[0]}
        elif what == "update?" and stored.get(of[0]) == of[1]:
            self.gone.add(self.there[of[0]])
            self.there[of[0]] = of[1]
        elif what == "delete?" and of[0] not in stored:
            self.gone.add(self.there.pop(of[0]))
        elif what == "delete_all?":
            assert sorted(text for text in bens if text in of[0]) in ([], sorted(of[0])), "half of it is gone"
            if not set(bens) & set(of[0]):
                self.gone.update(of[0])
        self.begun = []


def check(memory: Memory, expected: Expected, folder: Path) -> None:
    stored = {row["id"]: row["memory"] for row in memory.get_all(filters=ADA, top_k=100_000)["results"]}
    bens = {row["id"]: row["memory"] for row in memory.get_all(filters=BEN, top_k=100_000)["results"]}
    expected.settle(stored, list(bens.values()))
    assert stored == expected.there
    assert memory._core is not None
    everything = stored | bens
    known = memory._core.journal.facts.get(everything)
    assert {name: fact.text for name, fact in known.items()} == everything
    assert all(known[name].turns for name in stored if not stored[name].startswith("renewed"))
    assert memory._core.journal.intents.unfinished() == {}
    for name, text in everything.items():
        assert text in {event["new_memory"] for event in memory.history(name)} | {None}
    words = folder.parent / "words"
    words.write_text("\n".join(sorted(text.split()[-1] for text in expected.gone)))
    if expected.gone:
        left = run(["grep", "-raohF", "-f", str(words), str(folder)], capture_output=True, text=True).stdout
        assert sorted(set(left.split())) == []


def play(
    rounds: Any, expected: Expected, seed: int | None, statement: int | None, draw: random.Random
) -> None:
    """One round, killed at a statement or at some moment."""
    print(json.dumps([seed, statement]), file=rounds.stdin, flush=True)
    for line in rounds.stdout:
        print(line, end="")  # for whoever has to find out
        heard = json.loads(line)
        if heard[0] == "pid" and statement is None:
            time.sleep(draw.uniform(0.0, 0.6))
            os.kill(heard[1], signal.SIGKILL)
        if heard[0] == "ended":
            break
        if heard[0] not in ("pid", "open"):
            expected.heard(heard)


@pytest.mark.skipif(
    not hasattr(os, "fork"), reason="the rounds are forks of a process that has imported mem0"
)
@pytest.mark.parametrize("provider", CRASH_SAFE_STORES)
def test_whatever_the_moment_the_next_start_has_every_fact_and_nothing_forgotten(
    tmp_path: Path, provider: str
) -> None:
    folder = tmp_path / "memory"
    expected, draw = Expected(), random.Random(4711)
    command = [sys.executable, "-m", "tests.memory.crashing", str(folder), provider]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT) as rounds:
        assert rounds.stdin is not None
        assert rounds.stdout is not None
        assert json.loads(rounds.stdout.readline()) == ["ready"]
        for seed in range(KILLS):
            play(rounds, expected, seed, draw.randrange(1, 500) if seed % 4 else None, draw)
            if seed % 2:  # and once more while it recovers
                play(rounds, expected, None, draw.randrange(20, 200), draw)
            memory = open_memory(str(folder), provider)
            check(memory, expected, folder)
            memory.close()
        rounds.stdin.close()
    assert expected.gone or KILLS < 10


class TestWhatWasBegun:
    """Crashes between two steps, made by hand."""

    def again(self, memory: Memory, open_memory: OpenMemory) -> Memory:
        memory.close()
        return open_memory()

    def begin(self, memory: Memory, *intents: Intent) -> None:
        assert memory._core is not None
        for intent in intents:
            memory._core.journal.intents.begin(intent)

    def test_a_fact_that_reached_the_store_alone_is_entered_with_its_turn(
        self, open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = open_memory()
        assert memory._core is not None
        writes = memory._core.writes
        monkeypatch.setattr(writes, "written", lambda rows: None)
        monkeypatch.setattr(memory._core.journal.intents, "finish", lambda numbers: None)
        [fact] = say(memory, "I like tea")
        memory.db.connection.execute("DELETE FROM history")
        memory.db.connection.commit()
        memory = self.again(memory, open_memory)
        assert memory._core is not None
        [known] = memory._core.journal.facts.get([fact]).values()
        assert (known.text, known.verbatim, len(known.turns)) == ("I like tea", True, 1)
        assert [event["event"] for event in memory.history(fact)] == ["ADD"]
        assert memory._core.journal.intents.unfinished() == {}

    def test_a_delete_is_finished(self, open_memory: OpenMemory, tmp_path: Path) -> None:
        memory = open_memory()
        [fact] = say(memory, "my secret")
        self.begin(memory, Intent("delete", fact, "user_id=ada", ("my secret",)))
        memory = self.again(memory, open_memory)
        assert memory.get(fact) is None
        assert files_with(tmp_path / "memory", "my secret") == []

    def test_an_update_that_did_not_reach_the_store_has_not_happened(self, open_memory: OpenMemory) -> None:
        memory = open_memory()
        [fact] = say(memory, "old words")
        self.begin(memory, Intent("update", fact, "user_id=ada", ("old words",)))
        memory = self.again(memory, open_memory)
        assert memory.get(fact)["memory"] == "old words"
        assert memory.history(fact)[0]["new_memory"] == "old words"

    def test_an_update_that_did_is_finished(
        self, open_memory: OpenMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = open_memory()
        [fact] = say(memory, "old words")
        assert memory._core is not None
        with monkeypatch.context() as cut_off:
            cut_off.setattr(memory._core.writes, "updated", lambda *args: None)
            cut_off.setattr(memory._core.writes._forgetting, "complete", lambda *args, **options: [])
            memory.update(fact, "new words")
        assert files_with(tmp_path / "memory", "old words") != []
        memory = self.again(memory, open_memory)
        assert memory._core is not None
        assert memory._core.journal.facts.get([fact])[fact].text == "new words"
        assert files_with(tmp_path / "memory", "old words") == []

    @pytest.mark.parametrize("kind", ["delete_all", "reset"])
    def test_deleting_everything_is_finished(
        self, open_memory: OpenMemory, tmp_path: Path, kind: str
    ) -> None:
        memory = open_memory()
        first, _ = say(memory, "my secret", "another secret")
        say(memory, "bens own", **BEN)
        memory.vector_store._inner.delete(first)
        self.begin(memory, Intent(kind, scope="user_id=ada" if kind == "delete_all" else ""))
        memory = self.again(memory, open_memory)
        assert memory.get_all(filters=ADA)["results"] == []
        assert files_with(tmp_path / "memory", "secret") == []
        assert len(memory.get_all(filters=BEN)["results"]) == (kind == "delete_all")

    def test_where_only_the_scrub_was_left_the_files_are_written_anew(
        self, open_memory: OpenMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = open_memory()
        assert memory._core is not None
        [fact] = say(memory, "my secret")
        memory.db.connection.execute("PRAGMA secure_delete = OFF")
        with monkeypatch.context() as cut_off:
            cut_off.setattr(memory._core.writes._forgetting, "_scrub", lambda words: False)
            memory.delete(fact)
        assert [intent.kind for intent in memory._core.journal.intents.unfinished().values()] == ["scrub"]
        assert files_with(tmp_path / "memory", "my secret") != []
        memory = self.again(memory, open_memory)
        assert files_with(tmp_path / "memory", "my secret") == []
        assert memory._core is not None
        assert memory._core.journal.intents.unfinished() == {}

    def test_what_cannot_be_finished_does_not_keep_the_memory_closed(
        self, open_memory: OpenMemory, caplog: pytest.LogCaptureFixture
    ) -> None:
        memory = open_memory()
        say(memory, "I like tea")
        self.begin(memory, Intent("delete", "no id at all", "user_id=ada", ("x",)))
        memory = self.again(memory, open_memory)
        assert len(memory.get_all(filters=ADA)["results"]) == 1
