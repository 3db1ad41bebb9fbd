"""Half a character (a lone surrogate, as cut JSON leaves it) is replaced at the door; the conversation goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferscale_memory import Injection
from inferscale_memory.memory import Chat, Memory
from inferscale_memory.prompt.calls import read_calls
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, texts

HALF, REPLACED = "tea\ud83d", "tea\ufffd"
ODD = ["\0", "tea\0cup", "\x1b[31m", "\u202e", "\ufeff", "\uffff", "\U0010ffff", '"', "'", "* AND"]
ODD += ["NEAR(", "\\", "a" * 20_000]
"""Text that a file, a database or a tokenizer may trip over."""


def test_it_is_replaced_wherever_text_is_taken(either: Settled) -> None:
    said = [{"role": "user", "content": f"I like {HALF}", "name": "Ada\ud83d"}]
    [added] = either.add(said, **ADA, metadata={"of": HALF, HALF: [HALF]}, infer=False)["results"]
    kept = either.get(added["id"])
    assert kept["memory"] == f"I like {REPLACED}"
    assert kept["metadata"] == {"of": REPLACED, REPLACED: [REPLACED]}
    for found in (
        either.search(HALF, filters={**ADA, "of": HALF}, threshold=0.0),
        either.get_all(filters={**ADA, HALF: HALF}),
        either.get_all(filters={**ADA, "of": {"in": [HALF]}}),
    ):
        assert [one["id"] for one in found["results"]] == [added["id"]]
    either.update(added["id"], f"I love {HALF}", metadata={"of": HALF})
    assert either.get(added["id"])["memory"] == f"I love {REPLACED}"
    assert either.audit(HALF).found
    either.delete(added["id"])
    assert either.audit(HALF).clean


def test_a_conversation_with_it_goes_on(either: Settled) -> None:
    either.add("I like tea", **ADA, infer=False)
    tool = {"name": "look", "description": HALF, "parameters": {"properties": {HALF: {"type": "string"}}}}
    session = Settled(either.itself.session(**ADA, system=HALF), either._run)
    for _ in range(2):
        assert session.chat(HALF, max_tokens=2).memories
        said = [{"role": "system", "content": HALF}, {"role": "user", "content": HALF}]
        assert either.chat(said, **ADA, max_tokens=2)
    assert session.messages[1]["content"] == REPLACED
    call = {"id": "1", "function": {"name": "look", "arguments": json.dumps({HALF: HALF})}}
    agent = [
        {"role": "user", "content": HALF},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": HALF, "tool_call_id": "1"},
    ]
    assert either.chat(agent, **ADA, tools=[tool], max_tokens=2)


def test_what_an_llm_extracts_with_it_is_stored(either: Settled) -> None:
    class Extractor:
        def generate_response(self, *args: Any, **options: Any) -> str:
            return '```json\n{"memory": [{"text": "Likes tea\\ud83d"}]}\n```'

    either.itself.llm = Extractor()
    [added] = either.add("I like tea", **ADA)["results"]
    assert added["memory"] == f"Likes {REPLACED}"
    assert [one["memory"] for one in either.get_all(filters=ADA)["results"]] == [f"Likes {REPLACED}"]


def test_a_call_that_spells_it_can_be_stored(memory: Memory) -> None:
    [call] = read_calls(
        '{"name": "save", "arguments": {"what": "tea\\ud83d"}}', [{"function": {"name": "save"}}]
    ).calls
    assert call.arguments == {"what": REPLACED}


def test_a_heading_and_a_system_text_with_it_are_taken(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"heading": HALF, "system": HALF})
    memory.add("I like tea", **ADA, infer=False)
    assert texts(memory.chat("?", **ADA, max_tokens=1)) == ["I like tea"]
    assert Injection(heading=HALF).heading == REPLACED


def test_a_chat_remembers_and_answers_it(memory: Memory) -> None:
    chat = Chat(memory=memory)
    chat.remember(HALF, ADA, infer=False)
    found = chat.recall(HALF, ADA)
    assert [one["memory"] for one in found] == [REPLACED]
    assert chat.is_current(found)
    assert chat.answer(chat.prepare(HALF, ADA, found, max_tokens=2))


@pytest.mark.parametrize("provider", ["inferscale", "qdrant"])
def test_other_odd_text_is_kept_and_found(open_face: OpenFace, provider: str) -> None:
    memory = open_face(vector_store={"provider": provider})
    for number, odd in enumerate(ODD):
        [added] = memory.add(f"{number} {odd}", **ADA, metadata={"odd": odd}, infer=False)["results"]
        assert memory.get(added["id"])["memory"] == f"{number} {odd}"
        assert len(memory.get_all(filters={**ADA, "odd": odd})["results"]) == 1, repr(odd)
        assert memory.search(f"{number} {odd}", filters=ADA, threshold=0.0)["results"], repr(odd)
        assert memory.chat(f"{odd} ?"[:200], **ADA, k=1, max_tokens=1)
        memory.delete(added["id"])
