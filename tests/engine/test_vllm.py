"""VLLMEngine: vLLM's core in a process of its own, driven from threads, tasks and scripts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import jsonschema
import pytest

from inferscale_memory.engine.base import Completion, EncodeRequest, Engine, SamplingOptions, Span
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.engine.vllm import VLLMEngine
from inferscale_memory.errors import ConfigurationError, EngineError, PromptError
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from tests.engine.test_json import SCHEMA, assert_is_a_pet
from tests.engine.test_schemas import SCHEMAS
from tests.memory.test_exit import ended, remembered
from tests.models import VOCAB, tiny_model

pytestmark = pytest.mark.engine

EXACT = 1e-4
OPTIONS = SamplingOptions(max_tokens=8, logprobs=20, ignore_eos=True)
SETTINGS = {"dtype": "float32", "max_model_len": 2048, "block_size": 32, "num_gpu_blocks_override": 300}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    home = tmp_path_factory.mktemp("home")
    with VLLMEngine(model, enforce_eager=True, home=home, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(model: Path) -> Iterator[TransformersEngine]:
    with TransformersEngine(model, device="cpu", dtype="float32") as oracle:
        yield oracle


def words(count: int, seed: int) -> tuple[int, ...]:
    return tuple(8 + (seed * 7919 + i * (31 + 2 * seed)) % (VOCAB - 8) for i in range(count))


def remember(engine: Engine, owner: str, count: int = 6, seed: int = 1) -> Prompt:
    """A prompt whose facts were encoded after everything before them: injected, it is exact."""
    preamble = words(17, 500)
    facts = [words(9 + 5 * i, seed * 100 + i) for i in range(count)]
    ids, spans = preamble, []
    for fact in facts:
        spans.append(Span(len(ids), len(ids) + len(fact)))
        ids += fact
    head, rest = engine.encode(
        [
            EncodeRequest(PUBLIC_OWNER, preamble, (Span(0, 17),)),
            EncodeRequest(
                owner, ids, tuple(spans), tuple((f"fact{i}", s.start) for i, s in enumerate(spans))
            ),
        ]
    )
    assert head.error is None
    assert rest.error is None
    segments = [Segment(preamble, head.refs[0].key)]
    segments += [
        Segment(fact, ref.key, f"fact{i}") for i, (fact, ref) in enumerate(zip(facts, rest.refs, strict=True))
    ]
    return Prompt(owner, (*segments, Segment(words(13, seed * 100 + 99))))


def differs(left: Completion, right: Completion) -> float:
    assert left.logprobs is not None
    assert right.logprobs is not None
    return max(
        abs(a[token] - b[token])
        for a, b in zip(left.logprobs, right.logprobs, strict=True)
        for token in a.keys() & b.keys()
    )


def length(prompt: Prompt) -> int:
    return sum(len(segment.ids) for segment in prompt.composition)


def test_it_is_an_engine(engine: VLLMEngine) -> None:
    assert isinstance(engine, Engine)
    assert engine.unsupported is None
    assert engine.max_model_len == 2048
    assert len(engine.fingerprint) == 32


def test_injected_memories_give_the_text_paths_answer(engine: VLLMEngine) -> None:
    prompt = remember(engine, "alice")
    injected = engine.generate(prompt, OPTIONS)
    text = engine.generate(prompt.as_text(), OPTIONS)
    assert injected.injected_tokens == length(prompt)
    assert injected.prefilled_tokens == 13
    assert injected.compose_s > 0
    assert injected.refused is None
    assert text.injected_tokens == 0
    assert text.prefilled_tokens == len(prompt.ids)
    assert injected.token_ids == text.token_ids
    assert injected.text == text.text
    assert differs(injected, text) <= EXACT


def test_the_counts_add_up_when_the_prefix_cache_is_hit(engine: VLLMEngine) -> None:
    prompt = remember(engine, "alice", seed=2).salted("twice")
    engine.generate(prompt, OPTIONS)
    again = engine.generate(prompt, OPTIONS)
    assert again.cached_tokens == len(prompt.ids) // 32 * 32
    assert again.injected_tokens + again.cached_tokens + again.prefilled_tokens == len(prompt.ids)
    assert again.refused is None


def test_a_stream_is_the_answer_in_pieces(engine: VLLMEngine) -> None:
    prompt = remember(engine, "alice", seed=3)
    whole = engine.generate(prompt, OPTIONS)
    chunks = list(engine.stream(prompt, OPTIONS))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [t for chunk in chunks for t in chunk.token_ids] == list(whole.token_ids)
    assert [chunk.completion is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) > 2


def test_a_stream_that_is_left_ends_its_request(engine: VLLMEngine) -> None:
    prompt = remember(engine, "alice", seed=3)
    long = SamplingOptions(max_tokens=1500, ignore_eos=True)
    for _ in engine.stream(prompt, long):
        break
    assert engine.generate(prompt, OPTIONS).finish_reason == "length"


def test_the_async_face_is_the_sync_one(engine: VLLMEngine) -> None:
    prompt = remember(engine, "alice", seed=4)
    expected = engine.generate(prompt, OPTIONS)

    async def work() -> tuple[list[Completion], list[str], set[str]]:
        answers = await asyncio.gather(*(engine.agenerate(prompt, OPTIONS) for _ in range(8)))
        pieces = [chunk.text async for chunk in engine.astream(prompt, OPTIONS)]
        keys = [segment.key for segment in prompt.composition if segment.key]
        return answers, pieces, await engine.aat_hand("alice", keys)

    answers, pieces, at_hand = asyncio.run(work())
    assert all(answer.token_ids == expected.token_ids for answer in answers)
    assert "".join(pieces) == expected.text
    assert at_hand == {segment.key for segment in prompt.composition}


def test_calls_from_many_threads_are_all_right(engine: VLLMEngine) -> None:
    prompts = [remember(engine, f"owner{i}", count=3 + i % 4, seed=10 + i) for i in range(8)]
    expected = [engine.generate(prompt.as_text(), OPTIONS) for prompt in prompts]

    def one(number: int) -> float:
        answer = engine.generate(prompts[number % 8].salted(f"t{number}"), OPTIONS)
        assert answer.injected_tokens == length(prompts[number % 8])
        assert answer.token_ids == expected[number % 8].token_ids
        return differs(answer, expected[number % 8])

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(one, range(48))) <= EXACT


def test_what_is_stored_is_known_to_its_owner_only_and_can_be_forgotten(engine: VLLMEngine) -> None:
    prompt = remember(engine, "alice", seed=5)
    keys = [segment.key for segment in prompt.composition if segment.key]
    assert engine.at_hand("alice", [*keys, "0" * 40]) == set(keys)
    assert engine.at_hand("bob", keys) == {keys[0]}
    assert engine.forget("bob", keys[1:2]) == 0
    assert engine.forget("alice", keys[1:2], ["fact0"]) == 1
    assert engine.at_hand("alice", keys) == set(keys) - {keys[1]}
    answer = engine.generate(prompt, OPTIONS)
    assert answer.injected_tokens == 17
    assert answer.refused == "1 blobs are not at hand"
    assert answer.token_ids == engine.generate(prompt.as_text(), OPTIONS).token_ids


def test_sampling_options_are_vllms(engine: VLLMEngine) -> None:
    prompt = Prompt("alice", (Segment(words(30, 7)),))
    seeded = SamplingOptions(max_tokens=12, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
    assert engine.generate(prompt, seeded).token_ids == engine.generate(prompt, seeded).token_ids
    free = engine.generate(prompt, SamplingOptions(max_tokens=12, ignore_eos=True))
    stop = free.text[len(free.text) // 2]
    stopped = engine.generate(prompt, SamplingOptions(max_tokens=12, ignore_eos=True, stop=(stop,)))
    assert stop not in stopped.text
    assert free.text.startswith(stopped.text)
    assert stopped.finish_reason == "stop"


def test_json_of_a_schema_beside_injected_facts(engine: VLLMEngine) -> None:
    prompt = remember(engine, "alice", seed=8)
    options = SamplingOptions(max_tokens=200, temperature=1.0, seed=3, json_schema=SCHEMA)
    answer = engine.generate(prompt, options)
    assert answer.injected_tokens == length(prompt)
    assert_is_a_pet(answer.text)
    assert answer.finish_reason == "stop"
    short = engine.generate(prompt, SamplingOptions(max_tokens=5, json_schema=SCHEMA))
    assert short.finish_reason == "length"


def test_json_and_free_answers_of_many_threads_do_not_mix(engine: VLLMEngine) -> None:
    # Words, as vLLM's detokenizer begins an answer with what no text of a prompt ends in.
    prompt = Prompt("alice", (Segment(tuple(engine.tokenizer("What is the cat called?")["input_ids"])),))
    free = engine.generate(prompt, OPTIONS).token_ids

    def one(number: int) -> None:
        if number % 2:
            options = SamplingOptions(max_tokens=200, temperature=1.0, seed=number, json_schema=SCHEMA)
            assert_is_a_pet(engine.generate(prompt, options).text)
        else:
            assert engine.generate(prompt, OPTIONS).token_ids == free

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(16)))


@pytest.mark.parametrize("name", [name for name in SCHEMAS if not name.startswith("the format")])
def test_answers_within_a_schema_are_valid_on_both_engines(
    engine: VLLMEngine, oracle: TransformersEngine, name: str
) -> None:
    """Valid, not equal: vLLM's grammar puts no space behind a comma, the other engine's puts one."""
    prompt = Prompt("alice", (Segment(tuple(engine.tokenizer("What is the cat called?")["input_ids"])),))
    options = SamplingOptions(max_tokens=200, json_schema=SCHEMAS[name])
    answers = [engine.generate(prompt, options), oracle.generate(prompt, options)]
    sampled = [engine.generate(prompt, replace(options, temperature=1.5, seed=seed)) for seed in range(3)]
    for one in (*answers, *sampled):
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), SCHEMAS[name])


def test_an_option_that_this_engine_refuses_is_named_and_the_next_request_served(engine: VLLMEngine) -> None:
    prompt = Prompt("alice", (Segment(words(30, 7)),))
    for logprobs in (1000, -1):
        with pytest.raises(ConfigurationError, match="max_logprobs"):
            engine.generate(prompt, SamplingOptions(logprobs=logprobs))
    assert len(engine.generate(prompt, replace(OPTIONS, seed=-1, stop=("never",) * 64)).token_ids) == 8


def test_what_fails_inside_vllm_says_what(engine: VLLMEngine) -> None:
    """vLLM wraps it in an error without a message."""
    prompt = Prompt("alice", (Segment(words(30, 7)),)).salted("x")
    options = SamplingOptions(max_tokens=3)
    object.__setattr__(options, "logprobs", 1000)  # past our own check
    engine._started().most_logprobs = None
    with pytest.raises(ConfigurationError, match="logprobs"):
        engine.generate(prompt, options)
    engine._started().most_logprobs = 20


def test_most_tokens_are_an_upper_bound(engine: VLLMEngine) -> None:
    prompt = Prompt("alice", (Segment(words(2040, 1)),))
    answer = engine.generate(prompt, SamplingOptions(max_tokens=2**70, ignore_eos=True))
    assert (len(answer.token_ids), answer.finish_reason) == (8, "length")


def test_an_answer_that_nobody_waits_for_is_given_up(engine: VLLMEngine) -> None:
    prompt, long = (
        Prompt("alice", (Segment(words(30, 7)),)),
        SamplingOptions(max_tokens=2000, ignore_eos=True),
    )

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.agenerate(prompt, long), 0.3)
        async for _ in engine.astream(prompt, long):
            break

    asyncio.run(impatient())
    unfinished = engine._started()._llm.output_processor
    deadline = time.monotonic() + 30
    while unfinished.get_num_unfinished_requests() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not unfinished.get_num_unfinished_requests()


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ((), "empty"),
        ((Segment(words(2048, 1)),), "2048"),
        ((Segment((5, VOCAB + 7)),), "vocabulary"),
    ],
)
def test_a_prompt_that_cannot_be_served_says_why(
    engine: VLLMEngine, segments: tuple[Segment, ...], reason: str
) -> None:
    with pytest.raises(PromptError, match=reason):
        engine.generate(Prompt("alice", segments))


def test_an_encode_that_does_not_fit_says_why(engine: VLLMEngine) -> None:
    results = engine.encode(
        [
            EncodeRequest("alice", words(3000, 1), (Span(0, 3000),)),
            EncodeRequest("alice", words(30, 1), (Span(10, 40),)),
            EncodeRequest("alice", words(30, 1), (Span(10, 30),)),
        ]
    )
    assert "fit" in str(results[0].error)
    assert "30 tokens" in str(results[1].error)
    assert results[2].error is None


def test_a_folder_that_is_none_and_a_dtype_that_is_none_are_refused_at_once(
    tmp_path: Path, model: Path
) -> None:
    with pytest.raises(ConfigurationError, match="folder"):
        VLLMEngine(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="float32"):
        VLLMEngine(model, dtype="float13")


def test_a_closed_engine_says_so(model: Path, tmp_path: Path) -> None:
    engine = VLLMEngine(model, home=tmp_path)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(Prompt("alice", (Segment((5,)),)))


def test_vllm_that_cannot_start_says_where_to_look(model: Path, tmp_path: Path) -> None:
    engine = VLLMEngine(model, home=tmp_path, max_model_len=10**9)
    with pytest.raises(EngineError, match="doctor"):
        engine.start()


def test_a_compiled_engine_injects_and_encodes(model: Path, tmp_path: Path) -> None:
    """The step of an encode runs uncompiled, all others compiled."""
    with VLLMEngine(model, enforce_eager=False, home=tmp_path, **SETTINGS) as engine:
        assert engine.unsupported is None
        prompt = remember(engine, "alice")
        injected = engine.generate(prompt, OPTIONS)
        text = engine.generate(prompt.as_text(), OPTIONS)
        assert injected.injected_tokens == length(prompt)
        assert injected.token_ids == text.token_ids
        assert differs(injected, text) <= EXACT


def test_a_script_needs_no_main_guard(model: Path, tmp_path: Path) -> None:
    """vLLM's processes are spawned; without care each would run the user's script again."""
    script = tmp_path / "app.py"
    script.write_text(
        dedent(f"""
        print("once")
        from inferscale_memory.engine.vllm import VLLMEngine
        from inferscale_memory.prompt.segments import Prompt, Segment
        options = dict(dtype="float32", max_model_len=256, enforce_eager=True)
        engine = VLLMEngine({str(model)!r}, home={str(tmp_path)!r}, **options)
        print(len(engine.generate(Prompt("alice", (Segment((5, 6, 7)),))).token_ids))
        engine.close()
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[0] == "once"
    assert done.stdout.count("once") == 1


def test_a_program_that_ends_without_closing_ends_with_its_own_status(model: Path, tmp_path: Path) -> None:
    engine = {"provider": "vllm", "model": str(model), "enforce_eager": True, **SETTINGS}
    program = ended(tmp_path / "programs", engine, "exit")["exit"]
    assert program.status == 3, program.err[-2000:]
    assert program.loud == []
    assert len(remembered(program.folder)) == 9
