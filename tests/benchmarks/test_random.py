"""Random weights of known shapes: what is published, what a stand-in for a prefix cache must not change, and that torch
and transformers are enough."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.random_memory import RandomMemory
from benchmarks.random_model import SHAPES, RandomEngine, shape_config, weight_bytes
from inferscale_memory.commands.demo.conversations import load
from inferscale_memory.commands.demo.copying import row_bytes
from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.prompt import Prompt, Segment
from tests.benchmarks.meaning import of, times_to_first_token
from tests.benchmarks.talks import SAID, talk_file

THREE = SamplingOptions(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    with RandomEngine("tiny", SAID, dtype="float32", device="cpu", prefix_bytes=1 << 24) as engine:
        yield engine


@pytest.mark.parametrize(
    ("shape", "billions", "bytes_per_token"),
    [
        ("llama-3.1-8b", 8.03, 131_072),
        ("mistral-7b", 7.25, 131_072),
        ("qwen2.5-7b", 7.62, 57_344),
        ("qwen3-14b", 14.77, 163_840),
    ],
)
def test_a_shape_has_the_published_size(shape: str, billions: float, bytes_per_token: int) -> None:
    config = shape_config(shape)
    assert weight_bytes(shape, "bfloat16") / 2e9 == pytest.approx(billions, abs=0.01)
    assert row_bytes(config, "bfloat16") == row_bytes(config, "auto") == bytes_per_token


def test_llama_has_its_own_rotation() -> None:
    rotation = shape_config("llama-3.1-8b").rope_parameters
    assert (rotation["rope_type"], rotation["rope_theta"], rotation["factor"]) == ("llama3", 500_000.0, 8.0)


def test_a_shape_that_does_not_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"no shape is called 'llama'.*llama-3\.1-8b"):
        RandomEngine("llama", SAID)
    with pytest.raises(ConfigurationError, match="dtype='int8' is unknown"):
        RandomEngine("tiny", SAID, dtype="int8")
    assert "tiny" in SHAPES


def test_a_hit_answers_as_the_prefill_did(engine: RandomEngine) -> None:
    ids = tuple(engine.tokenizer(" ".join(SAID))["input_ids"])
    asked = Prompt("user:ada", (Segment(ids),), "a salt")
    first, again = engine.generate(asked, THREE), engine.generate(asked, THREE)
    assert (first.cached_tokens, first.prefilled_tokens) == (0, len(ids))
    assert again.cached_tokens == (len(ids) - 1) // 16 * 16
    assert again.cached_tokens + again.prefilled_tokens == len(ids)
    assert again.token_ids == first.token_ids
    assert engine.generate(asked.salted("another"), THREE).cached_tokens == 0
    other = Prompt("user:ben", asked.segments, "a salt")
    assert engine.generate(other, THREE).cached_tokens == 0


def test_only_what_two_prompts_begin_with_is_hit(engine: RandomEngine) -> None:
    ids = tuple(engine.tokenizer(" ".join(SAID))["input_ids"])
    changed = (*ids[:40], (ids[40] + 1) % 500 + 2, *ids[41:])
    engine.generate(Prompt("user:ada", (Segment(ids),), "begins"), THREE)
    done = engine.generate(Prompt("user:ada", (Segment(changed),), "begins"), THREE)
    assert done.cached_tokens == 32
    assert (
        done.token_ids == engine.generate(Prompt("user:ada", (Segment(changed),), "alone"), THREE).token_ids
    )


def test_what_was_injected_is_hit_by_nobody(engine: RandomEngine, tmp_path: Path) -> None:
    memory = RandomMemory(engine)
    [user, _] = load(talk_file(tmp_path))
    memory.write("ada", user.sessions[0])
    memory.flush()
    prepared = memory.prepare("What is the cat called?", user_id="ada", top_k=3, max_tokens=3)
    injected = engine.generate(prepared.prompt.salted("mixed"), THREE)
    assert injected.injected_tokens > 0
    assert engine.generate(prepared.prompt.as_text().salted("mixed"), THREE).cached_tokens == 0


def test_a_question_recalls_the_same_facts_and_what_is_not_encoded_is_text(
    engine: RandomEngine, tmp_path: Path
) -> None:
    memory = RandomMemory(engine)
    [user, _] = load(talk_file(tmp_path))
    memory.write("ada", user.sessions[0])
    before = memory.prepare("Who marries?", user_id="ada", top_k=4, max_tokens=3)
    memory.flush()
    after = memory.prepare("Who marries?", user_id="ada", top_k=4, max_tokens=3)
    assert before.memories == after.memories
    assert before.prompt.ids == after.prompt.ids
    assert not before.prompt.composition
    assert len(after.prompt.composition) == 5, "the preamble and four facts"
    assert len(memory.prepare("Who marries?", user_id="ada", top_k=99, max_tokens=3).memories) == len(SAID)
    assert memory.prepare("Who marries?", user_id="nobody", top_k=4, max_tokens=3).memories == ()


BLOCKED = """
import socket, sys
for name in ("mem0", "vllm", "sentence_transformers", "faiss", "xgrammar", "qdrant_client", "openai"):
    sys.modules[name] = None
def connect(*_): raise OSError("no network here")
socket.socket.connect = connect
from inferscale_memory import cli
sys.exit(cli.main(["bench", *sys.argv[1:]]))
"""


def test_torch_and_transformers_are_enough(tmp_path: Path) -> None:
    """Both programs, with everything else that could be missing missing."""
    data = str(talk_file(tmp_path))
    common = ["--random", "tiny", "--data", data, "--json"]
    programs = {
        "ttft": ["--k", "2", "4", "--repeat", "2"],
        "throughput": ["--users", "1", "3", "--facts", "6", "--k", "3", "--rounds", "2", "--writes", "200"],
    }
    reports = {}
    for name, options in programs.items():
        path = tmp_path / f"{name}.json"
        done = subprocess.run(
            [sys.executable, "-c", BLOCKED, name, *common, str(path), *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr
        assert "embedding is not counted" in done.stdout
        reports[name] = json.loads(path.read_text())
        assert reports[name]["about"]["random"] is True
    assert all(row["embed_ms"] == 0 for row in reports["ttft"]["rows"])
    times_to_first_token(reports["ttft"], repeat=2, ks=(2, 4), host=False, cache=True)
    rows = reports["throughput"]["rows"]
    assert {row["users"] for row in rows} == {1, 3}
    assert all(row["injected_tokens"] > 0 for row in of(rows, "injected"))
    assert all(row["injected_tokens"] == 0 for row in of(rows, "text"))
    assert sum(row["written"] for row in rows) > 0
