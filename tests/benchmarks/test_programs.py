"""The programs that measure time, on both engines with a tiny model: each row is what it says, and what is compared is
comparable. Nothing is asserted about how fast anything is."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from mem0.utils.factory import EmbedderFactory

from benchmarks import chat, encoding, throughput, ttft
from benchmarks.place import Place
from benchmarks.reporting import percentiles, ratio, spread
from benchmarks.watched import Watched
from inferscale_memory.commands.demo.copying import PlainCopy, row_bytes
from inferscale_memory.engine.base import EncodeRequest, Span
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.errors import EngineError
from inferscale_memory.prompt import Prompt, Segment
from tests.benchmarks.meaning import of, times_to_first_token
from tests.benchmarks.talks import place, talk_file
from tests.memory.hashing import HashingEmbedder
from tests.models import tiny_model

DEVICE_TOKENS, HOST_TOKENS = 4096, 16384
Opens = Callable[..., AbstractContextManager[Place]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(autouse=True)
def _hashing_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    names = EmbedderFactory.provider_to_class
    monkeypatch.setitem(names, "huggingface", "tests.memory.hashing.HashingEmbedder")


@pytest.fixture(scope="module")
def transformers_engine(model: Path) -> Iterator[TransformersEngine]:
    with TransformersEngine(model, device="cpu", blob_bytes=1 << 26) as engine:
        yield engine


@pytest.fixture
def opens(transformers_engine: TransformersEngine, model: Path, tmp_path: Path) -> Opens:
    tokens = (1 << 26) // row_bytes(model, "float32")
    return partial(place, transformers_engine, model, tmp_path / "place", device_tokens=tokens)


@pytest.fixture(scope="module")
def vllm_engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from inferscale_memory.engine.vllm import VLLMEngine

    engine = VLLMEngine(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        block_size=32,
        num_gpu_blocks_override=1024,
        device_bytes=DEVICE_TOKENS * row_bytes(model, "float32"),
        host_bytes=HOST_TOKENS * row_bytes(model, "float32"),
        home=tmp_path_factory.mktemp("home"),
    )
    with engine:
        yield engine.start()


@pytest.fixture
def opens_vllm(vllm_engine: Any, model: Path, tmp_path: Path) -> Opens:
    return partial(
        place, vllm_engine, model, tmp_path / "place", device_tokens=DEVICE_TOKENS, host_tokens=HOST_TOKENS
    )


def measured_ttft(opens: Opens, *, host: bool, cache: bool) -> None:
    with opens() as here:
        report = ttft.run(here, [4, 2], 2, copy=PlainCopy("cpu", cold_bytes=1 << 22))
    times_to_first_token(report, repeat=2, ks=(2, 4), host=host, cache=cache)
    assert all(row["embed_ms"] > 0 for row in report["rows"] if row["path"] != "none")
    json.dumps(report)
    report["about"] = {"note": ""}
    ttft.show(report)


def measured_throughput(opens: Opens, *, cache: bool) -> None:
    options = argparse.Namespace(
        users=[3, 1], facts=6, k=3, questions=2, rounds=2, max_tokens=3, writes=200.0
    )
    with opens(asynchronous=True) as here:
        report = asyncio.run(throughput.run(here, options))
    rows = report["rows"]
    assert len(rows) == 2 * 2 * len(throughput.PATHS)
    assert all(row["requests"] == 2 * row["users"] for row in rows)
    assert all(row["requests_per_s"] == pytest.approx(row["requests"] / row["seconds"]) for row in rows)
    assert all(row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"] for row in rows)
    assert all(row["injected_tokens"] > row["prefilled_tokens"] for row in of(rows, "injected"))
    assert all(row["refused"] == 0 for row in rows)
    for path in ("text", "hit", "none"):
        assert all(row["injected_tokens"] == 0 for row in of(rows, path))
    assert all(
        row["prompt_tokens"] < min(r["prompt_tokens"] for r in of(rows, "text")) for row in of(rows, "none")
    )
    if cache:
        assert all(row["cached_tokens"] > row["prefilled_tokens"] for row in of(rows, "hit"))
        assert all(row["cached_tokens"] < row["prefilled_tokens"] for row in of(rows, "text"))
    assert report["room"] == ""
    assert sum(row["written"] for row in rows) == sum(row["written"] for row in report["summary"]) > 0
    assert [row["users"] for row in report["summary"]] == [1] * 4 + [3] * 4
    assert {row["of"] for row in report["ratios"]} == {"requests_per_s", "ttft_p50_ms"}
    json.dumps(report)
    report["about"] = {"note": ""}
    throughput.show(report)


def measured_chat(opens: Opens, *, cache: bool) -> None:
    with opens() as here:
        report = chat.run(here, turns=4, k=3, repeat=2, max_tokens=4)
    rows = report["rows"]
    paths = ["session", "sticky", "recomposed", "text", "recomposed, tools", "text, tools"]
    assert sorted(row["path"] for row in rows) == sorted(paths * 8)
    for path in paths:
        mine = [row["prompt_tokens"] for row in of(rows, path) if row["repetition"] == 0]
        assert mine == sorted(mine) or path == "session", "a conversation grows"
        assert {row["tools"] for row in of(rows, path)} == {"tools" in path}
    for path in ("recomposed", "recomposed, tools"):
        assert all(row["injected_tokens"] + row["cached_tokens"] > 0 for row in of(rows, path))
        assert any(row["injected_tokens"] > 0 for row in of(rows, path))
    assert all(row["injected_tokens"] > 0 for row in of(rows, "sticky") if row["turn"] == 1)
    for path in ("text", "text, tools"):
        assert all(row["injected_tokens"] == 0 for row in of(rows, path))
    first = {row["path"]: row["prompt_tokens"] for row in rows if (row["repetition"], row["turn"]) == (0, 1)}
    assert first["text, tools"] > first["text"]
    assert first["recomposed, tools"] > first["recomposed"] == first["sticky"] == first["session"]
    if cache:
        later = [row for row in of(rows, "sticky") if row["turn"] > 1]
        assert all(row["cached_tokens"] > 0 for row in later), "what was composed is still there"
    json.dumps(report)
    chat.show(report)


def test_ttft(opens: Opens) -> None:
    measured_ttft(opens, host=False, cache=False)


def test_throughput(opens: Opens) -> None:
    measured_throughput(opens, cache=False)


def test_chat(opens: Opens) -> None:
    measured_chat(opens, cache=False)


@pytest.mark.engine
def test_ttft_on_vllm(opens_vllm: Opens) -> None:
    measured_ttft(opens_vllm, host=True, cache=True)


@pytest.mark.engine
def test_throughput_on_vllm(opens_vllm: Opens) -> None:
    measured_throughput(opens_vllm, cache=True)


@pytest.mark.engine
def test_chat_on_vllm(opens_vllm: Opens) -> None:
    measured_chat(opens_vllm, cache=True)


@pytest.mark.engine
def test_a_host_row_that_never_left_the_device_ends_the_benchmark(opens_vllm: Opens) -> None:
    """Somebody else's memories are too few to push anything out: that must not pass for a measurement."""
    with opens_vllm() as here:
        few = replace(here, device_tokens=64)
        with pytest.raises(EngineError, match="have stayed on the device"):
            ttft.run(few, [2], 1, copy=PlainCopy("cpu", cold_bytes=1 << 20))


