"""Answers kept within a JSON schema, on the transformers engine; `test_vllm` has the same for vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.prompt.segments import Prompt, Segment
from tests.models import tiny_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "kind": {"enum": ["cat", "dog"]},
        "toys": {"type": "array", "maxItems": 2, "items": {"type": "string", "maxLength": 8}},
    },
    "required": ["name", "kind", "toys"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersEngine]:
    with TransformersEngine(tiny_model("llama", tmp_path_factory.mktemp("llama")), device="cpu") as engine:
        yield engine


def prompt(engine: TransformersEngine, text: str = "What is the cat called?") -> Prompt:
    return Prompt("ada", (Segment(tuple(engine.tokenizer(text)["input_ids"])),))


def assert_is_a_pet(text: str) -> None:
    pet = json.loads(text)
    assert list(pet) == ["name", "kind", "toys"], "in the order of the schema"
    assert 1 <= len(pet["name"]) <= 12
    assert pet["kind"] in ("cat", "dog")
    assert len(pet["toys"]) <= 2
    assert all(len(toy) <= 8 for toy in pet["toys"])


def test_a_greedy_answer_is_of_the_schema(engine: TransformersEngine) -> None:
    answer = engine.generate(prompt(engine), SamplingOptions(max_tokens=200, json_schema=SCHEMA))
    assert_is_a_pet(answer.text)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("seed", range(4))
def test_a_sampled_answer_is_of_the_schema(engine: TransformersEngine, seed: int) -> None:
    options = SamplingOptions(max_tokens=200, temperature=1.5, seed=seed, json_schema=SCHEMA)
    assert_is_a_pet(engine.generate(prompt(engine), options).text)


def test_an_answer_that_is_cut_off_says_so(engine: TransformersEngine) -> None:
    answer = engine.generate(prompt(engine), SamplingOptions(max_tokens=5, json_schema=SCHEMA))
    assert answer.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.text)


def test_the_next_answer_is_free_again(engine: TransformersEngine) -> None:
    free = SamplingOptions(max_tokens=12)
    before = engine.generate(prompt(engine), free)
    engine.generate(prompt(engine), SamplingOptions(max_tokens=200, json_schema=SCHEMA))
    assert engine.generate(prompt(engine), free).token_ids == before.token_ids


def test_a_schema_wins_over_going_on_past_the_end(engine: TransformersEngine) -> None:
    options = SamplingOptions(max_tokens=300, ignore_eos=True, json_schema=SCHEMA)
    assert_is_a_pet(engine.generate(prompt(engine), options).text)


def test_logprobs_are_those_of_the_model(engine: TransformersEngine) -> None:
    """As vLLM has it: before anything was forbidden."""
    answer = engine.generate(prompt(engine), SamplingOptions(max_tokens=3, logprobs=2, json_schema=SCHEMA))
    free = engine.generate(prompt(engine), SamplingOptions(max_tokens=1, logprobs=2))
    assert answer.logprobs is not None
    assert free.logprobs is not None
    assert free.logprobs[0].items() <= answer.logprobs[0].items()


def test_pieces_of_a_stream_make_up_the_json(engine: TransformersEngine) -> None:
    options = SamplingOptions(max_tokens=200, json_schema=SCHEMA)
    assert_is_a_pet("".join(chunk.text for chunk in engine.stream(prompt(engine), options)))


def test_options_with_a_schema_can_be_hashed_and_are_not_changed_from_outside() -> None:
    mine = {"type": "object"}
    options = SamplingOptions(json_schema=mine)
    mine["type"] = "array"
    assert options == SamplingOptions(json_schema='{"type": "object"}')
    assert hash(options) == hash(SamplingOptions(json_schema={"type": "object"}))
    assert options.schema == '{"type": "object"}'
    assert SamplingOptions().schema is None


@pytest.mark.parametrize("schema", ["{", "[]", "7", {"type": object()}])
def test_what_is_no_schema_is_refused_at_once(schema: Any) -> None:
    with pytest.raises(ConfigurationError, match="pass a JSON schema"):
        SamplingOptions(json_schema=schema)


def test_without_xgrammar_the_error_says_what_to_install(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigurationError, match=r"inferscale-memory\[json\]"):
        engine.generate(prompt(engine), SamplingOptions(json_schema=SCHEMA))
    assert engine.generate(prompt(engine), SamplingOptions(max_tokens=2)).text is not None
