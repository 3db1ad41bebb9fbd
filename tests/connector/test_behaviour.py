"""How injection behaves inside a serving engine: real vLLM with a tiny model, one engine per set of options.

Every test of injection poisons the paged cache first, asserts what was really injected, and compares with the plain
prompt under a salt of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import Encode, Forget, Inject
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from tests.connector.rig import Answer, Rig
from tests.models import tiny_model

pytestmark = pytest.mark.engine

EXACT = 1e-4


@pytest.fixture(scope="module", params=["cached", "uncached", "ahead"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Three engines: as it comes; without prefix caching, its pages written by the engine's operator; and one whose
    requests wait a step for their loads, as under async scheduling (which vLLM's CPU backend does not have)."""
    model = tiny_model("llama", tmp_path_factory.mktemp("llama"))
    with Rig.open(model, enable_prefix_caching=request.param != "uncached") as rig:
        rig.caching = request.param != "uncached"  # type: ignore[attr-defined]
        assert rig.worker.composer.direct is not None
        assert rig.decider.injector.ahead is False
        if request.param == "uncached":
            rig.worker.composer.direct = None
        rig.decider.injector.ahead = request.param == "ahead"
        yield rig


def facts(rig: Rig, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    return [rig.words(5 + (7 * i) % 19, seed * 1000 + i) for i in range(count)]


def memory(rig: Rig, owner: str, count: int = 8, seed: int = 0, **options: Any) -> Prompt:
    """A prompt of this owner whose facts have blobs."""
    segments = rig.remember(owner, facts(rig, count, seed), rig.words(17, 1), **options)
    return Prompt(owner, (*segments, Segment(rig.words(13, 2))))


def length(prompt: Prompt) -> int:
    return sum(len(segment.ids) for segment in prompt.composition)


def same(answer: Answer, other: Answer) -> bool:
    return answer.tokens == other.tokens and answer.differs(other) <= EXACT


# -- encoding -------------------------------------------------------------------------------------------------------


def test_an_encode_longer_than_a_step_is_kept_whole(rig: Rig) -> None:
    """max_num_batched_tokens is 256: 700 tokens of window and a fact that itself spans two chunks."""
    window, fact, suffix = rig.words(700, 5), rig.words(120, 6), rig.words(9, 7)
    whole = (*window, *fact)
    (key,) = rig.encode("alice", whole, [(700, 820)])
    head = rig.encode(PUBLIC_OWNER, window, [(0, 700)])[0]
    prompt = Prompt("alice", (Segment(window, head), Segment(fact, key), Segment(suffix)))

    rig.poison()
    answer = rig.inject(prompt)
    assert answer.injected == 820
    assert same(answer, rig.plain(prompt.ids))


def test_encodes_and_answers_share_steps(rig: Rig) -> None:
    """Several encodes, plain requests and an injection run together; nobody catches another's rows."""
    ready = memory(rig, "alice", seed=1)
    plain = rig.plain(ready.ids)
    others = [rig.words(40 + 11 * i, 50 + i) for i in range(4)]
    alone = [rig.plain(ids) for ids in others]
    preamble, texts = rig.words(17, 1), facts(rig, 5, seed=9)

    rig.poison()
    request, sampling = rig.injection(ready)
    encode_salt = protocol.encode_salt(rig._secret, rig.fingerprint, "bob")
    prompts = [request, *((ids, rig.fresh()) for ids in others)]
    samplings = [sampling, *(rig.sampling(4) for _ in others)]
    ids = preamble
    spans = []
    for text in texts:
        spans.append((len(ids), len(ids) + len(text)))
        ids = (*ids, *text)
    for span in spans:
        prompts.append((ids[: span[1]], encode_salt))
        samplings.append(rig.sampling(2, Encode("bob", (span,))))
    answers = rig.run(prompts, samplings)

    assert answers[0].injected == length(ready)
    assert same(answers[0], plain)
    assert all(same(a, b) for a, b in zip(answers[1:5], alone, strict=True))
    keys = [answer.reply["blobs"][0][0] for answer in answers[5:]]
    head = rig.encode(PUBLIC_OWNER, preamble, [(0, 17)])[0]
    bob = Prompt(
        "bob",
        (
            Segment(preamble, head),
            *(Segment(t, k) for t, k in zip(texts, keys, strict=True)),
            Segment(rig.words(13, 2)),
        ),
    )
    rig.poison()
    answer = rig.inject(bob)
    assert answer.injected == length(bob)
    assert same(answer, rig.plain(bob.ids))


def test_a_prefix_hit_inside_what_is_kept_is_not_taken(rig: Rig) -> None:
    """The same encode twice: the second would find all of it cached and catch nothing."""
    ids = rig.words(200, 61)
    first = rig.encode("alice", ids, [(100, 200)])
    assert rig.forget("alice", first) == 1
    again = rig.encode("alice", ids, [(100, 200)])
    assert again == first, "the same ids after the same context have the same key"
    assert rig.at_hand("alice", again) == set(again)


def test_context_that_is_cached_is_not_computed_again(rig: Rig) -> None:
    window = rig.words(256, 62)
    rig.encode("alice", (*window, *rig.words(20, 63)), [(256, 276)])
    salt = protocol.encode_salt(rig._secret, rig.fingerprint, "alice")
    answer = rig.run(
        [((*window, *rig.words(20, 64)), salt)], [rig.sampling(2, Encode("alice", ((256, 276),)))]
    )[0]
    assert answer.reply["error"] is None
    assert answer.known == (256 if rig.caching else 0)  # type: ignore[attr-defined]


def test_an_encode_under_another_salt_is_refused(rig: Rig) -> None:
    for salt in ("", "anything", protocol.encode_salt(rig._secret, rig.fingerprint, "bob")):
        reply = rig.ask(Encode("alice", ((0, 20),)), rig.words(30, 65), tokens=2, salt=salt or None)
        assert "salt" in reply["error"]


def test_an_encode_whose_hooks_do_not_all_fire_fails_cleanly(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = rig.decider.store.tiers[0].free
    layers = rig.worker._layers
    monkeypatch.setattr(rig.worker, "_layers", [*layers, layers[0].__class__.__new__(layers[0].__class__)])
    monkeypatch.setattr("inferscale_memory.connector.worker.Hooks.__enter__", lambda self: self)
    ids = rig.words(40, 66)
    salt = protocol.encode_salt(rig._secret, rig.fingerprint, "alice")
    reply = rig.run([(ids, salt)], [rig.sampling(2, Encode("alice", ((10, 40),)))])[0].reply
    assert reply["blobs"] == []
    assert "layers could be followed" in reply["error"]
    assert rig.decider.store.tiers[0].free == free


# -- injecting ------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_injected_whole_still_computes_its_last_token(rig: Rig) -> None:
    prompt = memory(rig, "alice")
    prompt = Prompt("alice", prompt.composition)
    rig.poison()
    answer = rig.inject(prompt)
    assert answer.injected == len(prompt.ids) - 1
    assert same(answer, rig.plain(prompt.ids))


def test_a_long_question_is_prefilled_in_chunks_after_the_injection(rig: Rig) -> None:
    prompt = memory(rig, "alice")
    prompt = Prompt("alice", (*prompt.composition, Segment(rig.words(900, 71))))
    rig.poison()
    answer = rig.inject(prompt)
    assert answer.injected == length(prompt)
    assert same(answer, rig.plain(prompt.ids))


def test_what_stands_behind_a_missing_blob_is_text(rig: Rig) -> None:
    prompt = memory(rig, "alice", seed=4)
    victim = prompt.segments[3]
    assert rig.forget("alice", [victim.key]) == 1
    rig.poison()
    answer = rig.inject(prompt)
    assert answer.injected == sum(len(s.ids) for s in prompt.segments[:3])
    assert answer.reply["missing"] == [victim.key]
    assert same(answer, rig.plain(prompt.ids))


def test_owners_asking_together_each_get_their_own(rig: Rig) -> None:
    prompts = [memory(rig, f"owner{i}", count=4 + i, seed=20 + i) for i in range(6)]
    plain = [rig.plain(prompt.ids) for prompt in prompts]
    rig.poison()
    requests = [rig.injection(prompt) for prompt in prompts]
    answers = rig.run([r for r, _ in requests], [s for _, s in requests])
    for answer, prompt, expected in zip(answers, prompts, plain, strict=True):
        assert answer.injected == length(prompt)
        assert same(answer, expected)


def test_another_owners_blob_is_not_injected(rig: Rig) -> None:
    theirs = memory(rig, "alice", seed=5)
    mallory = Prompt("mallory", theirs.segments)
    rig.poison()
    answer = rig.inject(mallory)
    assert answer.injected == len(theirs.segments[0].ids), "only the public preamble"
    assert same(answer, rig.plain(mallory.ids))


def test_a_blob_is_injected_only_over_its_own_ids(rig: Rig) -> None:
    prompt = memory(rig, "alice", seed=6)
    changed = list(prompt.segments)
    changed[2] = Segment((changed[2].ids[0] ^ 1, *changed[2].ids[1:]), changed[2].key)
    lie = Prompt("alice", tuple(changed))
    rig.poison()
    answer = rig.inject(lie)
    assert answer.injected == sum(len(s.ids) for s in changed[:2])
    assert "other token ids than the blob" in answer.reply["refused"]
    assert same(answer, rig.plain(lie.ids))


def test_an_injection_under_another_salt_is_refused(rig: Rig) -> None:
    prompt = memory(rig, "alice", seed=6)
    (ids, salt), sampling = rig.injection(prompt)
    for wrong in (rig.fresh(), salt[:-1] + ("0" if salt[-1] != "0" else "1")):
        rig.poison()
        answer = rig.run([(ids, wrong)], [sampling])[0]
        assert answer.injected == 0
        assert "salt" in answer.reply["refused"]
        assert same(answer, rig.plain(ids))


def test_a_token_of_another_owner_or_secret_is_refused(rig: Rig) -> None:
    prompt = memory(rig, "alice", seed=6)
    (ids, salt), _ = rig.injection(prompt)
    ask = Inject("alice", tuple((s.key, len(s.ids)) for s in prompt.composition))
    forged = [protocol.params(ask, b"another secret")]
    other = protocol.params(ask, rig._secret)
    other["inferscale"]["token"] = protocol.sign_owner(rig._secret, "mallory")
    late = protocol.params(ask, rig._secret)
    late["inferscale"]["token"] = protocol.sign_owner(rig._secret, "alice", lifetime_s=-1)
    for params in [*forged, other, late]:
        sampling = rig.sampling(4)
        sampling.extra_args = {"kv_transfer_params": params}
        answer = rig.run([(ids, salt)], [sampling])[0]
        assert answer.injected == 0
        assert "token" in answer.reply["error"]


# -- the engine's own prefix cache --------------------------------------------------------------------------------


def test_the_same_composition_is_hit_for_free_and_nobody_else_hits_it(rig: Rig) -> None:
    prompt = memory(rig, "alice", count=12).salted("mine")
    rig.poison()
    first = rig.inject(prompt)
    again = rig.inject(prompt)
    assert first.injected == length(prompt)
    if rig.caching:  # type: ignore[attr-defined]
        hit = (length(prompt) + 13) // 32 * 32
        assert again.known == max(hit, length(prompt))
        assert again.injected == again.known - hit
    assert same(first, again)
    text = rig.run([(tuple(prompt.ids), "some salt")], [rig.sampling(4)])[0]
    assert text.known == 0
    assert same(first, text)


def test_a_longer_composition_takes_what_is_cached_and_injects_the_rest(rig: Rig) -> None:
    """Local hits end inside a fact: its remaining rows are injected. The salt is one only if the composition is."""
    prompt = memory(rig, "alice", count=12).salted("partly")
    rig.poison()
    rig.inject(prompt)
    if not rig.caching:  # type: ignore[attr-defined]
        pytest.skip("without a prefix cache nothing can be partly cached")
    pool = rig.scheduler.kv_cache_manager.block_pool
    cached = [block for block in pool.blocks if block.block_hash is not None]
    assert len(cached) == (len(prompt.ids) + 3) // 32, "of the four generated tokens three were computed"
    pool.evict_blocks({block.block_id for block in cached if block.block_hash_num_tokens > 64})
    answer = rig.inject(prompt)
    assert answer.known == length(prompt)
    assert answer.injected == length(prompt) - 64
    assert same(answer, rig.plain(prompt.ids))


# -- trouble --------------------------------------------------------------------------------------------------------


def test_a_failed_load_is_recomputed_and_leaves_nothing_to_hit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = memory(rig, "alice", count=12, seed=7).salted("failing")
    plain = rig.plain(prompt.ids)
    rig.poison()

    def broken(*_: Any) -> None:
        raise RuntimeError("the arena is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(rig.worker.composer, "write", broken)
        failed = rig.inject(prompt)
    assert failed.injected == 0
    assert "loading failed" in failed.reply["refused"]
    assert failed.known == failed.reply["lost"], "vLLM counts what it was to load"
    assert same(failed, plain)

    again = rig.inject(prompt)
    assert same(again, plain), "what is in the prefix cache now is right"
    if not rig.decider.injector.ahead:  # where a request waits for its load, vLLM caches what it recomputed
        assert again.known == again.injected == length(prompt), "nothing of the failed load may be hit"


def test_a_half_written_load_does_no_harm(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails in the middle of the layers, beside a request that goes well in an earlier step."""
    prompt = memory(rig, "alice", count=12, seed=8)
    plain = rig.plain(prompt.ids)
    real = rig.worker.composer.write_layer

    def breaks(number: int, *rest: Any) -> None:
        if number == 1:
            raise RuntimeError("torn")
        real(number, *rest)

    rig.poison()
    with monkeypatch.context() as patch:
        patch.setattr(rig.worker.composer, "direct", None)
        patch.setattr(rig.worker.composer, "write_layer", breaks)
        answer = rig.inject(prompt)
    assert answer.injected == 0
    assert same(answer, plain)


def test_forgetting_drops_the_blob_and_the_blocks(rig: Rig) -> None:
    tags = [f"fact{i}" for i in range(8)]
    prompt = memory(rig, "alice", count=8, seed=30, tags=tags).salted("to be forgotten")
    other = memory(rig, "bob", count=8, seed=31).salted("to be kept")
    rig.poison()
    rig.inject(prompt)
    rig.inject(other)
    as_text = Prompt("alice", tuple(Segment(s.ids, None, s.tag) for s in prompt.segments)).salted("text")
    rig.inject(as_text)
    before = rig.cached_blocks()

    victim = prompt.segments[4]
    assert rig.forget("bob", [victim.key]) == 0, "nobody forgets for another owner"
    assert rig.cached_blocks() == before
    assert rig.forget("alice", [victim.key], [victim.tag]) == 1
    assert rig.at_hand("alice", [s.key for s in prompt.composition]) == {
        s.key for s in prompt.composition if s is not victim
    }
    if rig.caching:  # type: ignore[attr-defined]
        start = sum(len(s.ids) for s in prompt.segments[:4])
        assert rig.inject(as_text).known <= start
    again = rig.inject(prompt)
    assert again.injected + again.known >= sum(len(s.ids) for s in prompt.segments[:4])
    assert again.known <= sum(len(s.ids) for s in prompt.segments[:4])
    kept = rig.inject(other)
    assert kept.known >= length(other)
    assert same(again, rig.plain(prompt.ids))


def test_an_encode_whose_context_is_forgotten_meanwhile_is_discarded(rig: Rig) -> None:
    """The forget arrives between the encode's steps."""
    ids = rig.words(600, 81)
    salt = protocol.encode_salt(rig._secret, rig.fingerprint, "alice")
    sampling = rig.sampling(2, Encode("alice", ((500, 600),), (("gone", 40),)))
    engine = rig.llm.llm_engine
    engine.add_request("encode", {"prompt_token_ids": list(ids), "cache_salt": salt}, sampling)
    engine.step()
    free = rig.decider.store.tiers[0].free
    forget = rig.sampling(1, Forget("alice", (), ("gone",)))
    engine.add_request("forget", {"prompt_token_ids": [7], "cache_salt": rig.fresh()}, forget)
    replies = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                replies[output.request_id.split("-")[0]] = rig.answer(output).reply
    assert replies["encode"]["blobs"] == []
    assert "forgotten" in replies["encode"]["error"]
    assert rig.decider.store.tiers[0].free == free + 100
    if rig.caching:  # type: ignore[attr-defined]
        again = rig.run([(ids, salt)], [rig.sampling(2, Encode("alice", ((500, 600),)))])[0]
        assert again.known <= 32, "its blocks from the forgotten fact on are gone"


def test_requests_aborted_in_flight_give_everything_back(rig: Rig) -> None:
    store = rig.decider.store
    prompt = memory(rig, "alice", count=12, seed=40)
    plain = rig.plain(prompt.ids)
    free, blobs = store.tiers[0].free, len(store)
    engine = rig.llm.llm_engine
    draw = random.Random(0)
    salt = protocol.encode_salt(rig._secret, rig.fingerprint, "alice")
    for round_ in range(12):
        (ids, composed), sampling = rig.injection(prompt, tokens=20)
        engine.add_request(
            f"inject{round_}", {"prompt_token_ids": list(ids), "cache_salt": composed}, sampling
        )
        encode = rig.sampling(2, Encode("alice", ((100, 550),)))
        words = rig.words(550, 200 + round_)
        engine.add_request(f"encode{round_}", {"prompt_token_ids": list(words), "cache_salt": salt}, encode)
        running = [f"inject{round_}", f"encode{round_}"]
        for _ in range(draw.randrange(3)):
            engine.step()
        engine.abort_request(running)
        for _ in range(3):
            engine.step()
    assert not rig.decider.requests
    assert len(store) == blobs
    assert store.tiers[0].free == free
    rig.poison()
    answer = rig.inject(prompt)
    assert answer.injected == length(prompt)
    assert same(answer, plain)


def test_any_json_at_all_is_served_as_text(rig: Rig) -> None:
    """2,000 requests with random parameters: the engine lives, and every answer is that of the plain prompt."""
    draw = random.Random(7)
    ids = rig.words(3, 91)
    expected = rig.plain(ids, tokens=1).tokens
    params = [_random_params(draw, rig) for _ in range(2000)]
    samplings = []
    for value in params:
        sampling = rig.sampling(1)
        sampling.extra_args = {"kv_transfer_params": value}
        samplings.append(sampling)
    answers = rig.run([(ids, f"fuzz{i}") for i in range(len(params))], samplings)
    assert all(answer.tokens == expected for answer in answers)
    assert not rig.decider.requests
    assert all(answer.injected == 0 for answer in answers)


@pytest.mark.parametrize("value", [None, [], {}, 0, "", False, [1], 5, "x", True, 0.5, {"inferscale": None}])
def test_parameters_that_are_no_object_do_not_end_the_engine(rig: Rig, value: Any) -> None:
    """vLLM's own front refuses some of these to the caller; whatever gets through is served as text."""
    ids = rig.words(5, 92)
    sampling = rig.sampling(2)
    sampling.extra_args = {"kv_transfer_params": value}
    plain = rig.plain(ids, tokens=2)
    if value and not isinstance(value, dict):
        with pytest.raises(AttributeError, match="has no attribute 'get'"):  # vLLM's front, to the caller
            rig.run([(ids, rig.fresh())], [sampling])
    else:
        assert rig.run([(ids, rig.fresh())], [sampling])[0].tokens == plain.tokens
    assert rig.plain(ids, tokens=2).tokens == plain.tokens
    assert not rig.decider.requests


def _random_params(draw: random.Random, rig: Rig) -> Any:
    def anything(depth: int) -> Any:
        kinds: list[Any] = [None, True, -1, 2**63 - 1, 0.5, float("nan"), "", "x" * 600, "\ud800", "inject"]
        if depth > 0 and draw.random() < 0.6:
            if draw.random() < 0.5:
                return [anything(depth - 1) for _ in range(draw.randrange(4))]
            return {
                draw.choice(["op", "owner", "keys", "a"]): anything(depth - 1)
                for _ in range(draw.randrange(4))
            }
        return draw.choice(kinds)

    body: dict[str, Any] = {"op": draw.choice(["encode", "inject", "probe", "forget", "?"]), "owner": "alice"}
    if draw.random() < 0.7:
        body["token"] = protocol.sign_owner(rig._secret, "alice")
    for name in ("spans", "segments", "keys", "tags", "mentions", "nonce"):
        if draw.random() < 0.5:
            body[name] = anything(3)
    if draw.random() < 0.2:
        body = anything(3)
    return {"inferscale": body}