def test_the_command_writes_json_and_pictures(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`chat`, from its arguments to its files; the others go the same way in `test_random`."""

    class Hashing(HashingEmbedder):
        def embed(self, text: str, memory_action: Any = None) -> list[float]:
            return super().embed(text) + [0.0] * 320

    monkeypatch.setattr("inferscale_memory.mem0_adapter.embedder.LocalEmbedder", Hashing)
    report, plots = tmp_path / "out" / "chat.json", tmp_path / "plots"
    arguments = ["--engine", "transformers", "--model", str(model), "--data", str(talk_file(tmp_path))]
    arguments += ["--json", str(report), "--plots", str(plots), "--turns", "2", "--k", "2", "--repeat", "1"]
    assert chat.main([*arguments, "--max-tokens", "2", "--blob-bytes", str(1 << 26)]) == 0
    assert {row["turn"] for row in json.loads(report.read_text())["rows"]} == {1, 2}
    assert (plots / "chat.png").read_bytes()[:4] == b"\x89PNG"
    page = (plots / "chat.html").read_text()
    assert "<svg" in page
    assert "sticky" in page


# -- parts ---------------------------------------------------------------------------------------------------------


def test_held_encodes_wait_and_preambles_do_not(transformers_engine: TransformersEngine) -> None:
    watched, done = Watched(transformers_engine), []
    with watched.held():
        [public] = watched.encode([EncodeRequest("public", (5, 6, 7), (Span(0, 3),))])
        waiting = Thread(
            target=lambda: done.extend(watched.encode([EncodeRequest("user:ada", (5, 6), (Span(0, 2),))]))
        )
        waiting.start()
        waiting.join(timeout=0.2)
        assert public.refs
        assert not done
    waiting.join()
    assert done[0].refs
    assert [request.owner for batch in watched.encodes for request in batch] == ["user:ada"]


def test_a_salt_is_put_before_a_prompts_own() -> None:
    class Salted:
        def generate(self, prompt: Prompt, options: Any) -> str:
            return prompt.salt

    watched, prompt = Watched(Salted()), Prompt("user:ada", (Segment((1,)),), "own")
    assert watched.generate(prompt) == "own"
    watched.salt = "talk 1"
    assert watched.generate(prompt) == "talk 1 own"


def measured_encoding(opens: Opens) -> None:
    with opens() as here:
        report = encoding.run(here, 5, (6, 9), 2)
        assert not here.memory.get_all(filters={"user_id": "bench-2"})["results"], "the facts are gone"
    assert [row["repetition"] for row in report["rows"]] == [1, 2], "the first round only warms up"
    for row in report["rows"]:
        assert row["encoded_tokens"] > row["prefilled_tokens"], "a line of a fact is its words and more"
        assert row["computed_tokens"] >= row["encoded_tokens"]
        assert row["ratio"] == pytest.approx(row["prefilled_per_s"] / row["encoded_per_s"])
    json.dumps(report)
    encoding.show(report)


def test_encoding_is_measured_in_tokens_a_second(opens: Opens) -> None:
    measured_encoding(opens)


@pytest.mark.engine
def test_encoding_is_measured_on_vllm(opens_vllm: Opens) -> None:
    measured_encoding(opens_vllm)


def test_ratios_are_of_pairs() -> None:
    rows = [
        {"path": path, "repetition": number, "ttft_ms": value}
        for path, values in (("text", [10.0, 40.0, 90.0]), ("injected", [5.0, 10.0, 30.0]))
        for number, value in enumerate(values)
    ]
    found = ratio(rows, "text", "injected", column="ttft_ms", pair=lambda row: row["repetition"])
    assert found is not None
    assert found["median"] == 3.0, "the median of 2, 4 and 3, not the ratio of the medians, 4"
    assert ratio(rows, "text", "host", column="ttft_ms", pair=lambda row: row["repetition"]) is None
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "n": 5}
    assert percentiles([float(value) for value in range(101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_a_plain_copy_grows_with_what_it_is_asked_for() -> None:
    copy = PlainCopy("cpu", cold_bytes=1 << 16)
    assert copy.seconds(10) > 0
    assert copy.seconds(1 << 18) > 0, "more than it had room for"
