"""Injection where there is too little of everything: few blocks, small tiers. Real vLLM, one engine per test."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from inferscale_memory.connector import check, protocol
from inferscale_memory.connector.protocol import Encode, Probe
from inferscale_memory.connector.scheduler import admission
from inferscale_memory.kv.arena import Shape
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from tests.connector.rig import Answer, Rig
from tests.models import tiny_model

pytestmark = pytest.mark.engine

EXACT = 1e-4


@pytest.fixture(autouse=True)
def small_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers here are as small as what one encode keeps: a quarter of one would hold nothing."""
    monkeypatch.setattr(admission, "ENCODE_SHARE", 1)


def same(answer: Answer, other: Answer) -> bool:
    return answer.tokens == other.tokens and answer.differs(other) <= EXACT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_are_injected_again_when_they_resume(model: Path, caching: bool) -> None:
    """24 blocks for six requests that each come to need 9: most are preempted, resumed elsewhere, and right."""
    with Rig.open(
        model, num_gpu_blocks_override=25, max_model_len=512, enable_prefix_caching=caching, max_num_seqs=6
    ) as rig:
        facts = [rig.words(23, 100 + i) for i in range(6)]
        prompts = []
        for number in range(6):
            order = random.Random(number).sample(range(6), 6)
            head, *segments = rig.remember("alice", facts, rig.words(17, 1))
            prompts.append(
                Prompt("alice", (head, *(segments[i] for i in order), Segment(rig.words(11, number))))
            )
        # The reference for permuted facts is each prompt injected alone, with room for all it needs.
        rig.poison()
        alone = [rig.inject(prompt, tokens=120) for prompt in prompts]
        rig.poison()
        requests = [rig.injection(prompt, tokens=120) for prompt in prompts]
        scheduler = rig.scheduler
        preempted, original = [], scheduler._preempt_request

        def count(request, *args, **kwargs):
            preempted.append(request.request_id)
            return original(request, *args, **kwargs)

        scheduler._preempt_request = count
        answers = rig.run([r for r, _ in requests], [s for _, s in requests])
        assert len(preempted) >= 3, "the test must preempt"
        for answer, expected in zip(answers, alone, strict=True):
            assert answer.injected == 17 + 6 * 23
            assert same(answer, expected)


def test_blobs_pushed_out_of_the_device_tier_come_back_from_the_host(model: Path) -> None:
    """The device holds 300 tokens, the host 3,000: three owners of 250 tokens take turns."""
    row = Shape(3, 2, 32, torch.float32).row_bytes
    with Rig.open(model, extra={"device_bytes": 300 * row, "host_bytes": 3000 * row}) as rig:
        assert [tier.capacity for tier in rig.decider.store.tiers] == [300, 3000]
        prompts = []
        for owner in ("alice", "bob", "carol"):
            facts = [rig.words(25, 1000 * ord(owner[0]) + i) for i in range(10)]
            prompts.append(
                Prompt(owner, (*rig.remember(owner, facts, rig.words(17, 1)), Segment(rig.words(9, 3))))
            )
        plain = [rig.plain(prompt.ids) for prompt in prompts]
        for _ in range(2):
            for prompt, expected in zip(prompts, plain, strict=True):
                rig.poison()
                answer = rig.inject(prompt)
                assert answer.injected == 267
                assert same(answer, expected)


def test_a_composition_larger_than_the_device_tier_is_injected_as_far_as_it_fits(model: Path) -> None:
    row = Shape(3, 2, 32, torch.float32).row_bytes
    with Rig.open(model, extra={"device_bytes": 150 * row, "host_bytes": 3000 * row}) as rig:
        preamble = rig.words(17, 1)
        head = rig.encode(PUBLIC_OWNER, preamble, [(0, 17)])[0]
        ids, segments = preamble, [Segment(preamble, head)]
        for number in range(8):
            fact = rig.words(25, 40 + number)
            key = rig.encode("alice", ids + fact, [(len(ids), len(ids) + 25)])[0]
            segments.append(Segment(fact, key))
            ids += fact
        prompt = Prompt("alice", (*segments, Segment(rig.words(9, 3))))
        rig.poison()
        answer = rig.inject(prompt)
        assert answer.injected == 17 + 5 * 25
        assert same(answer, rig.plain(prompt.ids))


def test_without_a_host_tier_every_owner_keeps_a_share_and_nothing_is_wrong(model: Path) -> None:
    row = Shape(3, 2, 32, torch.float32).row_bytes
    with Rig.open(model, extra={"device_bytes": 400 * row, "host_bytes": 0}) as rig:
        prompts = []
        for owner in range(6):
            facts = [rig.words(25, 1000 * owner + i) for i in range(6)]
            segments = rig.remember(f"owner{owner}", facts, rig.words(17, 1))
            prompts.append(Prompt(f"owner{owner}", (*segments, Segment(rig.words(9, 3)))))
        injected = []
        for prompt in prompts:
            rig.poison()
            answer = rig.inject(prompt)
            injected.append(answer.injected)
            assert same(answer, rig.plain(prompt.ids))
        assert sum(injected) > 300, "most of the tier is of use"
        assert min(injected) >= 17 + 25, "some owner has none of its facts"
        assert max(injected) <= 167


