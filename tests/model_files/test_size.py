"""How many parameters a model has is read from its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferscale_memory import fetch
from inferscale_memory.model_files.size import parameters
from tests.models import tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path / "model")


def test_it_is_what_the_loaded_model_has(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert parameters(model) == sum(parameter.numel() for parameter in loaded.parameters())


def test_of_a_quantized_model_it_cannot_be_told(model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"bits": 4}}))
    assert parameters(model) is None


@pytest.mark.parametrize("broken", ["no folder", "no weights", "no header"])
def test_what_says_nothing_is_not_guessed(model: Path, broken: str) -> None:
    weights = list(model.glob("*.safetensors"))
    if broken == "no folder":
        model = model / "none"
    for file in weights if broken != "no folder" else ():
        file.unlink() if broken == "no weights" else file.write_bytes(b"{}")
    assert parameters(model) is None


@pytest.mark.engine
def test_of_the_demo_model_it_is_known_before_it_is_fetched() -> None:
    assert parameters(fetch.demo_model()) == fetch.DEMO_PARAMETERS
