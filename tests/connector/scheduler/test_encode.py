"""How blobs are made: what an encode captures, when it waits for room, and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import Encode
from inferscale_memory.kv.key import blob_key
from tests.connector.scenarios import (
    RUNNERS,
    encoded_base,
    no_leaks,
    words,
)
from tests.connector.simulation import Simulation, answer, prefill


def test_an_encode_keeps_the_tokens_of_its_spans_and_nothing_else(sim: Simulation) -> None:
    ids = words(60)
    keys = sim.encode("alice", ids, (3, 20), (20, 21), (40, 60))
    marks = prefill(ids)
    assert [sim.marks(key) for key in keys] == [marks[3:20], marks[20:21], marks[40:60]]
    assert sim.free() == [512 - 38]
    assert no_leaks(sim, [512])


def test_an_encode_in_many_chunks_is_captured_piece_by_piece(folder: Path) -> None:
    sim, ids = Simulation(folder, batch=16), words(100)
    keys = sim.encode("alice", ids, (5, 50), (50, 99))
    assert sim.marks(keys[0]) + sim.marks(keys[1]) == prefill(ids)[5:99]


def test_encodes_share_steps_with_other_requests(sim: Simulation) -> None:
    prompts = [words(30 + 3 * n, n) for n in range(6)]
    names = [sim.add(ids, Encode("alice", ((n, 25),)), tokens=2) for n, ids in enumerate(prompts)]
    plain = sim.add(words(70, 50), tokens=9)
    sim.drain()
    for n, (name, ids) in enumerate(zip(names, prompts, strict=True)):
        ((key, tokens),) = sim.replies[name]["blobs"]
        assert (sim.marks(key), tokens) == (prefill(ids)[n:25], 25 - n)
    assert tuple(sim.generated[plain]) == answer(words(70, 50), 9)


def test_a_blobs_key_is_computed_from_the_ids_that_were_prefilled(sim: Simulation) -> None:
    ids = words(40)
    (key,) = sim.encode("alice", ids, (10, 30))
    assert key == blob_key(sim.secret, sim.fingerprint, "alice", ids[:10], ids[10:30])


def test_an_encode_reuses_cached_context_that_ends_before_its_span(sim: Simulation) -> None:
    sim.encode("alice", words(60), (48, 60))
    ids = words(60)[:48] + words(20, 5)
    name = sim.add(ids, Encode("alice", ((48, 68),)), tokens=2)
    assert sim.step().num_scheduled_tokens == {name: 20}
    sim.drain()
    assert sim.marks(sim.replies[name]["blobs"][0][0]) == prefill(ids)[48:]


def test_an_encode_recomputes_a_cached_prefix_that_reaches_into_its_span(sim: Simulation) -> None:
    """The hooks would see nothing of it: the request waits a step, and is computed whole."""
    ids = words(64)
    sim.encode("alice", ids, (48, 60))
    name = sim.add(ids, Encode("alice", ((40, 60),)), tokens=2)
    assert sim.scheduler.connector.get_num_new_matched_tokens(sim.requests[name], 48) == (None, False)
    assert sim.step().num_scheduled_tokens == {}
    assert sim.requests[name].skip_reading_prefix_cache
    sim.drain()
    assert sim.marks(sim.replies[name]["blobs"][0][0]) == prefill(ids)[40:60]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_that_recomputes_its_prefix_waits_for_room(folder: Path, asynchronous: bool) -> None:
    """vLLM does not take a wait for an answer from then on: room comes first."""
    sim = Simulation(folder, device=100, batch=16, asynchronous=asynchronous)
    ids = words(64)
    sim.encode("alice", ids, (0, 60))
    large = sim.add(words(90, 7), Encode("alice", ((0, 90),)), tokens=2)
    sim.step()
    again = sim.add(ids, Encode("alice", ((0, 60),)), tokens=2)
    sim.drain()
    assert [sim.replies[name]["error"] for name in (large, again)] == [None, None]
    assert sim.marks(sim.replies[again]["blobs"][0][0]) == prefill(ids)[:60]
    assert no_leaks(sim, [100])


def test_an_encode_that_recomputes_its_prefix_and_can_never_fit_says_so(folder: Path) -> None:
    sim = Simulation(folder, device=40)
    ids = words(64)
    sim.encode("alice", ids, (0, 30))
    reply = sim.ask(Encode("alice", ((0, 60),)), ids, tokens=2)
    assert "60 tokens are more than one encode may keep" in reply["error"]
    assert "device tier of 40" in reply["error"]
    assert no_leaks(sim, [40])


@pytest.mark.parametrize("kind", ["plain", "based", "fresh"])
def test_a_large_encode_gets_its_turn_among_small_ones(folder: Path, kind: str) -> None:
    """At every step one of them is under way: together they leave no room for it."""
    sim = Simulation(folder, device=100)
    ids, span, base = words(80, 7), (0, 80), ()
    if kind == "based":  # the blobs it stands on have to be on the device beside it
        ids, _, base = encoded_base(sim)
        ids, span = ids + words(20, 7), (55, 75)
    if kind == "fresh":  # its prompt is in the prefix cache
        sim.encode("alice", ids, (70, 80))
    sim.add(words(100, 100), Encode("alice", ((70, 100),)), tokens=2)
    sim.step()
    large = sim.add(ids, Encode("alice", (span,), (), base), tokens=2)
    for n in range(18):
        sim.add(words(100, 101 + n), Encode("alice", ((70, 100),)), tokens=2)
        sim.step()
    assert large in sim.finished
    assert sim.replies[large]["error"] is None
    sim.drain()
    assert sim.side.encoder.waiting is None
    assert no_leaks(sim, [100])


def test_an_encode_that_waits_to_recompute_its_prefix_delays_no_other_request(sim: Simulation) -> None:
    ids = words(64)
    sim.encode("alice", ids, (0, 60))
    encode = sim.add(ids, Encode("alice", ((0, 50),)), tokens=2)
    other = sim.add(words(20, 3))
    assert set(sim.step().num_scheduled_tokens) == {other}
    sim.drain()
    assert sim.replies[encode]["error"] is None


def test_a_fact_that_is_encoded_several_times_at_once_is_stored_once(sim: Simulation) -> None:
    names = [sim.add(words(50), Encode("alice", ((10, 40),)), tokens=2) for _ in range(3)]
    sim.drain()
    assert len({tuple(sim.replies[name]["blobs"][0]) for name in names}) == 1
    assert sim.free() == [512 - 30]
    assert no_leaks(sim, [512])


def test_an_encode_is_refused_under_any_salt_but_its_own(sim: Simulation) -> None:
    for salt in ("", "some", protocol.encode_salt(sim.secret, sim.fingerprint, "bob")):
        reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2, salt=salt)
        assert reply["blobs"] == []
        assert "salt" in reply["error"]
    assert sim.free() == [512]


def test_an_encode_is_refused_when_a_span_ends_after_the_prompt(sim: Simulation) -> None:
    reply = sim.ask(Encode("alice", ((0, 31),)), words(30), tokens=2)
    assert (reply["blobs"], reply["error"]) == ([], "a span ends at 31, the prompt has 30 tokens")


def test_an_encode_that_does_not_fit_the_device_fails_and_evicts_nothing(folder: Path) -> None:
    sim = Simulation(folder, device=40)
    (key,) = sim.encode("alice", words(30), (0, 30))
    reply = sim.ask(Encode("alice", ((0, 41),)), words(50, 1), tokens=2)
    assert reply["blobs"] == []
    assert "40" in reply["error"]
    assert sim.at_hand("alice", key) == {key}
    assert no_leaks(sim, [40])


def test_encodes_that_do_not_fit_together_run_one_after_the_other(folder: Path) -> None:
    """Together they do not fit the device; each of them does."""
    sim = Simulation(folder, device=40, host=400, batch=32)
    names = [sim.add(words(50, n), Encode("alice", ((0, 30),)), tokens=2) for n in range(6)]
    sim.drain()
    for n, name in enumerate(names):
        ((key, _),) = sim.replies[name]["blobs"]
        assert sim.marks(key) == prefill(words(50, n))[:30]
    assert no_leaks(sim, [40, 400])


def test_an_encode_that_waits_for_rows_delays_no_other_request(folder: Path) -> None:
    sim = Simulation(folder, device=40, batch=32)
    first = sim.add(words(60), Encode("alice", ((0, 40),)), tokens=2)
    sim.step()
    second = sim.add(words(60, 1), Encode("alice", ((0, 40),)), tokens=2)
    text = sim.add(words(3, 2), tokens=1)
    assert set(sim.step().num_scheduled_tokens) == {first, text}
    sim.drain()
    assert [sim.replies[name]["error"] for name in (first, second)] == [None, None]


def test_a_waiting_encode_begins_when_the_one_before_it_is_aborted(folder: Path) -> None:
    sim = Simulation(folder, device=40, batch=32)
    first = sim.add(words(60), Encode("alice", ((0, 40),)), tokens=2)
    sim.step()
    second = sim.add(words(60, 1), Encode("alice", ((0, 40),)), tokens=2)
    sim.step()
    sim.abort(first)
    sim.drain()
    assert sim.replies[second]["error"] is None
    assert no_leaks(sim, [40])


def test_an_encode_fails_when_a_worker_cannot_capture_it(sim: Simulation) -> None:
    sim.ranks[0].loses = lambda name: True
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)
    assert reply == {"blobs": [], "error": "it was lost on purpose"}
    assert sim.free() == [512]
    assert no_leaks(sim, [512])


def test_an_encode_keeps_nothing_when_a_worker_loses_one_piece_of_it(folder: Path) -> None:
    sim = Simulation(folder, batch=16)
    name = sim.add(words(60), Encode("alice", ((0, 30), (30, 60))), tokens=2)
    sim.step()
    sim.ranks[0].loses = lambda name: True
    sim.step()
    sim.ranks[0].loses = lambda name: False
    sim.drain()
    assert sim.replies[name] == {"blobs": [], "error": "it was lost on purpose"}
    assert no_leaks(sim, [512])


def test_a_blob_is_stored_only_when_every_rank_has_captured_it(folder: Path) -> None:
    sim = Simulation(folder, ranks=2)
    sim.ranks[1].loses = lambda name: True
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)
    assert reply["blobs"] == []
    sim.ranks[1].loses = lambda name: False
    assert sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)["error"] is None
    assert no_leaks(sim, [512])


def test_an_encode_that_generates_one_token_ends_before_its_capture_is_reported_and_fails(
    sim: Simulation,
) -> None:
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=1)
    assert reply == {"blobs": [], "error": "the encode ended before all of it was captured; encode again"}
    assert no_leaks(sim, [512])


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_aborted_encode_gives_its_rows_back(folder: Path, steps: int) -> None:
    sim = Simulation(folder, batch=16)
    name = sim.add(words(60), Encode("alice", ((0, 60),)), tokens=2)
    for _ in range(steps):
        sim.step()
    sim.abort(name)
    sim.drain()
    assert sim.free() == [512] or (steps == 4 and sim.free() == [512 - 60])
    assert no_leaks(sim, [512])


def test_an_encode_aborted_between_its_step_and_the_report_gives_its_rows_back(sim: Simulation) -> None:
    name = sim.add(words(30), Encode("alice", ((0, 30),)), tokens=2)
    sim.schedule()
    sim.abort(name)
    sim.take()
    sim.drain()
    assert sim.free() == [512]
    assert no_leaks(sim, [512])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_that_is_preempted_is_captured_completely(
    folder: Path, runner: str, asynchronous: bool
) -> None:
    sim = Simulation(folder, blocks=9, batch=32, runner=runner, asynchronous=asynchronous)
    decode = sim.add(words(40, 7), tokens=60)
    sim.step()
    sim.step()
    ids = words(70)
    encode = sim.add(ids, Encode("alice", ((3, 66),)), tokens=12)
    sim.drain()
    assert sim.requests[encode].num_preemptions > 0
    assert tuple(sim.generated[decode]) == answer(words(40, 7), 60)
    assert tuple(sim.generated[encode]) == answer(ids, 12)
    assert sim.marks(sim.replies[encode]["blobs"][0][0]) == prefill(ids)[3:66]
    assert no_leaks(sim, [512])
