"""Extraction on a real vLLM: its prefix cache holds the instructions, and nothing of what was forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.engine.base import Completion, SamplingOptions
from inferscale_memory.engine.vllm import VLLMEngine
from inferscale_memory.extraction import engine_llm as llm
from inferscale_memory.extraction import instructions as extraction
from inferscale_memory.memory import Memory
from inferscale_memory.prompt import Prompt
from tests.memory.saying import ADA, BEN

pytestmark = pytest.mark.engine

BLOCK = 32


class Watched(VLLMEngine):
    """Attributes:
    asked: every prompt that was answered, how, and the answer.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[tuple[Prompt, SamplingOptions, Completion]] = []

    def generate(self, prompt: Prompt, options: SamplingOptions = SamplingOptions()) -> Completion:  # noqa: B008
        completion = super().generate(prompt, options)
        self.asked.append((prompt, options, completion))
        return completion


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    engine = Watched(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        block_size=BLOCK,
        num_gpu_blocks_override=512,
        home=tmp_path_factory.mktemp("home"),
    )
    with engine:
        yield engine


@pytest.fixture
def memory(
    engine: Watched, hashing_embedder: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Memory]:
    monkeypatch.setattr(extraction, "_CHARACTERS", 20)
    monkeypatch.setattr(llm, "MIN_PARAMETERS", 0)
    config = {"embedder": hashing_embedder, "engine": engine, "folder": tmp_path / "memory"}
    with Memory.from_config(config) as memory:
        yield memory


def test_the_instructions_are_read_once_for_all_owners(memory: Memory, engine: Watched) -> None:
    for said, who in (("I like tea", ADA), ("I have a cat", BEN), ("I moved to Porto", ADA)):
        memory.add(said, **who)
    asked = [one for one in engine.asked if one[1].schema is not None]
    fixed = len(asked[0][0].segments[0].ids)
    assert fixed > 500
    for prompt, _, answer in asked:
        assert len(prompt.segments[0].ids) == fixed
        assert answer.injected_tokens + answer.cached_tokens >= fixed
        assert answer.prefilled_tokens <= len(prompt.segments[1].ids)
        json.loads(answer.text)
    assert [answer.cached_tokens > 0 for _, _, answer in asked] == [False, False, True]


def test_what_was_forgotten_is_in_no_cached_block(memory: Memory, engine: Watched) -> None:
    [added] = memory.add("I keep a secret walnut", **ADA, infer=False)["results"]
    memory.flush()
    memory.add("Hello", **ADA)
    prompt, options, _ = next(one for one in reversed(engine.asked) if one[1].schema is not None)
    assert "walnut" in engine.tokenizer.decode(prompt.ids)
    fixed = len(prompt.segments[0].ids)
    whole = engine.generate(prompt, options)
    assert whole.cached_tokens + whole.injected_tokens > fixed, "all of it is cached"
    memory.delete(added["id"])
    again = engine.generate(prompt, options)
    assert again.cached_tokens <= fixed // BLOCK * BLOCK
    assert again.prefilled_tokens >= len(prompt.segments[1].ids)
