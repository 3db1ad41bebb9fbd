"""Injection on transformers: exact where it must be, refused where it may not be, never more than a detour.

The references are written here and share nothing with the engine: keys come out of a plain prefill's cache,
are turned back by the angles of their own positions and forth by those of their new ones, in float64, with
frequencies worked out from the configuration.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from inferscale_memory.engine import transformers as module
from inferscale_memory.engine.base import BlobRef, Completion, EncodeRequest, Engine, SamplingOptions, Span
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.errors import ClosedError, ConfigurationError, EngineError, PromptError
from inferscale_memory.kv.key import blob_key
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from tests.models import FAMILIES, VOCAB, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.engine

OWNER = "alice"
EIGHT = SamplingOptions(max_tokens=8, logprobs=VOCAB, ignore_eos=True)
ONE = SamplingOptions(max_tokens=1, logprobs=VOCAB, ignore_eos=True)
BOUND = 1e-4
"""Largest difference of log-probabilities in float32 that is called equal."""
Ids = tuple[int, ...]


class Subject:
    """A tiny model: the engine under test, and the same weights in a plain transformers model."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.engine = TransformersEngine(folder, device="cpu", **options)

    @cached_property
    def plain(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype="auto")
        if getattr(model.config, "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")
        return model.eval().requires_grad_(False)

    def keep(self, *facts: Ids, context: Ids = (), owner: str = OWNER) -> list[Segment]:
        """One segment per fact; each is encoded after `context` and the facts before it."""
        ids, spans = list(context), []
        for fact in facts:
            spans.append(Span(len(ids), len(ids) + len(fact)))
            ids += fact
        (result,) = self.engine.encode([EncodeRequest(owner, tuple(ids), tuple(spans))])
        assert result.error is None, result.error
        return [Segment(fact, ref.key) for fact, ref in zip(facts, result.refs, strict=True)]

    def logprobs(self, ids: Sequence[int], cache: DynamicCache | None = None) -> torch.Tensor:
        """[len(ids), vocab] of the plain model, in one forward."""
        logits = self.plain(torch.tensor([ids]), past_key_values=cache, use_cache=cache is not None).logits
        return logits[0].double().log_softmax(-1)

    def composed(self, parts: Sequence[tuple[Ids, Ids]], suffix: Ids) -> torch.Tensor:
        """Log-probabilities [vocab] after `suffix` behind the facts of `parts`: (context, fact)s."""
        # A cache without a configuration keeps every position; the model's mask takes care of windows.
        cache, layers = DynamicCache(), self.plain.config.num_hidden_layers
        moved: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(layers)]
        q = 0
        for context, fact in parts:
            prefilled = DynamicCache()
            self.plain(torch.tensor([context + fact]), past_key_values=prefilled)
            for layer in range(layers):
                keys = prefilled.layers[layer].keys[:, :, len(context) :]
                values = prefilled.layers[layer].values[:, :, len(context) :]
                frequencies = inverse_frequencies(self.plain.config, layer)
                before = turn(keys.double(), -frequencies, len(context))
                moved[layer].append((turn(before, frequencies, q).to(keys.dtype), values))
            q += len(fact)
        for layer, pairs in enumerate(moved):
            keys, values = (torch.cat(tensors, dim=2) for tensors in zip(*pairs, strict=True))
            cache.update(keys, values, layer)
        return self.logprobs(suffix, cache)[-1]


