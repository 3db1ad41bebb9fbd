"""RemoteEngine against `inferscale serve`: a real vLLM in another process, over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from inferscale_memory.connector import secret
from inferscale_memory.coroutines import run
from inferscale_memory.engine.base import Completion, EncodeRequest, Engine, SamplingOptions, Span
from inferscale_memory.engine.remote import RemoteEngine
from inferscale_memory.errors import ConfigurationError, EngineError, PromptError
from inferscale_memory.model_files.fingerprint import model_fingerprint
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from tests.engine.test_json import SCHEMA, assert_is_a_pet
from tests.engine.test_vllm import EXACT, OPTIONS, differs, length, remember, words
from tests.models import VOCAB, tiny_model
from tests.serving import SETTINGS, Server

pytestmark = pytest.mark.engine

LONG = SamplingOptions(max_tokens=1900, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", autouse=True)
def shared_secret() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(secret.VARIABLE, "a secret of this test")
        yield


@pytest.fixture(scope="module")
def server(model: Path, shared_secret: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(str(model), *SETTINGS, log=tmp_path_factory.mktemp("log") / "server") as server:
        yield server


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[RemoteEngine]:
    with RemoteEngine(server.url) as engine:
        yield engine


def wait_until(true: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def assert_sums(completion: Completion) -> None:
    parts = completion.injected_tokens + completion.cached_tokens + completion.prefilled_tokens
    assert completion.prompt_tokens == parts


# -- what it is ---


def test_it_is_an_engine_and_names_the_model_as_all_engines_do(engine: RemoteEngine, model: Path) -> None:
    assert isinstance(engine, Engine)
    assert engine.unsupported is None
    assert engine.max_model_len == 2048
    assert engine.fingerprint == model_fingerprint(model, dtype="float32")
    assert engine.tokenizer("a cat")["input_ids"]


# -- answers ---


def test_injected_memories_give_the_text_paths_answer(engine: RemoteEngine) -> None:
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
    for answer in (injected, text):
        assert answer.ttft_s > 0
        assert_sums(answer)


def test_what_was_encoded_is_what_is_injected(engine: RemoteEngine) -> None:
    """A fact encoded elsewhere has other keys: were they not used, the answer would be the text path's."""
    fact, context = words(60, 31), words(40, 32)
    [alone] = engine.encode([EncodeRequest("alice", context + fact, (Span(40, 100),))])
    prompt = Prompt("alice", (Segment(fact, alone.refs[0].key), Segment(words(13, 33))))
    injected = engine.generate(prompt, OPTIONS)
    assert injected.injected_tokens == 60
    assert differs(injected, engine.generate(prompt.as_text(), OPTIONS)) > 100 * EXACT


def test_the_counts_add_up_when_the_prefix_cache_is_hit(engine: RemoteEngine) -> None:
    prompt = remember(engine, "alice", seed=2).salted("twice")
    engine.generate(prompt, OPTIONS)
    whole = len(prompt.ids) // 32 * 32
    streamed = list(engine.stream(prompt, OPTIONS))[-1].completion
    assert streamed is not None
    for again in (engine.generate(prompt, OPTIONS), streamed):
        assert again.cached_tokens == whole
        assert again.injected_tokens == max(0, length(prompt) - whole)
        assert again.refused is None
        assert_sums(again)


def test_a_stream_tells_what_was_injected_when_it_ends(engine: RemoteEngine) -> None:
    prompt = remember(engine, "alice", seed=3)
    whole = engine.generate(prompt, OPTIONS)
    *pieces, last = engine.stream(prompt.salted("streamed"), OPTIONS)
    assert all(piece.completion is None for piece in pieces)
    assert last.completion is not None
    assert "".join(chunk.text for chunk in [*pieces, last]) == whole.text == last.completion.text
    assert tuple(t for piece in pieces for t in piece.token_ids) == whole.token_ids
    assert last.completion.injected_tokens == length(prompt)
    assert last.completion.prefilled_tokens == 13
    assert last.completion.compose_s > 0
    assert last.completion.refused is None
    assert differs(last.completion, whole) <= EXACT
    assert last.completion.token_ids == whole.token_ids


