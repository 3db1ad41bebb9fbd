"""What was acknowledged and is not there any more is said when the memory is opened; damaged files are named, and all
that can be read of them is served."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from inferscale_memory import ConfigurationError, StoreError
from inferscale_memory.journal import schema
from inferscale_memory.memory import Memory
from inferscale_memory.storage.sqlite import is_sound
from tests.memory.conftest import OpenMemory

ADA = {"user_id": "ada"}


@pytest.fixture
def folder(tmp_path: Path, open_memory: OpenMemory) -> Path:
    """A memory of thirty facts, closed."""
    with open_memory() as memory:
        for start in range(0, 30, 10):
            said = [
                {"role": "user", "content": f"I own the book number {n}"} for n in range(start, start + 10)
            ]
            memory.add(said, infer=False, **ADA)
    return tmp_path / "memory"


def texts(memory: Memory) -> set[str]:
    return {row["memory"] for row in memory.get_all(filters=ADA, top_k=100)["results"]}


def noise(path: Path, at: int, size: int = 4096) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(random.Random(at).randbytes(size))


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_facts_that_are_gone_are_counted_at_the_start(
    folder: Path, open_memory: OpenMemory, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    facts = folder / "facts.sqlite"
    facts.unlink() if how == "deleted" else facts.write_bytes(b"")
    memory = open_memory()
    assert texts(memory) == set()
    said = warnings(caplog)
    assert "30 of the 30 memories that" in said
    assert str(facts) in said
    assert "journal.sqlite" in said
    memory.delete_all(**ADA)
    memory.close()
    caplog.clear()
    open_memory()
    assert warnings(caplog) == "", "what was forgotten is not missed"


def test_a_backup_that_lacks_some_is_noticed(
    folder: Path, open_memory: OpenMemory, caplog: pytest.LogCaptureFixture
) -> None:
    backup = (folder / "facts.sqlite").read_bytes()
    with open_memory() as memory:
        memory.add("I own a horse", infer=False, **ADA)
        memory.delete(memory.get_all(filters=ADA)["results"][0]["id"])
    (folder / "facts.sqlite").write_bytes(backup)
    open_memory()
    assert "1 of the 30 memories that" in warnings(caplog)


def test_a_deleted_journal_is_said_and_the_facts_are_served(
    folder: Path, open_memory: OpenMemory, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "journal.sqlite").unlink()
    memory = open_memory()
    assert "holds 30 memories, and the journal" in warnings(caplog)
    assert len(texts(memory)) == 30
    assert len(memory.chat("Which books do I own?", **ADA, max_tokens=1).memories) == 20


def test_nothing_is_said_of_a_memory_that_is_whole(
    folder: Path, open_memory: OpenMemory, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(texts(open_memory())) == 30
    assert warnings(caplog) == ""


@pytest.mark.parametrize("at", [4096 * 12, 4096 * 20 + 100])
def test_noise_in_the_facts_costs_a_few_of_them(
    folder: Path, open_memory: OpenMemory, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    noise(folder / "facts.sqlite", at)
    memory = open_memory()
    assert len(texts(memory)) >= 25
    assert len(memory.search("the book number 7", filters=ADA, top_k=5)["results"]) == 5
    memory.add("I own a horse", infer=False, **ADA)
    assert "I own a horse" in texts(memory)
    assert "facts.sqlite" in warnings(caplog)
    memory.delete_all(**ADA)
    assert texts(memory) == set()


@pytest.mark.parametrize("part", [0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.9])
def test_a_damaged_journal_is_set_aside_and_read_as_far_as_it_goes(
    folder: Path, open_memory: OpenMemory, caplog: pytest.LogCaptureFixture, part: float
) -> None:
    journal = folder / "journal.sqlite"
    noise(journal, int(journal.stat().st_size * part) // 512 * 512)
    memory = open_memory()
    said = warnings(caplog)
    assert f"the journal {journal} was damaged" in said
    assert (folder / "journal.sqlite.damaged-1").exists()
    assert len(texts(memory)) == 30
    assert len(memory.chat("Which books do I own?", **ADA, max_tokens=1).memories) == 20
    memory.add("I own a horse", infer=False, **ADA)
    memory.delete(memory.get_all(filters=ADA)["results"][0]["id"])
    assert len(texts(memory)) == 30


def test_a_history_that_is_garbage_is_set_aside(
    folder: Path, open_memory: OpenMemory, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "history.db").write_bytes(random.Random(1).randbytes(8192))
    memory = open_memory()
    assert f"the history {folder / 'history.db'} was damaged and is" in warnings(caplog)
    assert len(texts(memory)) == 30
    [made] = memory.add("I own a horse", infer=False, **ADA)["results"]
    assert [event["event"] for event in memory.history(made["id"])] == ["ADD"]


def test_a_history_that_the_app_has_named_is_refused_by_name(tmp_path: Path, open_memory: OpenMemory) -> None:
    mine = tmp_path / "mine.db"
    mine.write_text("the app's own file, and long enough to be taken for one" * 100)
    with pytest.raises(ConfigurationError, match=r"history .*mine\.db is damaged"):
        open_memory(history_db_path=str(mine))
    assert mine.read_text().startswith("the app's own file")


def test_facts_of_which_nothing_can_be_read_are_refused_by_name(
    folder: Path, open_memory: OpenMemory
) -> None:
    noise(folder / "facts.sqlite", 0)
    with pytest.raises(StoreError, match=r"facts\.sqlite cannot be opened"):
        open_memory()


def test_a_memory_that_is_opened_checks_every_page_of_its_journal_once(
    folder: Path, open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []
    monkeypatch.setattr(schema, "is_sound", lambda path: checked.append(path) or is_sound(path))
    open_memory()
    assert checked == [folder / "journal.sqlite"]
