"""The engine as the LLM that extracts: valid JSON, shared instructions, and nothing that forgetting would miss.

The model is random: what it extracts is nonsense, but nonsense of the right shape.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mem0.configs.prompts import ADDITIVE_EXTRACTION_PROMPT

from inferscale_memory.engine.base import Completion, SamplingOptions
from inferscale_memory.errors import ExtractionError
from inferscale_memory.extraction import engine_llm as llm
from inferscale_memory.extraction import instructions as extraction
from inferscale_memory.extraction.instructions import SHORT_INSTRUCTIONS
from inferscale_memory.facts.scope import said_tag
from inferscale_memory.memory import Memory
from inferscale_memory.prompt import PUBLIC_OWNER, Prompt
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, BEN
from tests.memory.watched import WatchedEngine

Asked = tuple[Prompt, SamplingOptions, Completion]


@pytest.fixture(autouse=True)
def short_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model hardly ever ends a text by itself, and does not know that there is something to extract. It is
    asked however small it is."""
    monkeypatch.setattr(llm, "MIN_PARAMETERS", 0)
    monkeypatch.setattr(extraction, "_CHARACTERS", 20)
    schema_for = extraction.schema_for

    def schema_with_a_fact(*args: Any) -> dict[str, Any]:
        schema = schema_for(*args)
        schema["properties"]["memory"]["minItems"] = 1
        return schema

    monkeypatch.setattr(extraction, "schema_for", schema_with_a_fact)


def extracted(engine: WatchedEngine) -> Asked:
    """The last question that was asked for JSON."""
    return next(asked for asked in reversed(engine.asked) if asked[1].schema is not None)


def test_what_is_extracted_is_stored_and_searched(either: Settled, engine: WatchedEngine) -> None:
    added = either.add("I moved to Porto in March. I have a cat.", **ADA)["results"]
    answer = json.loads(extracted(engine)[2].text)["memory"]
    assert 0 < len(answer) <= 3
    stored = {found["memory"] for found in either.get_all(filters=ADA)["results"]}
    assert stored == {result["memory"] for result in added} == {fact["text"] for fact in answer}


def test_the_model_is_asked_what_mem0_asks(memory: Memory, engine: WatchedEngine) -> None:
    memory.add("I moved to Porto", **ADA, prompt="Only cities.")
    prompt = engine.tokenizer.decode(extracted(engine)[0].ids)
    for part in (SHORT_INSTRUCTIONS, "## New Messages\nuser: I moved to Porto", "Only cities.", "# Output:"):
        assert part in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


def test_the_instructions_are_a_blob_that_all_owners_share(memory: Memory, engine: WatchedEngine) -> None:
    memory.add("I moved to Porto", **ADA)
    first = extracted(engine)
    memory.add("I have a cat", **BEN)
    second = extracted(engine)
    assert first[0].owner == "user:ada"
    assert second[0].owner == "user:ben"
    instructions = first[0].segments[0]
    assert instructions.key is not None
    assert second[0].segments[0] == instructions
    assert "Porto" not in engine.tokenizer.decode(instructions.ids)
    for _, _, completion in (first, second):
        assert completion.injected_tokens == len(instructions.ids)
    shared = [request for request in engine.encoded if request.ids == instructions.ids]
    assert [request.owner for request in shared] == [PUBLIC_OWNER], "encoded once, and for everybody"


def test_nothing_else_is_injected(memory: Memory, engine: WatchedEngine) -> None:
    memory.add("I moved to Porto", **ADA, infer=False)
    memory.flush()
    memory.add("I have a cat", **ADA)
    prompt = extracted(engine)[0]
    assert "I moved to Porto" in engine.tokenizer.decode(prompt.segments[1].ids)
    assert [segment.key is None for segment in prompt.segments] == [False, True]


def test_an_answer_behind_the_blob_is_the_answer_to_the_text(memory: Memory, engine: WatchedEngine) -> None:
    memory.add("I moved to Porto", **ADA)
    prompt, options, completion = extracted(engine)
    assert engine.generate(prompt.as_text(), options).token_ids == completion.token_ids


def test_a_blob_that_the_engine_lost_is_made_again(memory: Memory, engine: WatchedEngine) -> None:
    memory.add("I moved to Porto", **ADA)
    instructions = extracted(engine)[0].segments[0]
    engine.forget(PUBLIC_OWNER, [instructions.key or ""])
    memory.add("I have a cat", **ADA)
    assert extracted(engine)[2].injected_tokens == 0
    memory.add("I have a dog", **ADA)
    assert extracted(engine)[2].injected_tokens == len(instructions.ids)