def test_a_stream_of_which_nothing_is_known_any_more_claims_nothing(engine: RemoteEngine) -> None:
    reply = run(engine._remote_model()._outcome("alice", "a receipt of nobody's"))
    assert reply == {"refused": "the server cannot say what became of the blobs"}


def test_a_stream_of_text_and_one_with_a_blob_that_is_gone(engine: RemoteEngine) -> None:
    prompt = remember(engine, "alice", seed=4)
    key = prompt.segments[2].key
    assert key is not None
    text = list(engine.stream(prompt.as_text(), OPTIONS))[-1].completion
    assert engine.forget("alice", [key]) == 1
    partly = list(engine.stream(prompt.salted("gone"), OPTIONS))[-1].completion
    assert text is not None
    assert partly is not None
    assert (text.injected_tokens, text.refused) == (0, None)
    assert partly.injected_tokens == sum(len(segment.ids) for segment in prompt.segments[:2])
    assert partly.refused == "1 blobs are not at hand"
    assert partly.token_ids == text.token_ids


def test_the_async_face_on_one_loop_after_another(engine: RemoteEngine) -> None:
    prompt = remember(engine, "alice", seed=5)
    expected = engine.generate(prompt, OPTIONS)
    keys = [segment.key for segment in prompt.composition if segment.key]

    async def work(round_: int) -> None:
        salted = [prompt.salted(f"{round_}.{i}") for i in range(8)]
        answers = await asyncio.gather(*(engine.agenerate(one, OPTIONS) for one in salted))
        chunks = [chunk async for chunk in engine.astream(prompt.salted(f"{round_}s"), OPTIONS)]
        assert all(answer.token_ids == expected.token_ids for answer in answers)
        assert all(answer.injected_tokens == length(prompt) for answer in answers)
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert chunks[-1].completion is not None
        assert chunks[-1].completion.injected_tokens == length(prompt)
        assert await engine.aat_hand("alice", keys) == set(keys)

    for round_ in range(2):
        asyncio.run(work(round_))
    assert asyncio.run(engine.aforget("alice", keys[1:])) == len(keys) - 1


def test_encodes_of_an_event_loop(engine: RemoteEngine) -> None:
    requests = [EncodeRequest("alice", words(20, 600 + i), (Span(5, 20),)) for i in range(100)]
    results = asyncio.run(engine.aencode(requests))
    assert [result.error for result in results] == [None] * 100
    assert results == engine.encode(requests)


def test_calls_from_many_threads_are_all_right(engine: RemoteEngine) -> None:
    prompts = [remember(engine, f"owner{i}", count=3 + i % 4, seed=10 + i) for i in range(4)]
    expected = [engine.generate(prompt.as_text(), OPTIONS) for prompt in prompts]

    def one(number: int) -> float:
        answer = engine.generate(prompts[number % 4].salted(f"t{number}"), OPTIONS)
        assert answer.injected_tokens == length(prompts[number % 4])
        assert answer.token_ids == expected[number % 4].token_ids
        return differs(answer, expected[number % 4])

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(one, range(32))) <= EXACT


