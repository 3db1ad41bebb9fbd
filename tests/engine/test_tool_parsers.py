"""vLLM's own tool parsers behind our `CallReader`. No engine is started: a parser reads text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from inferscale_memory.engine.tool_parsers import call_reader
from inferscale_memory.engine.vllm import VLLMEngine
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.prompt.tools import read_tools
from tests.models import tiny_model

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = read_tools([{"name": "weather", "parameters": CITY}])
PYTHONIC = '[weather(city="Porto"), sing(song="Fado")]'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(model))


def test_calls_that_are_no_json_are_read(tokenizer: Any) -> None:
    said = call_reader("pythonic", tokenizer)(PYTHONIC, TOOLS)
    assert [(call.name, call.arguments) for call in said.calls] == [
        ("weather", {"city": "Porto"}),
        ("sing", {"song": "Fado"}),
    ]
    assert [call.error for call in said.calls] == [None, "there is no such tool"]


def test_words_stay_words_and_a_reader_keeps_nothing(tokenizer: Any) -> None:
    read = call_reader("pythonic", tokenizer)
    for _ in range(2):
        assert read("It rains.", TOOLS).text == "It rains."
        assert read("It rains.", TOOLS).calls == ()
        assert len(read(PYTHONIC, TOOLS).calls) == 2


def test_an_engine_knows_its_parser_before_it_starts(model: Path) -> None:
    engine = VLLMEngine(model, tool_parser="pythonic")
    assert engine.call_reader is not None
    assert engine.call_reader(PYTHONIC, TOOLS).calls
    assert VLLMEngine(model).call_reader is None
    with pytest.raises(ConfigurationError, match=r"no tool parser 'sonnet': choose one of .*hermes"):
        VLLMEngine(model, tool_parser="sonnet")
