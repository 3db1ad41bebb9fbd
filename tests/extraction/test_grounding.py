"""A fact that was copied out of the instructions is told from one that was said."""

from __future__ import annotations

import json
import re

import pytest

from inferscale_memory.errors import ExtractionError
from inferscale_memory.extraction.grounding import copied
from inferscale_memory.extraction.instructions import (
    EXAMPLE_NAMES,
    SHORT_INSTRUCTIONS,
    CopiedError,
    alone,
    says_nothing,
    without_copies,
)
from tests.extraction.test_extraction import asked

WALNUTS = "user: I am allergic to walnuts.\n"


def is_copy(fact: str, said: str) -> bool:
    return copied(fact, said=said, instructions=SHORT_INSTRUCTIONS, names=EXAMPLE_NAMES)


def answer(*texts: str) -> str:
    return json.dumps({"memory": [{"id": "0", "text": text, "attributed_to": "user"} for text in texts]})


def kept(given: str, said: str = WALNUTS) -> list[str]:
    return [fact["text"] for fact in json.loads(without_copies(given, asked(said)))["memory"]]


@pytest.mark.parametrize(
    "fact",
    [
        "User's name is Lena",
        "Lena flies to Oslo on 2025-03-05 with her dog Pip",
        "User has a dog named Pip and is allergic to walnuts",
        "User flies with her dog",
        "Each memory is one complete sentence that can be understood alone",
    ],
)
def test_what_only_the_instructions_say_is_a_copy(fact: str) -> None:
    assert is_copy(fact, WALNUTS)


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("User is allergic to walnuts", WALNUTS),
        ("User has an allergy", WALNUTS),
        ("User's name is Lena and she has a dog", "user: I'm Lena, and I have a dog\n"),
        (
            "Lena flies to Oslo",
            '## Existing Memories\n[{"id": "0", "text": "Lena moves to Oslo"}]\nuser: I fly!',
        ),
        ("User owns a dog named Rex", "user: Rex is my dog\n"),
        ("User owns a dog", "user: Ich habe einen Hund\n"),
        ("User likes tea", "user: 我喜欢茶\n"),
        ("用户对核桃过敏", "user: 我对核桃过敏\n"),
        ("User decided on Rust", "user: Let's go with Rust\n"),
        ("User turned 40 on 2026-11-29", "user: I turned 40 yesterday\n"),
    ],
)
def test_what_was_said_shown_or_translated_is_not(fact: str, said: str) -> None:
    assert not is_copy(fact, said)


def test_the_example_has_no_other_names_and_numbers() -> None:
    example = SHORT_INSTRUCTIONS[SHORT_INSTRUCTIONS.index("Answer in JSON only") :]
    facts = " ".join(re.findall(r'"text": "([^"]*)"', example))
    names = set(re.findall(r"\b(?:[A-Z]\w+|\d[\d-]+)", facts)) - {"User"}
    assert names <= set(EXAMPLE_NAMES)
    assert all(name in example for name in EXAMPLE_NAMES)


def test_copies_are_taken_out_of_an_answer_and_the_rest_stays() -> None:
    given = answer("User's name is Lena", "User is allergic to walnuts")
    assert kept(given) == ["User is allergic to walnuts"]


@pytest.mark.parametrize(
    "given", [answer("User is allergic to walnuts"), '{"memory": []}', "no JSON", "[]", '{"memory": [5]}']
)
def test_an_answer_without_copies_is_left_as_it_is(given: str) -> None:
    assert without_copies(given, asked(WALNUTS)) is given


def test_an_answer_of_copies_alone_is_an_error_that_quotes_nothing() -> None:
    with pytest.raises(CopiedError, match="larger one") as raised:
        without_copies(answer("User's name is Lena", "Lena flies to Oslo"), asked(WALNUTS))
    assert isinstance(raised.value, ExtractionError)
    assert "walnuts" not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "nothing"),
    [
        ("", True),
        ("user: \n", True),
        ("user:   \nassistant: \n", True),
        (WALNUTS, False),
        ("user: ?\n", False),
    ],
)
def test_messages_without_a_word_say_nothing(said: str, nothing: bool) -> None:
    assert says_nothing(asked(said)) is nothing


def test_new_messages_alone_have_nothing_beside_them() -> None:
    before = asked(WALNUTS)
    [system, user] = alone(before)
    assert system == before[0]
    assert WALNUTS in user["content"]
    assert "## Observation Date" in user["content"]
    assert "word word" in before[1]["content"]
    assert "word word" not in user["content"]