def test_sampling_options_are_those_of_all_engines(engine: RemoteEngine) -> None:
    prompt = Prompt("alice", (Segment(words(30, 7)),))
    seeded = SamplingOptions(max_tokens=12, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
    assert engine.generate(prompt, seeded).token_ids == engine.generate(prompt, seeded).token_ids
    free = engine.generate(prompt, SamplingOptions(max_tokens=12, ignore_eos=True))
    assert free.logprobs is None
    stop = free.text[len(free.text) // 2]
    stopped = engine.generate(prompt, SamplingOptions(max_tokens=12, ignore_eos=True, stop=(stop,)))
    assert stop not in stopped.text
    assert free.text.startswith(stopped.text)
    assert stopped.finish_reason == "stop"
    assert free.finish_reason == "length"


def test_special_tokens_are_shown_when_they_are_asked_for(engine: RemoteEngine) -> None:
    prompt = Prompt("alice", (Segment(words(30, 7)),))
    shown = SamplingOptions(max_tokens=300, temperature=1.0, seed=1, ignore_eos=True, special_tokens=True)
    with_them = engine.generate(prompt, shown)
    without = engine.generate(prompt, replace(shown, special_tokens=False))
    special = [token for token in with_them.token_ids if token < 4]
    assert special
    assert with_them.token_ids == without.token_ids
    assert with_them.text.count("<|") == len(special)
    assert "<|" not in without.text


def test_json_of_a_schema_beside_injected_facts(engine: RemoteEngine) -> None:
    prompt = remember(engine, "alice", seed=8)
    options = SamplingOptions(max_tokens=200, temperature=1.0, seed=3, json_schema=SCHEMA)
    answer = engine.generate(prompt, options)
    assert answer.injected_tokens == length(prompt)
    assert_is_a_pet(answer.text)


# -- blobs ---


def test_what_is_stored_is_known_to_its_owner_only_and_can_be_forgotten(engine: RemoteEngine) -> None:
    prompt = remember(engine, "carol", seed=9)
    keys = [segment.key for segment in prompt.composition if segment.key]
    assert engine.at_hand("carol", [*keys, "0" * 40]) == set(keys)
    assert engine.at_hand("bob", keys) == {keys[0]}
    assert engine.forget("bob", keys[1:2]) == 0
    assert engine.forget("carol", keys[1:2], ["fact0"]) == 1
    assert engine.at_hand("carol", keys) == set(keys) - {keys[1]}


def test_an_encode_that_does_not_fit_says_why(engine: RemoteEngine) -> None:
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


# -- what cannot be served ---


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ((), "empty"),
        ((Segment(words(2048, 1)),), "2048"),
        ((Segment((5, VOCAB + 7)),), "vocabulary"),
    ],
)
def test_a_prompt_that_cannot_be_served_says_why(
    engine: RemoteEngine, segments: tuple[Segment, ...], reason: str
) -> None:
    for call in (engine.generate, lambda prompt: list(engine.stream(prompt))):
        with pytest.raises(PromptError, match=reason):
            call(Prompt("alice", segments))


def test_a_request_for_more_tokens_than_fit_ends_where_the_context_does(engine: RemoteEngine) -> None:
    prompt = Prompt("alice", (Segment(words(2040, 1)),))
    answer = engine.generate(prompt, SamplingOptions(max_tokens=10_000, ignore_eos=True))
    assert (len(answer.token_ids), answer.finish_reason) == (8, "length")


def test_options_that_vllm_refuses_are_the_callers_to_change(engine: RemoteEngine) -> None:
    with pytest.raises(ConfigurationError, match="logprobs"):
        engine.generate(Prompt("alice", (Segment(words(9, 1)),)), SamplingOptions(logprobs=1000))


def test_as_many_stop_strings_as_options_hold_are_taken(engine: RemoteEngine) -> None:
    stop = tuple(f"stop {number}" for number in range(64))
    options = SamplingOptions(max_tokens=3, ignore_eos=True, stop=stop, seed=-1)
    assert len(engine.generate(Prompt("alice", (Segment(words(9, 1)),)), options).token_ids) == 3


