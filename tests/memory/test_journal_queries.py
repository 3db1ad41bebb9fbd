"""How often a question asks the journal, on a real memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.memory import Chat, Memory
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, say, texts

QUESTION = "What is my cat called?"
SHORT = SamplingOptions(max_tokens=2)
MOST = 4


@contextmanager
def counted(memory: Memory) -> Iterator[list[str]]:
    """The statements that the journal runs within the block."""
    assert memory._core is not None
    statements: list[str] = []
    connection = memory._core.journal.database.connection
    connection.set_trace_callback(statements.append)
    try:
        yield statements
    finally:
        connection.set_trace_callback(None)


def queries(statements: list[str]) -> list[str]:
    """SQLite also traces statements that run within another one, with "--" in front."""
    return [statement for statement in statements if not statement.startswith("--")]


@pytest.fixture
def filled(memory: Memory) -> Memory:
    say(memory, "My cat is called Miso", "I live in Porto", "I play the oboe")
    memory.flush()
    memory.chat(QUESTION, **ADA, options=SHORT)
    return memory


def test_a_question_asks_the_journal_at_most_four_times(filled: Memory) -> None:
    with counted(filled) as statements:
        reply = filled.chat(QUESTION, **ADA, options=SHORT)
    assert len(texts(reply)) == 3
    assert all(memory.injected for memory in reply.memories)
    assert 1 <= len(queries(statements)) <= MOST, statements


def test_neither_does_a_streamed_one_nor_one_in_steps(filled: Memory) -> None:
    with counted(filled) as streamed:
        list(filled.chat(QUESTION, **ADA, options=SHORT, stream=True))
    chat = Chat(memory=filled)
    with counted(filled) as stepwise:
        chat.answer(chat.prepare(QUESTION, ADA, chat.recall(QUESTION, ADA)), SHORT)
    assert len(queries(streamed)) <= MOST, streamed
    assert len(queries(stepwise)) <= MOST, stepwise


@pytest.mark.parametrize("order", ["chronological", "sessions"])
def test_the_order_of_the_memories_asks_nothing_more(open_memory: OpenMemory, order: str) -> None:
    memory = open_memory(injection={"order": order})
    say(memory, "My cat is called Miso", "I live in Porto")
    memory.flush()
    with counted(memory) as statements:
        memory.chat(QUESTION, **ADA, options=SHORT)
    assert len(queries(statements)) <= MOST, statements


def test_an_app_cannot_say_that_its_memories_are_pinned_or_all(filled: Memory) -> None:
    found = filled.search(QUESTION, filters=ADA, threshold=0.0)["results"]
    marked = [*found[:1], *({**row, "pinned": True, "whole": True} for row in found[1:])]
    plain = filled.prepare(QUESTION, **ADA, memories=found)
    assert filled.prepare(QUESTION, **ADA, memories=marked).prompt == plain.prompt