def test_many_owners_encode_and_ask_at_once_under_eviction(model: Path) -> None:
    """Load: encodes, injections and evictions interleave; every single answer is the plain prompt's."""
    row = Shape(3, 2, 32, torch.float32).row_bytes
    with Rig.open(
        model, extra={"device_bytes": 500 * row, "host_bytes": 700 * row}, num_gpu_blocks_override=80
    ) as rig:
        draw = random.Random(3)
        prompts = []
        for owner in range(8):
            facts = [rig.words(draw.randrange(5, 40), 1000 * owner + i) for i in range(6)]
            segments = rig.remember(f"owner{owner}", facts, rig.words(17, 1))
            prompts.append(Prompt(f"owner{owner}", (*segments, Segment(rig.words(9, owner)))))
        plain = [rig.plain(prompt.ids) for prompt in prompts]
        injected = 0
        for round_ in range(4):
            rig.poison()
            order = draw.sample(range(8), 8)
            work = [rig.injection(prompts[i]) for i in order]
            writes = [("new", rig.words(120, 9000 + 10 * round_ + j), [(40, 120)], ()) for j in range(3)]
            salt = protocol.encode_salt(rig._secret, rig.fingerprint, "new")
            requests = [r for r, _ in work] + [(ids, salt) for _, ids, _, _ in writes]
            samplings = [s for _, s in work] + [rig.sampling(2, Encode("new", ((40, 120),))) for _ in writes]
            answers = rig.run(requests, samplings)
            for i, answer in zip(order, answers, strict=False):
                assert same(answer, plain[i])
                injected += answer.injected
            assert [answer.reply["error"] for answer in answers[8:]] == [None] * 3
        assert injected > 1000


def test_a_model_that_cannot_be_injected_into_is_served_as_text(tmp_path: Path) -> None:
    """Dynamic NTK rotates by more than the position: refused by name at start-up, and everything still works."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    folder = tiny_model("llama", tmp_path / "dynamic", rope_parameters=rope)
    with Rig.open(folder) as rig:
        reason = rig.ask(Probe("anyone"))["unsupported"]
        assert "DynamicNTKScalingRotaryEmbedding" in reason
        ids = rig.words(50, 1)
        with pytest.raises(AssertionError, match="DynamicNTK"):
            rig.encode("alice", ids, [(0, 50)])
        prompt = Prompt("alice", (Segment(ids, "0" * 40), Segment(rig.words(5, 2))))
        answer = rig.inject(prompt)
        assert answer.injected == 0
        assert "DynamicNTK" in answer.reply["refused"]
        assert same(answer, rig.plain(prompt.ids))


def test_a_move_between_tiers_that_fails_ends_injection_and_not_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory takes the moved blobs for good: nothing it says can be trusted any more."""
    row = Shape(3, 2, 32, torch.float32).row_bytes
    with Rig.open(model, extra={"device_bytes": 300 * row, "host_bytes": 3000 * row}) as rig:
        prompts = [
            Prompt(
                owner, (*rig.remember(owner, [rig.words(200, n)], rig.words(17, 1)), Segment(rig.words(9, n)))
            )
            for n, owner in enumerate(("alice", "bob"))
        ]  # bob's pushed alice's to the host
        plain = [rig.plain(prompt.ids) for prompt in prompts]
        rig.poison()

        def broken(*_: object) -> None:
            raise RuntimeError("the host is on fire")

        with monkeypatch.context() as patch:
            patch.setattr(rig.worker.arenas[0], "copy_rows", broken)
            failed = rig.inject(prompts[0])
        assert failed.injected == 0
        assert same(failed, plain[0])
        after = [rig.inject(prompt) for prompt in prompts]
        assert [answer.injected for answer in after] == [0, 0]
        assert all("moving blobs" in answer.reply["refused"] for answer in after)
        assert all(same(answer, expected) for answer, expected in zip(after, plain, strict=True))
        assert "moving blobs" in rig.ask(Probe("alice"), (7, 8, 9))["unsupported"]


@pytest.mark.parametrize("passes", [True, False])
def test_the_start_up_check_draws_nothing_from_the_generator_the_engine_samples_with(
    model: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    """Ranks sample for themselves: one whose check ends early would sample other tokens from then on."""
    real, drawn = check.StartupCheck.verdict, []

    def watched(self, *args, **options):
        before = torch.get_rng_state()
        problem = real(self, *args, **options)
        drawn.append(not torch.equal(torch.get_rng_state(), before))
        return problem

    monkeypatch.setattr(check.StartupCheck, "verdict", watched)
    if not passes:
        monkeypatch.setattr(check, "TOLERANCE", {torch.float32: -1.0})
    with Rig.open(model) as rig:
        assert drawn == [False]
        assert (rig.ask(Probe("alice"), (7, 8, 9))["unsupported"] is None) is passes