def test_another_secret_is_refused_with_its_remedy(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(secret.VARIABLE, "another one")
    with RemoteEngine(server.url) as stranger, pytest.raises(EngineError, match=secret.VARIABLE):
        stranger.start()
    monkeypatch.delenv(secret.VARIABLE)
    with RemoteEngine(server.url, home=tmp_path) as nobody, pytest.raises(EngineError, match=secret.VARIABLE):
        nobody.start()
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_refused(server: Server, model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(str(model))
    other.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    other.save_pretrained(tmp_path)
    with (
        RemoteEngine(server.url, tokenizer=tmp_path) as engine,
        pytest.raises(ConfigurationError, match="not that"),
    ):
        _ = engine.tokenizer
    with RemoteEngine(server.url, tokenizer=model) as engine:
        assert len(engine.tokenizer) == VOCAB


def test_a_model_that_is_not_served_is_named(server: Server, model: Path) -> None:
    with (
        RemoteEngine(server.url, model="gpt-9") as engine,
        pytest.raises(ConfigurationError, match=str(model)),
    ):
        engine.start()


# -- ending ---


def test_a_stream_that_is_left_ends_at_the_server(server: Server, engine: RemoteEngine) -> None:
    chunks = engine.stream(Prompt("alice", (Segment(words(30, 1)),)), LONG)
    next(chunks)
    assert wait_until(lambda: server.running() == 1)
    chunks.close()  # type: ignore[attr-defined]
    assert wait_until(lambda: server.running() == 0)


def test_a_cancelled_task_ends_its_request_at_the_server(server: Server, engine: RemoteEngine) -> None:
    async def cancel(call: Callable[[Prompt], object]) -> None:
        task = asyncio.ensure_future(call(Prompt("alice", (Segment(words(30, 2)),))))
        assert await asyncio.to_thread(wait_until, lambda: server.running() == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(wait_until, lambda: server.running() == 0)

    async def streamed(prompt: Prompt) -> None:
        async for _ in engine.astream(prompt, LONG):
            pass

    asyncio.run(cancel(lambda prompt: engine.agenerate(prompt, LONG)))
    asyncio.run(cancel(streamed))


def test_silence_that_lasts_too_long_is_an_error_and_ends_the_request(server: Server) -> None:
    with RemoteEngine(server.url, timeout=1.0) as hasty:
        hasty.start()
        with pytest.raises(EngineError, match="longer timeout"):
            hasty.generate(Prompt("alice", (Segment(words(30, 3)),)), LONG)
    assert wait_until(lambda: server.running() == 0)


def test_a_closed_engine_says_so(server: Server) -> None:
    engine = RemoteEngine(server.url).start()
    asyncio.run(engine.aat_hand("alice", ["0" * 40]))
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(Prompt("alice", (Segment((5,)),)))


# -- other servers, and servers that come and go ---


def test_a_server_that_was_away(model: Path, tmp_path: Path) -> None:
    """Started by us, then by hand with the connector from its entry point, then with another model and without."""
    options = (*SETTINGS, "--api-key", "sesame", "--served-model-name", "m")
    by_hand = ("--kv-transfer-config", '{"kv_connector": "InferScaleConnector", "kv_role": "kv_both"}')
    with Server(str(model), *options, log=tmp_path / "first") as server:
        port, url = server.port, server.url
        with RemoteEngine(url) as stranger, pytest.raises(ConfigurationError, match="api_key"):
            stranger.start()
        engine = RemoteEngine(url, api_key="sesame")
        prompt = remember(engine, "alice")
        keys = [segment.key for segment in prompt.composition if segment.key]
        first = engine.generate(prompt, OPTIONS)
        assert first.injected_tokens == length(prompt)
        assert server.process is not None
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) >= 2
        assert server.stop() == 130
        assert not [process for process in processes if process.is_running() and process.status() != "zombie"]
    assert "a secret of this test" not in server.output()

    with pytest.raises(EngineError, match=f"{url}.*inferscale serve"):
        engine.generate(prompt, OPTIONS)

    with Server(str(model), *options, *by_hand, log=tmp_path / "second", port=port, plain=True):
        again = engine.generate(prompt, OPTIONS)
        assert (again.injected_tokens, again.refused) == (0, f"{len(keys)} blobs are not at hand")
        assert again.token_ids == first.token_ids
        assert engine.at_hand("alice", keys) == set()
        assert remember(engine, "alice") == prompt
        streamed = list(engine.stream(prompt.salted("2"), OPTIONS))[-1].completion
        for answer in (engine.generate(prompt.salted("1"), OPTIONS), streamed):
            assert answer is not None
            assert answer.injected_tokens == length(prompt)
            assert answer.token_ids == first.token_ids
            assert_sums(answer)

    other = tiny_model("llama3", tmp_path / "llama3")
    with Server(str(other), *options, log=tmp_path / "third", port=port, plain=True):
        with RemoteEngine(url, api_key="sesame") as text:
            assert "does not run our connector" in str(text.unsupported)
            assert text.fingerprint != engine.fingerprint
            asked = text.generate(prompt, OPTIONS)
            assert (asked.injected_tokens, asked.cached_tokens) == (0, 0)
            assert len(asked.token_ids) == 8
            assert text.at_hand("alice", keys) == set()
            assert text.forget("alice", keys) == 0
            [result] = text.encode([EncodeRequest(PUBLIC_OWNER, words(20, 1), (Span(0, 20),))])
            assert result.error == text.unsupported
        with pytest.raises(EngineError, match="was restarted"):
            engine.generate(prompt, OPTIONS)
    engine.close()
