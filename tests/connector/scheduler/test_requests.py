"""Probes, malformed requests, and requests that cannot be served with blobs."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from inferscale_memory.connector import protocol
from inferscale_memory.connector.metadata import Report
from inferscale_memory.connector.protocol import NAME, Encode, Forget, Inject, Probe
from inferscale_memory.prompt.segments import PUBLIC_OWNER
from tests.connector.scenarios import (
    QUESTION,
    A,
    B,
    chain,
    inject,
    no_leaks,
    words,
)
from tests.connector.simulation import Simulation, answer


def test_a_probe_returns_the_usable_keys_and_the_models_fingerprint(sim: Simulation) -> None:
    (mine,) = sim.encode("alice", words(30), (0, 30))
    (theirs,) = sim.encode("bob", words(30, 1), (0, 30))
    (public,) = sim.encode(PUBLIC_OWNER, words(30, 2), (0, 30))
    assert sim.ask(Probe("alice", (mine, theirs, public, "unknown"))) == {
        "at_hand": [mine, public],
        "fingerprint": sim.fingerprint,
        "unsupported": None,
    }


def test_the_reply_to_a_malformed_request_says_what_is_wrong_with_it(sim: Simulation) -> None:
    for raw in ({NAME: 7}, {NAME: {"owner": "alice", "token": "forged", "op": "probe"}}):
        name = sim.add(words(30), raw=raw)
        sim.drain()
        assert sim.replies[name]["error"] == sim.replies[name]["refused"] != ""
        assert tuple(sim.generated[name]) == answer(words(30), 4)


@pytest.mark.parametrize(
    "raw", [None, {}, {"do_remote_prefill": True}, [], "x", 7, [NAME], {"other": {NAME: 1}}]
)
def test_a_request_without_our_parameters_gets_no_reply(sim: Simulation, raw: Any) -> None:
    name = sim.add(words(30), raw=raw)
    sim.drain()
    assert sim.replies[name] == {}
    assert tuple(sim.generated[name]) == answer(words(30), 4)


def test_two_thousand_random_parameters_stop_no_request(sim: Simulation) -> None:
    from tests.connector.test_protocol import anything, mutated

    draw = random.Random(11)
    for count in range(2_000):
        raw = mutated(draw) if count % 2 else draw.choice([anything(draw), {NAME: anything(draw)}])
        sim.add((7, 8, 9), raw=raw, tokens=1)
        if count % 20 == 0:
            sim.drain()
    sim.drain()
    assert len(sim.finished) == 2_001
    assert no_leaks(sim, [512])


def test_every_request_is_served_as_text_when_blobs_cannot_be_used(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    sim.side.observe(Report(status="its attention is odd"))
    reply, made = inject(sim, Inject("alice", segments), ids)
    assert (reply["injected"], reply["refused"], made) == (0, "its attention is odd", answer(ids, 4))
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)
    assert reply == {"blobs": [], "error": "its attention is odd"}
    assert sim.ask(Probe("alice"))["unsupported"] == "its attention is odd"


def test_a_probe_that_arrives_before_the_start_up_check_reports_its_result(folder: Path) -> None:
    sim = Simulation(folder, start=False)
    name = sim.add(words(10), Probe("alice"), tokens=2)
    sim.schedule()
    sim.side.observe(Report(status="its attention is odd"))
    sim.take()
    sim.drain()
    assert sim.replies[name]["unsupported"] == "its attention is odd"


def test_an_encode_that_arrives_before_the_start_up_check_fails_and_can_be_repeated(folder: Path) -> None:
    sim = Simulation(folder, start=False)
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)
    assert (reply["blobs"], reply["error"]) == ([], "it was lost on purpose")
    assert sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)["error"] is None


@pytest.mark.parametrize("kind", ["images", "embeddings", "no ids"])
def test_prompts_that_are_not_plain_token_ids_are_served_without_blobs(sim: Simulation, kind: str) -> None:
    ids = None if kind == "no ids" else list(words(30))
    for ask in (Encode("alice", ((0, 20),)), Inject("alice", (("k", 20),))):
        request = SimpleNamespace(
            request_id=kind,
            prompt_token_ids=ids,
            prompt_embeds=object() if kind == "embeddings" else None,
            mm_features=[object()] if kind == "images" else [],
            lora_request=None,
            cache_salt=sim.salt(ask),
            kv_transfer_params=protocol.params(ask, sim.secret),
            block_hashes=[],
        )
        sim.side.arrived(request)
        assert sim.side.match(request, 0) == (0, False)
        reply = sim.side.finished(request)
        assert reply is not None
        assert "prompts" in (reply[NAME].get("refused") or reply[NAME].get("error"))


@pytest.mark.parametrize("kind", ["inject", "forget", "refused", "malformed"])
def test_our_parameters_are_removed_from_everything_that_vllm_can_print(sim: Simulation, kind: str) -> None:
    """`SamplingParams` prints its extra arguments, in logs of requests and in the dump of an engine that dies."""
    ours: dict[str, Any] = {
        "inject": protocol.params(
            Inject("user:ada", (("k" * 40, 5),), "n", (("tag", 0),), "receipt"), sim.secret
        ),
        "forget": protocol.params(Forget("user:ada", ("k" * 40,), ("tag",)), sim.secret),
        "refused": protocol.params(Inject("user:ada", ()), b"another secret"),
        "malformed": {NAME: {"owner": "user:ada", "token": protocol.sign_owner(sim.secret, "user:ada")}},
    }[kind]
    token = ours[NAME]["token"]
    asked = {"do_remote_prefill": False, **ours}
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": asked, "other": 1})
    sampling.update_from_generation_config({}, eos_token_id=3)
    request = Request("r", list(words(9)), sampling, None, cache_salt="s", block_hasher=sim.block_hasher)
    assert token in repr(sampling.extra_args)
    sim.side.arrived(request)
    shown = (sampling, request.sampling_params, sampling.extra_args, request.kv_transfer_params)
    for told in map(repr, shown):
        assert not [part for part in (token, token.split(".")[1], "ada", "k" * 40, "receipt") if part in told]
    assert request.kv_transfer_params == {"do_remote_prefill": False}, "it is another connector's"
    assert sampling.extra_args == {"kv_transfer_params": {"do_remote_prefill": False}, "other": 1}
    assert asked[NAME]["token"] == token, "what the client holds is not changed"
    assert sim.side.finished(request) is not None