def test_instructions_that_cannot_be_kept_are_text_and_not_tried_again(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = llm.monotonic()
    monkeypatch.setattr(llm, "monotonic", lambda: now)  # on a busy machine the pause may be over
    engine.refuse = lambda request: request.owner == PUBLIC_OWNER
    memory.add("I moved to Porto", **ADA)
    memory.add("I have a cat", **ADA)
    assert extracted(engine)[2].injected_tokens == 0
    long = [r for r in engine.encoded if "## New Messages" not in engine.text(r) and len(r.ids) > 500]
    assert len(long) == 1


def test_after_a_while_they_are_tried_again(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.refuse = lambda request: request.owner == PUBLIC_OWNER
    memory.add("I moved to Porto", **ADA)
    engine.refuse = lambda request: False
    memory.add("I have a cat", **ADA)
    assert extracted(engine)[2].injected_tokens == 0
    later = llm.monotonic() + llm._RETRY_S + 1
    monkeypatch.setattr(llm, "monotonic", lambda: later)
    memory.add("I have a dog", **ADA)
    assert extracted(engine)[2].injected_tokens == len(extracted(engine)[0].segments[0].ids)


def test_not_every_refusal_is_remembered(memory: Memory, engine: WatchedEngine) -> None:
    own = vars(memory)["llm"]
    engine.refuse = lambda request: request.owner == PUBLIC_OWNER
    for number in range(20):
        assert own._key(engine, (1, 2, 3 + number)) is None
    assert len(own._refused) == llm._REFUSED


def test_mem0s_own_instructions_are_kept_where_they_leave_room(
    open_memory: OpenMemory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchedEngine, "max_model_len", 1 << 17)
    memory = open_memory()
    asked: list[Prompt] = []

    def generate(prompt: Prompt, options: SamplingOptions) -> Completion:
        asked.append(prompt)
        return Completion('{"memory": []}', (), "stop", len(prompt.ids), 0, 0, len(prompt.ids), 0.0)

    monkeypatch.setattr(engine, "generate", generate)
    monkeypatch.setattr(engine, "_unsupported", "or it would read all of them, which takes long")
    memory.add("I moved to Porto", **ADA)
    assert ADDITIVE_EXTRACTION_PROMPT[:200] in engine.tokenizer.decode(asked[0].ids[:600])
    assert len(asked[0].segments[0].ids) > 10_000


def test_forgetting_a_fact_evicts_the_prompts_it_stood_in(memory: Memory, engine: WatchedEngine) -> None:
    added = memory.add("I moved to Porto", user_id="ada", agent_id="butler", infer=False)["results"]
    memory.add("Hello", user_id="ada")
    memory.add("Hello", agent_id="butler")
    shown = {
        asked[0].segments[1].tag for asked in engine.asked if "Porto" in engine.tokenizer.decode(asked[0].ids)
    }
    assert shown == {said_tag("user:ada"), said_tag("agent:butler")}
    memory.delete(added[0]["id"])
    assert shown <= set(engine.forgotten[-1][2])
    assert said_tag("user:ben") not in engine.forgotten[-1][2]


def test_a_question_that_is_no_extraction_is_tagged_from_its_first_token(
    memory: Memory, engine: WatchedEngine
) -> None:
    memory.add("How I make tea", agent_id="cook", memory_type="procedural_memory")
    prompt, options, _ = engine.asked[-1]
    assert options.schema is None
    assert [segment.tag for segment in prompt.segments] == [said_tag("agent:cook")]


def test_an_answer_that_is_cut_off_is_an_error_and_can_be_tried_again(
    open_face: OpenFace, engine: WatchedEngine
) -> None:
    memory = open_face(llm={"provider": "inferscale", "config": {"max_tokens": 12}})
    with pytest.raises(ExtractionError, match="cut off after 12 tokens"):
        memory.add("I moved to Porto", **ADA)
    assert memory.get_all(filters=ADA)["results"] == []
    memory.itself.llm.config.max_tokens = 2000
    assert memory.retry_failed()["results"] != []
    assert memory.failed_adds() == []


def test_messages_that_do_not_fit_are_an_error_that_says_so(either: Settled) -> None:
    with pytest.raises(ExtractionError, match="larger max_model_len"):
        either.add("I moved to Porto. " * 600, **ADA)
    assert len(either.failed_adds()) == 1


def test_an_engine_that_cannot_start_is_an_error_that_says_why(
    open_face: OpenFace, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "half").mkdir()
    shutil.copy(model / "config.json", tmp_path / "half")
    memory = open_face(engine={"provider": "transformers", "model": tmp_path / "half"})
    with pytest.raises(ExtractionError, match="download the model again"):
        memory.add("I moved to Porto", **ADA)
    assert len(memory.failed_adds()) == 1


class TestAskedByHand:
    """mem0's LLM interface, as apps use it."""

    QUESTION = ({"role": "user", "content": "Which pet?"},)

    def test_plain_text(self, memory: Memory, engine: WatchedEngine) -> None:
        memory.llm.config.max_tokens = 5
        answer = memory.llm.generate_response(self.QUESTION)
        assert answer == engine.asked[-1][2].text
        assert engine.asked[-1][1].schema is None
        assert memory.llm.generate_response(self.QUESTION, response_format={"type": "text"}) == answer

    def test_a_schema_of_the_callers(self, memory: Memory) -> None:
        schema = {"type": "object", "properties": {"pet": {"enum": ["cat", "dog"]}}, "required": ["pet"]}
        for named in ({"name": "pet", "schema": schema}, schema):
            answer = memory.llm.generate_response(
                self.QUESTION, response_format={"type": "json_schema", "json_schema": named}
            )
            assert json.loads(answer)["pet"] in ("cat", "dog")

    def test_any_object(self, memory: Memory, engine: WatchedEngine) -> None:
        memory.llm.config.max_tokens = 1
        with pytest.raises(ExtractionError, match="cut off"):
            memory.llm.generate_response(self.QUESTION, response_format={"type": "json_object"})
        assert engine.asked[-1][1].schema == '{"type": "object"}'
