"""How many memories a call recalls: `top_k`, or `k` for short, wherever an app can say it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from inferscale_memory import Chat, ConfigurationError
from tests.memory.conftest import OpenFace
from tests.memory.faces import Settled
from tests.memory.saying import ADA, say

QUESTION = "What do I like?"

CALLS: dict[str, Callable[..., int]] = {
    "chat": lambda memory, **many: len(memory.chat(QUESTION, **ADA, max_tokens=1, **many).memories),
    "prepare": lambda memory, **many: len(memory.prepare(QUESTION, **ADA, max_tokens=1, **many).memories),
    "session": lambda memory, **many: len(
        Settled(memory.session(**ADA, **many), memory._run).chat(QUESTION, max_tokens=1).memories
    ),
    "session.chat": lambda memory, **many: len(
        Settled(memory.session(**ADA), memory._run).chat(QUESTION, max_tokens=1, **many).memories
    ),
    "session.stream": lambda memory, **many: len(
        list(Settled(memory.session(**ADA), memory._run).stream(QUESTION, max_tokens=1, **many))[-1].reply.memories
    ),
    "Chat.recall": lambda memory, **many: len(Chat(memory=memory.itself).recall(QUESTION, ADA, **many)),
    "Chat.arecall": lambda memory, **many: len(
        asyncio.run(Chat(memory=memory.itself).arecall(QUESTION, ADA, **many))
    ),
}


@pytest.fixture
def filled(either: Settled) -> Settled:
    say(either, "I like tea", "I like cake", "I like rain")
    return either


@pytest.mark.parametrize("call", CALLS)
def test_top_k_and_k_say_the_same(filled: Settled, call: str) -> None:
    many = CALLS[call]
    assert many(filled, top_k=2) == many(filled, k=2) == many(filled, top_k=2, k=2) == 2
    assert many(filled) == 3
    with pytest.raises(ConfigurationError, match=r"top_k is 1 and k is 2.* pass top_k alone"):
        many(filled, top_k=1, k=2)


def test_top_k_is_checked(filled: Settled) -> None:
    with pytest.raises(ConfigurationError, match="top_k must be a whole number of at least 0, not '3'"):
        filled.chat(QUESTION, **ADA, top_k="3")


def test_the_configuration_says_it_for_calls_that_do_not(open_face: OpenFace) -> None:
    memory = open_face(injection={"top_k": 1})
    say(memory, "I like tea", "I like cake")
    assert len(memory.chat(QUESTION, **ADA, max_tokens=1).memories) == 1


@pytest.mark.parametrize(
    ("old", "new", "argument"),
    [("stand", "is_current", [{"id": "1", "memory": "I like tea"}]), ("version", "fingerprint", ADA)],
)
def test_chat_takes_the_old_names_of_its_methods(filled: Settled, old: str, new: str, argument: Any) -> None:
    chat = Chat(memory=filled.itself)
    with pytest.warns(DeprecationWarning, match=rf"Chat\.{old}\(\) is now Chat\.{new}\(\)"):
        result = getattr(chat, old)(argument)
    assert result == getattr(chat, new)(argument)
    with pytest.warns(DeprecationWarning, match=rf"Chat\.a{old}\(\) is now Chat\.a{new}\(\)"):
        assert asyncio.run(getattr(chat, f"a{old}")(argument)) == result
