"""On a full disk nothing acknowledged is lost, nothing is half stored, and what is there can be read and deleted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscale_memory import StoreError
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenMemory
from tests.memory.disks import Disk, small_disk

ADA = {"user_id": "ada"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "memory") as disk:
        yield disk


@pytest.fixture
def memory(open_memory: OpenMemory, disk: Disk) -> Memory:
    return open_memory(folder=disk.folder)


def say(memory: Memory, text: str) -> str:
    [made] = memory.add(text, infer=False, **ADA)["results"]
    return str(made["id"])


def texts(memory: Memory) -> set[str]:
    return {row["memory"] for row in memory.get_all(filters=ADA, top_k=10_000)["results"]}


def store_until_full(memory: Memory, disk: Disk) -> set[str]:
    """What was acknowledged. The disk is full in the middle of the last call."""
    known = set()
    for number in range(10):
        known.add(text := f"I own the book number {number}")
        say(memory, text)
    disk.fill(memory, left=200_000)
    with pytest.raises(StoreError, match="full"):  # noqa: PT012 - which of them is the last is the disk's business
        for number in range(200):
            say(memory, text := f"I own the long book number {number}: " + "word " * 700)
            known.add(text)
    return known


def test_the_call_that_fails_is_not_half_stored_and_nothing_else_is_lost(
    memory: Memory, disk: Disk, open_memory: OpenMemory
) -> None:
    known = store_until_full(memory, disk)
    assert len(known) > 10
    assert texts(memory) == known
    assert memory.search("the book number 3", filters=ADA)["results"]
    before = time.monotonic()
    memory.close()
    assert time.monotonic() - before < 10
    again = open_memory(folder=disk.folder)
    assert texts(again) == known
    assert len(again.chat("Which books do I own?", **ADA, max_tokens=1).memories) > 5


def test_what_is_there_can_be_deleted_and_then_there_is_room_again(
    memory: Memory, disk: Disk, open_memory: OpenMemory
) -> None:
    known = store_until_full(memory, disk)
    row = memory.get_all(filters=ADA)["results"][0]
    memory.delete(row["id"])
    assert texts(memory) == known - {row["memory"]}
    memory.delete_all(**ADA)
    assert texts(memory) == set()
    memory.close()
    disk.empty()
    again = open_memory(folder=disk.folder)
    assert texts(again) == set()
    say(again, "I own a horse")
    assert texts(again) == {"I own a horse"}


def test_what_is_left_of_the_disk_is_for_deleting(memory: Memory, disk: Disk) -> None:
    store_until_full(memory, disk)
    before = texts(memory)
    for _ in range(3):
        disk.fill(memory)
        with pytest.raises(StoreError, match="full"):
            say(memory, "word " * 20_000)
        assert texts(memory) == before
    memory.delete(memory.get_all(filters=ADA)["results"][0]["id"])
    assert len(texts(memory)) == len(before) - 1


@pytest.mark.parametrize("where", ["facts", "journal", "history"])
def test_whichever_file_cannot_grow_nothing_is_half_stored(open_memory: OpenMemory, where: str) -> None:
    memory = open_memory()
    say(memory, "I own a book")
    db = {
        "facts": memory.vector_store.client.file._files.writer,
        "journal": memory._core.journal.database.connection,
        "history": memory.db.connection,
    }[where]
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="full"):
        say(memory, "I own a long book: " + "word " * 5000)
    db.execute("PRAGMA max_page_count = 1000000")
    assert texts(memory) == {"I own a book"}
    assert memory._core.journal.intents.unfinished() == {}
    say(memory, "I own a horse")
    assert texts(memory) == {"I own a book", "I own a horse"}
