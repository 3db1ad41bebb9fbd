"""What an extraction may answer, how much, and which answers are refused that mem0 would take for nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mem0.configs.prompts import (
    ADDITIVE_EXTRACTION_PROMPT,
    AGENT_CONTEXT_SUFFIX,
    generate_additive_extraction_prompt,
)
from mem0.exceptions import LLMError

from inferscale_memory.errors import ExtractionError
from inferscale_memory.extraction.instructions import (
    SHORT_INSTRUCTIONS,
    check_answer,
    is_extraction,
    schema_for,
    shortened,
)

SECRET = "walnut"


def asked(said: str, system: str = ADDITIVE_EXTRACTION_PROMPT) -> list[dict[str, str]]:
    """mem0's messages for an extraction from `said`."""
    prompt = generate_additive_extraction_prompt(
        existing_memories=[{"id": "0", "text": "word " * 500}], new_messages=said, last_k_messages=[]
    )
    return [{"role": "system", "content": system}, {"role": "user", "content": prompt}]


def most_facts(said: str, max_tokens: int = 100_000) -> int:
    schema = schema_for(asked(said), max_tokens)
    return int(schema["properties"]["memory"]["maxItems"])


@pytest.mark.parametrize(
    "answer",
    [
        '{"memory": []}',
        "{}",
        '{"memory": [{"id": "0", "text": "Ada likes tea", "attributed_to": "user"}]}',
        '```json\n{"memory": [{"text": "Ada likes tea"}]}\n```',
        'Here it is: {"memory": [{"text": "Ada likes tea"}]} as you wished',
        '<think>Tea?</think>{"memory": []}',
        '{"memory": [{"text": "Ada\nlikes tea"}]}',
        '{"memory": [{"text": "Ada likes tea"}, {"id": "1"}]}',
    ],
)
def test_what_mem0_can_read_is_left_to_it(answer: str) -> None:
    check_answer(answer)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "gave no answer"),
        ("", "gave no answer"),
        ("<think>hm</think>", "gave no answer"),
        (f"I'm sorry, I cannot talk about a {SECRET}.", "no JSON"),
        ('{"memory": [{"text": "Ada is allergic to walnut', "cut off"),
        ('{"memory": [{"text": "Ada is allergic to walnut"}', "cut off"),
        (f'{{"facts": ["{SECRET}"]}}', "another shape"),
        (f'["{SECRET}"]', "another shape"),
        ('{"memory": {"text": "walnut"}}', "another shape"),
        ('{"memory": ["walnut"]}', "another shape"),
        ('{"memory": null}', "another shape"),
        ('{"memory": [{"fact": "walnut"}]}', "without a text"),
        ('{"memory": [{"text": ["walnut"]}]}', "without a text"),
    ],
)
def test_what_mem0_would_lose_is_refused_and_never_quoted(answer: Any, says: str) -> None:
    with pytest.raises(ExtractionError, match=says) as raised:
        check_answer(answer)
    assert isinstance(raised.value, LLMError), "apps that catch mem0's error catch ours"
    assert SECRET not in str(raised.value)
    assert "retry_failed()" in str(raised.value)


def test_mem0s_extraction_is_told_from_other_questions() -> None:
    assert is_extraction(asked("hello"))
    assert is_extraction(asked("hello", ADDITIVE_EXTRACTION_PROMPT + AGENT_CONTEXT_SUFFIX))
    assert not is_extraction([{"role": "user", "content": ADDITIVE_EXTRACTION_PROMPT}])
    assert not is_extraction([{"role": "system", "content": "Create a procedure."}])
    assert not is_extraction([])


def test_the_short_instructions_keep_what_an_agent_is_told() -> None:
    for suffix in ("", AGENT_CONTEXT_SUFFIX):
        messages = asked("hello", ADDITIVE_EXTRACTION_PROMPT + suffix)
        system, question = shortened(messages)
        assert system == {"role": "system", "content": SHORT_INSTRUCTIONS + suffix}
        assert question == messages[1]


def test_the_example_in_the_short_instructions_is_what_is_asked_for() -> None:
    example = SHORT_INSTRUCTIONS.strip().splitlines()[-1]
    check_answer(example)
    fact = schema_for(asked("hello"), 1000)["properties"]["memory"]["items"]
    assert all(list(one) == list(fact["properties"]) for one in json.loads(example)["memory"])


def test_the_more_is_said_the_more_facts_there_may_be() -> None:
    assert most_facts("user: Hello") == 2
    assert most_facts("user: " + "word " * 79) == 12
    assert most_facts("user: " + "word " * 5000) == 24


def test_no_more_facts_than_the_answer_has_room_for() -> None:
    assert most_facts("user: " + "word " * 5000, max_tokens=1000) == 4
    assert most_facts("user: " + "word " * 5000, max_tokens=10) == 1