def inverse_frequencies(config: Any, layer: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, [head_dim / 2], float64, by the papers' formulas."""
    rope = config.rope_parameters
    if "rope_theta" not in rope:
        rope = rope[config.layer_types[layer]]
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequencies = rope["rope_theta"] ** (-pairs / config.head_dim)
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * frequencies / rope["factor"] + smooth * frequencies
    assert rope["rope_type"] == "default"
    return frequencies


def turn(keys: torch.Tensor, frequencies: torch.Tensor, start: int) -> torch.Tensor:
    """Rotate keys [1, heads, tokens, head_dim] by the angles of positions from `start` on."""
    positions = torch.arange(start, start + keys.shape[2], dtype=torch.float32)
    # [tokens, head_dim / 2]; the product is in float32 in every implementation: it is part of the model.
    angles = (positions[:, None] * frequencies.float()).double()
    x, y = keys.chunk(2, dim=-1)
    return torch.cat(
        (x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()),
        dim=-1,
    )


Zoo = Callable[[str, str], Subject]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by a second one, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    known: dict[tuple[str, str], Subject] = {}

    def subject(family: str, dtype: str) -> Subject:
        if (family, dtype) not in known:
            folder = tmp_path_factory.mktemp(f"{family}-{dtype}")
            known[family, dtype] = Subject(tiny_model(family, folder, dtype))
        return known[family, dtype]

    return subject


@pytest.fixture(params=FAMILIES)
def subject(request: pytest.FixtureRequest, zoo: Zoo) -> Subject:
    """Every family in float32."""
    return zoo(request.param, "float32")


@pytest.fixture
def llama(zoo: Zoo) -> Subject:
    return zoo("llama", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama for tests that need an engine of their own."""
    return tiny_model("llama", tmp_path_factory.mktemp("own"))


def words(seed: int, count: int) -> Ids:
    """Token ids, none of them special."""
    return tuple(random.Random(seed).choices(range(4, VOCAB), k=count))


def table(completion: Completion) -> torch.Tensor:
    """Log-probabilities of a completion as [tokens, vocab]."""
    assert completion.logprobs is not None
    return torch.tensor([[row[token] for token in range(VOCAB)] for row in completion.logprobs]).double()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


SUFFIX = words(99, 20)


def prompt(*segments: Segment, suffix: Ids = SUFFIX, owner: str = OWNER) -> Prompt:
    return Prompt(owner, (*segments, Segment(suffix)))


# -- exactness -----------------------------------------------------------------------------------------------


def test_facts_encoded_with_all_before_them_give_the_plain_prompts_logprobs(subject: Subject) -> None:
    segments = subject.keep(words(1, 40), words(2, 33), words(3, 57), words(4, 1))
    asked = prompt(*segments)
    got = subject.engine.generate(asked, EIGHT)
    assert (got.injected_tokens, got.prefilled_tokens, got.cached_tokens) == (131, 20, 0)
    assert got.refused is None
    # The plain model's own forward over prompt and answer, without any cache.
    reference = subject.logprobs([*asked.ids, *got.token_ids])[len(asked.ids) - 1 : -1]
    assert distance(table(got), reference) <= BOUND
    text = subject.engine.generate(asked.as_text(), EIGHT)
    assert (text.injected_tokens, text.prefilled_tokens, text.compose_s) == (0, 151, 0.0)
    assert text.token_ids == got.token_ids
    assert distance(table(got), table(text)) <= BOUND


def test_encoding_and_prefilling_in_many_chunks_changes_nothing(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PREFILL_CHUNK", 13)
    asked = prompt(*subject.keep(words(5, 70), words(6, 41)))
    got = subject.engine.generate(asked, EIGHT)
    assert got.injected_tokens == 111
    reference = subject.logprobs([*asked.ids, *got.token_ids])[len(asked.ids) - 1 : -1]
    assert distance(table(got), reference) <= BOUND


def test_another_facts_keys_in_the_arena_change_the_logprobs(subject: Subject) -> None:
    """The control: with tests as blind as weights of 0.02 make them, this one fails."""
    right, wrong = words(7, 30), words(8, 30)
    segments = subject.keep(right)
    (other,) = subject.keep(wrong)
    asked = prompt(*segments)
    before = table(subject.engine.generate(asked, ONE))
    blobs = subject.engine._load().place_for_blobs()
    ours, theirs = (blobs.store.get(segment.key) for segment in (segments[0], other))
    kept = blobs.arena.read(ours.rows[0])
    try:
        blobs.arena.write(ours.rows[0], blobs.arena.read(theirs.rows[0]))
        swapped = subject.engine.generate(asked, ONE)
    finally:
        blobs.arena.write(ours.rows[0], kept)
    assert swapped.injected_tokens == 30
    assert distance(table(swapped), before) > 0.1
    assert distance(table(subject.engine.generate(asked, ONE)), before) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [20, 48, 64, 180])
def test_captured_keys_rotated_to_their_own_places_are_the_prefilled_ones_bit_for_bit(
    zoo: Zoo, family: str, dtype: str, tokens: int
) -> None:
    subject = zoo(family, dtype)
    ids = words(9, tokens)
    cut = tokens // 3
    segments = subject.keep(ids[:cut], ids[cut:])
    prefilled = DynamicCache(config=subject.plain.config)
    subject.plain(torch.tensor([ids]), past_key_values=prefilled)
    # All but the last token of a prompt can be injected; here the suffix is that token.
    loaded = subject.engine._load()
    injection = subject.engine._inject(loaded, prompt(*segments, suffix=(4,)), tokens + 1)
    assert injection.tokens == tokens
    windows = getattr(subject.plain.config, "sliding_window", None)
    assert any(layer.is_sliding for layer in prefilled.layers) == (windows is not None)
    for ours, theirs in zip(injection.cache.layers, prefilled.layers, strict=True):
        assert type(ours) is type(theirs) in (DynamicLayer, DynamicSlidingWindowLayer)
        assert ours.get_seq_length() == theirs.get_seq_length() == tokens
        assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        assert ours.keys.dtype == getattr(torch, dtype)
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("p", [0, 1, 17, 63, 130, 700])
def test_a_blob_of_position_p_injected_at_q_is_its_keys_rotated_to_q(subject: Subject, p: int) -> None:
    context, fact, suffix = words(10, p), words(11, 23), words(12, 9)
    (blob,) = subject.keep(fact, context=context)
    for q in (0, 1, 30, 64, 129, 600):
        front = words(13, q)
        before = subject.keep(front) if q else []
        got = subject.engine.generate(prompt(*before, blob, suffix=suffix), ONE)
        assert got.injected_tokens == q + 23
        parts = [((), front), (context, fact)] if q else [(context, fact)]
        assert distance(table(got)[0], subject.composed(parts, suffix)) <= BOUND, f"p={p} q={q}"


def test_rotation_matters(subject: Subject) -> None:
    """The control of the test above: keys left at p are not the keys at q."""
    context, fact, front, suffix = words(10, 60), words(11, 23), words(13, 30), words(12, 9)
    (blob,) = subject.keep(fact, context=context)
    got = table(subject.engine.generate(prompt(*subject.keep(front), blob, suffix=suffix), ONE))[0]
    reference = subject.composed([((), front), (context, fact)], suffix)
    other = subject.composed([((), words(13, 60)), (context, fact)], suffix)
    assert distance(got, reference) <= BOUND < 1e-2 < distance(got, other)


# -- compositions --------------------------------------------------------------------------------------------


def test_any_order_of_blobs_is_what_those_keys_give_in_that_order(subject: Subject) -> None:
    context, facts, suffix = words(20, 12), [words(21, 19), words(22, 40), words(23, 7)], words(24, 5)
    blobs = [subject.keep(fact, context=context)[0] for fact in facts]
    seen = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 0], [2]):
        got = subject.engine.generate(prompt(*(blobs[i] for i in order), suffix=suffix), ONE)
        assert got.injected_tokens == sum(len(facts[i]) for i in order)
        reference = subject.composed([(context, facts[i]) for i in order], suffix)
        assert distance(table(got)[0], reference) <= BOUND
        seen.append(table(got)[0])
    assert distance(seen[0], seen[1]) > 1e-2


def test_one_blob_may_stand_in_several_places(subject: Subject) -> None:
    context, fact, suffix = words(25, 12), words(26, 31), words(27, 5)
    (blob,) = subject.keep(fact, context=context)
    got = subject.engine.generate(prompt(blob, blob, blob, suffix=suffix), ONE)
    assert got.injected_tokens == 93
    assert distance(table(got)[0], subject.composed([(context, fact)] * 3, suffix)) <= BOUND


@pytest.mark.parametrize("k", [0, 1, 50])
def test_k_blobs_behind_a_public_preamble(subject: Subject, k: int) -> None:
    preamble, suffix = words(30, 9), words(31, 14)
    (public,) = subject.keep(preamble, owner=PUBLIC_OWNER)
    facts = [words(100 + i, 5 + i % 7) for i in range(k)]
    blobs = [subject.keep(fact, context=preamble)[0] for fact in facts]
    asked = prompt(public, *blobs, suffix=suffix)
    got = subject.engine.generate(asked, ONE)
    assert got.injected_tokens == 9 + sum(map(len, facts))
    assert (got.compose_s > 0, got.refused) == (True, None)
    parts = [((), preamble), *((preamble, fact) for fact in facts)]
    assert distance(table(got)[0], subject.composed(parts, suffix)) <= BOUND


def test_a_prompt_with_no_blobs_is_text(llama: Subject) -> None:
    got = llama.engine.generate(prompt(), ONE)
    assert (got.injected_tokens, got.prefilled_tokens, got.refused, got.compose_s) == (0, 20, None, 0.0)


def test_one_token_is_left_to_prefill_when_blobs_cover_the_prompt(subject: Subject) -> None:
    segments = subject.keep(words(32, 60), words(33, 21))
    got = subject.engine.generate(Prompt(OWNER, tuple(segments)), EIGHT)
    assert (got.injected_tokens, got.prefilled_tokens, got.prompt_tokens) == (80, 1, 81)
    text = subject.engine.generate(Prompt(OWNER, tuple(segments)).as_text(), EIGHT)
    assert distance(table(got), table(text)) <= BOUND


def test_a_prompt_of_one_token_that_has_a_blob(llama: Subject) -> None:
    segments = llama.keep((77,))
    got = llama.engine.generate(Prompt(OWNER, tuple(segments)), ONE)
    assert (got.injected_tokens, got.prefilled_tokens) == (0, 1)
    assert distance(table(got)[0], llama.logprobs([77])[-1]) <= BOUND


# -- what is refused is prefilled ----------------------------------------------------------------------------


def same_as_text(subject: Subject, asked: Prompt, injected: int, why: str) -> None:
    """`asked` gets `injected` tokens, says `why` not more, and answers as its text does."""
    got, text = subject.engine.generate(asked, ONE), subject.engine.generate(asked.as_text(), ONE)
    assert got.injected_tokens == injected
    assert got.refused is not None
    assert why in got.refused
    assert got.prompt_tokens == len(asked.ids) == got.injected_tokens + got.prefilled_tokens
    assert distance(table(got), table(text)) <= BOUND


def test_another_owners_blob_is_refused(llama: Subject) -> None:
    segments = llama.keep(words(40, 20), owner="bob")
    same_as_text(llama, prompt(*segments), 0, "segment 0")
    assert llama.engine.at_hand(OWNER, [segments[0].key]) == set()
    assert llama.engine.at_hand("bob", [segments[0].key]) == {segments[0].key}


def test_a_foreign_blob_cannot_be_told_from_a_missing_one(llama: Subject) -> None:
    (segment,) = llama.keep(words(40, 20), owner="bob")
    foreign = llama.engine.generate(prompt(segment), ONE).refused
    missing = llama.engine.generate(prompt(Segment(segment.ids, "0" * 40)), ONE).refused
    assert foreign is not None
    assert missing is not None
    assert foreign.replace(str(segment.key), "KEY") == missing.replace("0" * 40, "KEY")


def test_a_public_blob_is_everybodys(llama: Subject) -> None:
    segments = llama.keep(words(41, 20), owner=PUBLIC_OWNER)
    for owner in (OWNER, "bob"):
        assert llama.engine.generate(prompt(*segments, owner=owner), ONE).injected_tokens == 20
        assert llama.engine.at_hand(owner, [segments[0].key, "nonsense"]) == {segments[0].key}


def test_a_blob_is_refused_where_the_prompt_has_other_ids(llama: Subject) -> None:
    first, second, third = llama.keep(words(42, 20), words(43, 20), words(44, 20))
    other = Segment((*second.ids[:-1], 5), second.key)
    same_as_text(llama, prompt(first, other, third), 20, "segment 1")
    shorter = Segment(second.ids[:-1], second.key)
    same_as_text(llama, prompt(first, shorter, third), 20, "other token ids")


def test_what_follows_a_segment_without_a_blob_is_prefilled(llama: Subject) -> None:
    first, second = llama.keep(words(45, 20), words(46, 20))
    got = llama.engine.generate(prompt(first, Segment(words(47, 3)), second), ONE)
    assert (got.injected_tokens, got.refused) == (20, None)


def test_a_forgotten_blob_is_refused(llama: Subject) -> None:
    first, second = llama.keep(words(48, 20), words(49, 20))
    assert llama.engine.forget("bob", [second.key]) == 0
    assert llama.engine.generate(prompt(first, second), ONE).injected_tokens == 40
    assert llama.engine.forget(OWNER, [second.key, second.key, "nonsense"], tags=["tag"]) == 1
    assert llama.engine.at_hand(OWNER, [first.key, second.key]) == {first.key}
    same_as_text(llama, prompt(first, second), 20, str(second.key))
    llama.keep(words(48, 20), words(49, 20))
    assert llama.engine.generate(prompt(first, second), ONE).injected_tokens == 40


def test_a_small_budget_keeps_the_most_recently_used(folder: Path) -> None:
    row = 2 * 3 * 2 * 32 * 4
    subject = Subject(folder, blob_bytes=60 * row + row // 2)
    with subject.engine as engine:
        (a,) = subject.keep(words(50, 25))
        (b,) = subject.keep(words(51, 25))
        assert engine.generate(prompt(a), ONE).injected_tokens == 25
        (c,) = subject.keep(words(52, 30))
        assert engine.at_hand(OWNER, [a.key, b.key, c.key]) == {a.key, c.key}
        same_as_text(subject, prompt(a, b, c), 25, str(b.key))
        reference = subject.composed([((), a.ids), ((), c.ids)], words(99, 20))
        assert distance(table(engine.generate(prompt(a, c), ONE))[0], reference) <= BOUND
        (result,) = engine.encode([EncodeRequest(OWNER, words(53, 61), (Span(0, 61),))])
        assert result.refs == ()
        assert "blob_bytes" in str(result.error)
        assert engine.at_hand(OWNER, [a.key, c.key]) == {a.key, c.key}


# -- encoding ------------------------------------------------------------------------------------------------


def test_the_engine_computes_the_keys_from_what_it_prefilled(folder: Path) -> None:
    ids = words(60, 30)
    with TransformersEngine(folder, device="cpu", secret=b"s") as engine:
        (result,) = engine.encode([EncodeRequest(OWNER, ids, (Span(4, 9), Span(20, 30)))])
        assert result.refs == (
            BlobRef(blob_key(b"s", engine.fingerprint, OWNER, ids[:4], ids[4:9]), 5),
            BlobRef(blob_key(b"s", engine.fingerprint, OWNER, ids[:20], ids[20:]), 10),
        )


def test_what_is_at_hand_is_not_computed_again(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = llama.keep(words(61, 20), words(62, 20))

    def fail(*args: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(llama.engine, "_forward", fail)
    assert llama.keep(words(61, 20), words(62, 20)) == segments


def test_a_failed_forward_leaves_no_blob_and_no_room_taken(
    llama: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama.keep(words(63, 5))
    store = llama.engine._load().place_for_blobs().store
    free, blobs = store.tiers[0].free, len(store)

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llama.engine, "_forward", fail)
    (result,) = llama.engine.encode([EncodeRequest(OWNER, words(64, 20), (Span(0, 20),))])
    assert (result.refs, result.error) == ((), "out of memory")
    assert (store.tiers[0].free, len(store)) == (free, blobs)


@pytest.mark.parametrize(
    ("ids", "spans", "why"),
    [
        ((), (Span(0, 1),), "not empty"),
        (words(1, 5), (), "no spans"),
        (words(1, 5), (Span(0, 6),), "Span"),
        (words(1, 5), (Span(2, 2),), "Span"),
        (words(1, 5), (Span(-1, 2),), "Span"),
        (words(1, 5), (Span(2, 4), Span(3, 5)), "Span"),
        ((4, VOCAB), (Span(0, 2),), "vocabulary"),
        ((4, -1), (Span(0, 2),), "vocabulary"),
        ((4, 2**40), (Span(0, 2),), "vocabulary"),
        (words(1, 4097), (Span(0, 2),), "4096"),
    ],
)
def test_a_request_that_cannot_work_fails_alone(
    llama: Subject, ids: Ids, spans: tuple[Span, ...], why: str
) -> None:
    bad, good = llama.engine.encode(
        [EncodeRequest(OWNER, ids, spans), EncodeRequest(OWNER, words(2, 5), (Span(0, 5),))]
    )
    assert why in str(bad.error)
    assert bad.refs == ()
    assert (good.error, len(good.refs)) == (None, 1)


# -- decoding ------------------------------------------------------------------------------------------------


def test_streaming_equals_generate(llama: Subject) -> None:
    asked = prompt(*llama.keep(words(70, 40)))
    options = SamplingOptions(max_tokens=40, ignore_eos=True, logprobs=3)
    whole = llama.engine.generate(asked, options)
    chunks = list(llama.engine.stream(asked, options))
    last = chunks[-1].completion
    assert last is not None
    assert [chunk.completion for chunk in chunks[:-1]] == [None] * 39
    assert "".join(chunk.text for chunk in chunks) == last.text == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == last.token_ids == whole.token_ids
    assert last.logprobs == whole.logprobs
    assert whole.text == llama.engine.tokenizer.decode(whole.token_ids, skip_special_tokens=True)
    assert (whole.finish_reason, whole.ttft_s > 0) == ("length", True)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(llama: Subject) -> None:
    asked = prompt(suffix=words(71, 15))
    free = llama.engine.generate(asked, SamplingOptions(max_tokens=40, ignore_eos=True))
    stop = free.text[11:14]
    options = SamplingOptions(max_tokens=40, ignore_eos=True, stop=("never there", stop))
    got = llama.engine.generate(asked, options)
    assert (got.text, got.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    assert got.token_ids == free.token_ids[: len(got.token_ids)]
    assert "".join(chunk.text for chunk in llama.engine.stream(asked, options)) == got.text


def test_end_of_sequence_ends_the_answer(llama: Subject) -> None:
    end = llama.engine.tokenizer.eos_token_id
    options = SamplingOptions(max_tokens=3000, temperature=1.5, seed=1)
    got = llama.engine.generate(prompt(), options)
    assert (got.finish_reason, got.token_ids[-1]) == ("stop", end)
    assert end not in got.token_ids[:-1]
    assert got.text == llama.engine.tokenizer.decode(got.token_ids[:-1], skip_special_tokens=True)
    longer = SamplingOptions(max_tokens=len(got.token_ids) + 5, temperature=1.5, seed=1, ignore_eos=True)
    assert len(llama.engine.generate(prompt(), longer).token_ids) == len(got.token_ids) + 5


def test_a_seed_repeats_an_answer_and_another_seed_does_not(llama: Subject) -> None:
    def answer(seed: int) -> Ids:
        options = SamplingOptions(max_tokens=12, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)
        return llama.engine.generate(prompt(), options).token_ids

    assert answer(1) == answer(1) != answer(2)


def test_logprobs_are_of_the_raw_logits_and_name_the_drawn_token(llama: Subject) -> None:
    options = SamplingOptions(max_tokens=5, temperature=2.0, seed=3, logprobs=2, ignore_eos=True)
    got = llama.engine.generate(prompt(), options)
    assert got.logprobs is not None
    reference = llama.logprobs([*prompt().ids, *got.token_ids])[len(prompt().ids) - 1 :]
    for row, token, scores in zip(got.logprobs, got.token_ids, reference, strict=False):
        assert set(row) == {*scores.topk(2).indices.tolist(), token}
        assert all(abs(value - scores[key]) <= BOUND for key, value in row.items())


def test_an_answer_ends_where_the_context_does(llama: Subject) -> None:
    asked = prompt(*llama.keep(words(72, 4000)), suffix=words(73, 90))
    got = llama.engine.generate(asked, SamplingOptions(max_tokens=50, ignore_eos=True))
    assert (got.injected_tokens, len(got.token_ids), got.finish_reason) == (4000, 6, "length")


# -- answers that nobody waits for ---------------------------------------------------------------------------


class Impatient(TransformersEngine):
    """Cancels the task that waits for an answer when its fifth forward begins, and sees how many follow."""

    forwards = 0

    def wait_for(self, work: Coroutine[Any, Any, Any]) -> None:
        async def waiting() -> None:
            self._task, self._loop, self._cancelled = (
                asyncio.ensure_future(work),
                asyncio.get_running_loop(),
                Event(),
            )
            self.forwards = 0
            try:
                with pytest.raises(asyncio.CancelledError):
                    await self._task
            finally:
                self._cancelled.set()

        asyncio.run(waiting())

    def _forward(self, *arguments: Any) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 5:
            self._loop.call_soon_threadsafe(self._task.cancel)
            assert self._cancelled.wait(60)
        return super()._forward(*arguments)


def test_a_cancelled_answer_ends_at_the_next_token(folder: Path) -> None:
    long = SamplingOptions(max_tokens=2000, ignore_eos=True)
    with Impatient(folder, device="cpu") as engine:

        async def read() -> None:
            async for _ in engine.astream(prompt(), long):
                pass

        for work in (engine.agenerate(prompt(), long), read()):
            engine.wait_for(work)
            assert engine.forwards == 5


def test_a_cancelled_prefill_ends_at_the_next_forward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferscale_memory.engine.transformers.PREFILL_CHUNK", 8)
    with Impatient(folder, device="cpu") as engine:
        asked = Prompt(OWNER, (Segment(words(3, 400)),))
        engine.wait_for(engine.agenerate(asked, ONE))
        assert engine.forwards == 5


def test_most_tokens_are_an_upper_bound(llama: Subject) -> None:
    asked = Prompt(OWNER, (Segment(words(1, 4090)),))
    answer = llama.engine.generate(asked, SamplingOptions(max_tokens=2**70, ignore_eos=True))
    assert (len(answer.token_ids), answer.finish_reason) == (6, "length")


# -- async and threads ---------------------------------------------------------------------------------------


def test_the_async_face_is_the_same_engine(llama: Subject) -> None:
    engine = llama.engine
    asked = prompt(*llama.keep(words(80, 30)))
    request = EncodeRequest(OWNER, words(81, 9), (Span(0, 9),))

    async def all_of_it() -> None:
        (result,) = await engine.aencode([request])
        key = result.refs[0].key
        assert await engine.aat_hand(OWNER, [key]) == {key}
        assert await engine.aforget(OWNER, [key]) == 1
        got = await engine.agenerate(asked, EIGHT)
        pieces = [chunk async for chunk in engine.astream(asked, EIGHT)]
        whole = engine.generate(asked, EIGHT)
        assert got.token_ids == pieces[-1].completion.token_ids == whole.token_ids
        assert got.injected_tokens == pieces[-1].completion.injected_tokens == 30
        assert "".join(piece.text for piece in pieces) == whole.text

    asyncio.run(all_of_it())


def test_many_threads_get_the_answers_each_would_get_alone(folder: Path) -> None:
    options = SamplingOptions(max_tokens=12, ignore_eos=True)
    subject = Subject(folder)
    with subject.engine as engine:
        alone: dict[int, Ids] = {}
        together: dict[int, Ids] = {}

        def work(number: int, into: dict[int, Ids]) -> None:
            owner = f"owner {number}"
            segments = subject.keep(words(200 + number, 30), words(300 + number, 17), owner=owner)
            got = engine.generate(prompt(*segments, owner=owner), options)
            assert got.injected_tokens == 47
            into[number] = got.token_ids

        threads = [threading.Thread(target=work, args=(n, together)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(8):
            engine.forget(f"owner {number}", list(engine._load().place_for_blobs().store._entries))
            work(number, alone)
        assert together == alone
        assert len(set(alone.values())) > 1


def test_a_stream_that_nobody_reads_blocks_nobody(llama: Subject) -> None:
    stream = llama.engine.stream(prompt(), EIGHT)
    next(stream)
    done: list[Completion] = []
    thread = threading.Thread(target=lambda: done.append(llama.engine.generate(prompt(), ONE)))
    thread.start()
    thread.join(timeout=60)
    assert len(done) == 1
    assert len(list(stream)) == 7


# -- invalid input and lifetime ------------------------------------------------------------------------------


def test_it_is_an_engine(llama: Subject) -> None:
    assert isinstance(llama.engine, Engine)
    assert llama.engine.unsupported is None
    assert llama.engine.max_model_len == 4096


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="inferscale fetch"):
        TransformersEngine(tmp_path / "nothing")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        TransformersEngine(tmp_path)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "fp8"}, "bfloat16"),
        ({"device": "quantum"}, "device"),
        ({"blob_bytes": 10}, "blob_bytes"),
        ({"secret": b"x" * 65}, "64"),
    ],
)
def test_options_that_cannot_work(folder: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        TransformersEngine(folder, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"logprobs": -2},
        {"stop": ("",)},
    ],
)
def test_sampling_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        SamplingOptions(**options)


@pytest.mark.parametrize(
    ("ids", "why"),
    [((), "empty"), (words(1, 4096), "no room"), (words(1, 5000), "lower k"), ((4, VOCAB), "vocabulary")],
)
def test_prompts_that_cannot_work(llama: Subject, ids: Ids, why: str) -> None:
    asked = Prompt(OWNER, (Segment(ids),) if ids else ())
    with pytest.raises(PromptError, match=why):
        llama.engine.stream(asked, ONE)


def test_a_dtype_may_differ_from_the_checkpoints(folder: Path) -> None:
    with (
        TransformersEngine(folder, device="cpu", dtype="bfloat16") as engine,
        TransformersEngine(folder, device="cpu") as plain,
    ):
        assert engine.fingerprint != plain.fingerprint
        (result,) = engine.encode([EncodeRequest(OWNER, words(1, 9), (Span(0, 9),))])
        assert engine.generate(prompt(Segment(words(1, 9), result.refs[0].key)), ONE).injected_tokens == 9
        assert engine._load().place_for_blobs().arena.keys.dtype == torch.bfloat16


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with TransformersEngine(tmp_path) as engine, pytest.raises(EngineError, match="lacks weights"):
        engine.generate(prompt(), ONE)


def test_weights_that_are_truncated(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with TransformersEngine(tmp_path) as engine, pytest.raises(EngineError, match="download the model again"):
        engine.generate(prompt(), ONE)


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = TransformersEngine(folder, device="cpu")
    stream = engine.stream(prompt(), EIGHT)
    next(stream)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError, match="closed"):
        engine.generate(prompt(), ONE)
    with pytest.raises(ClosedError, match="closed"):
        next(stream)
    with pytest.raises(ClosedError, match="closed"):
        engine.encode([EncodeRequest(OWNER, words(1, 9), (Span(0, 9),))])
    with pytest.raises(ClosedError, match="closed"):
        engine.at_hand(OWNER, ["key"])


# -- unsupported models are served as text -------------------------------------------------------------------


def refused_and_served(folder: Path, name: str) -> None:
    with TransformersEngine(folder, device="cpu") as engine:
        assert name in str(engine.unsupported)
        (result,) = engine.encode([EncodeRequest(OWNER, words(1, 9), (Span(0, 9),))])
        assert result == type(result)((), engine.unsupported)
        got = engine.generate(prompt(Segment(words(1, 9), "0" * 40)), SamplingOptions(max_tokens=4))
        assert (got.injected_tokens, got.prefilled_tokens, got.refused) == (0, 29, engine.unsupported)
        assert got.token_ids
        assert engine.at_hand(OWNER, ["0" * 40]) == set()
        assert engine.forget(OWNER, ["0" * 40]) == 0


_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 1024,
    "factor": 4.0,
}


@pytest.mark.parametrize(
    ("family", "rope"),
    [("llama", {"rope_type": "dynamic", "factor": 2.0}), ("llama", _LONGROPE), ("phi3", _LONGROPE)],
)
def test_rotary_variants_that_depend_on_the_length(tmp_path: Path, family: str, rope: dict[str, Any]) -> None:
    tiny_model(
        family,
        tmp_path,
        rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": 1.0, **rope},
        original_max_position_embeddings=1024,
    )
    refused_and_served(tmp_path, rope["rope_type"])


def test_a_family_that_is_not_known(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCAB, n_positions=512, n_embd=32, n_layer=1, n_head=2, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    refused_and_served(tmp_path, "gpt2")


def test_a_model_without_attention(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=8)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    refused_and_served(tmp_path, "mamba")


def test_attention_in_both_directions(tmp_path: Path) -> None:
    tiny_model("gemma3_text", tmp_path, use_bidirectional_attention=True)
    refused_and_served(tmp_path, "both directions")


def test_yarn_is_moved_by_the_models_own_rotation(tmp_path: Path) -> None:
    """YaRN scales cos and sin; a chain is exact under it too."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    rope_parameters = {"rope_theta": 10_000.0, **rope}
    subject = Subject(tiny_model("qwen3", tmp_path, rope_parameters=rope_parameters))
    asked = prompt(*subject.keep(words(1, 40), words(2, 33)))
    got = subject.engine.generate(asked, EIGHT)
    assert got.injected_tokens == 73
    reference = subject.logprobs([*asked.ids, *got.token_ids])[len(asked.ids) - 1 : -1]
    assert distance(table(got), reference) <= BOUND


# -- a real model --------------------------------------------------------------------------------------------


def test_a_chain_in_smollm2_is_exact() -> None:
    from inferscale_memory.fetch import demo_model

    with TransformersEngine(demo_model(), dtype="float32", device="cpu") as engine:
        lines = [
            "<|im_start|>system\nWhat you know about the user:\n",
            "- 3 March 2024: Ana adopted a grey cat called Miso.\n",
            "- 9 May 2024: Ana moved from Porto to Lisbon.\n",
        ]
        question = "<|im_end|>\n<|im_start|>user\nWhat is my cat called?<|im_end|>\n<|im_start|>assistant\n"
        preamble, *facts = (tuple(engine.tokenizer.encode(line)) for line in lines)
        ids, spans = preamble, [Span(0, len(preamble))]
        for fact in facts:
            spans.append(Span(len(ids), len(ids) + len(fact)))
            ids += fact
        (result,) = engine.encode([EncodeRequest(OWNER, ids, tuple(spans))])
        segments = [Segment(run, ref.key) for run, ref in zip((preamble, *facts), result.refs, strict=True)]
        asked = prompt(*segments, suffix=tuple(engine.tokenizer.encode(question)))
        options = SamplingOptions(max_tokens=8, logprobs=20)
        got, text = engine.generate(asked, options), engine.generate(asked.as_text(), options)
        assert got.injected_tokens == len(ids)
        assert got.token_ids == text.token_ids
        assert "grey" in got.text.lower()  # a small model: it answers the colour
        assert got.logprobs is not None
        assert text.logprobs is not None
        for ours, theirs in zip(got.logprobs, text.logprobs, strict=True):
            assert all(abs(ours[token] - theirs[token]) <= BOUND for token in ours.keys() & theirs.keys())
