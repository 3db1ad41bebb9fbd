"""With nothing configured but the engine: the real embedder, our store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscale_memory.memory import Memory
from tests.memory.saying import ADA, BEN, injected, say, texts
from tests.memory.watched import WatchedEngine

pytestmark = pytest.mark.engine


@pytest.fixture
def memory(engine: WatchedEngine, tmp_path: Path) -> Iterator[Memory]:
    with Memory(engine=engine, folder=tmp_path / "memory") as memory:
        yield memory


def test_meaning_is_what_is_searched_for(memory: Memory) -> None:
    say(memory, "My cat is called Miso", "I work at the hospital in Porto", "Grandma turned ninety in March")
    memory.flush()
    reply = memory.chat("What is my job?", **ADA, k=1, max_tokens=2)
    assert injected(reply) == ["I work at the hospital in Porto"]


def test_a_user_with_few_memories_finds_them_among_many_of_others(memory: Memory) -> None:
    """mem0's FAISS store takes the nearest of everybody first and filters then: it would find none."""
    say(memory, *(f"My cat number {number} is called Miso {number}" for number in range(130)), **BEN)
    say(memory, "A memory of something else entirely")
    assert texts(memory.chat("What is my cat called?", **ADA, max_tokens=1)) == [
        "A memory of something else entirely"
    ]


def test_everything_lies_under_the_folder(memory: Memory, tmp_path: Path) -> None:
    say(memory, "I like tea")
    assert {path.name for path in (tmp_path / "memory").iterdir()} >= {
        "journal.sqlite",
        "history.db",
        "facts.sqlite",
    }
