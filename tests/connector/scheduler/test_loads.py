"""Loads that fail, and requests that are aborted while they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.connector.protocol import Inject
from tests.connector.scenarios import (
    QUESTION,
    A,
    B,
    chain,
    failing,
    inject,
    no_leaks,
    words,
)
from tests.connector.simulation import Simulation, answer


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("caching", [True, False], ids=["", "no prefix cache"])
def test_a_request_whose_load_failed_gives_the_answer_of_its_text(
    folder: Path, batch: int, caching: bool
) -> None:
    sim = Simulation(folder, batch=batch, caching=caching)
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    (b,) = sim.encode("alice", words(7, 6) + B, (7, 32))
    ids, ask = A + B + QUESTION, Inject("alice", ((a, 30), (b, 25)))
    failing(sim, "all")
    reply, made = inject(sim, ask, ids, tokens=30)
    assert reply == {
        "injected": 0,
        "promoted": 0,
        "lost": 55,
        "compose_s": 0.0,
        "refused": "loading failed, so the text was prefilled",
        "missing": [],
    }
    assert made == answer(ids, 30)
    assert no_leaks(sim, [512])


def test_a_failed_load_leaves_nothing_in_the_prefix_cache_and_the_next_request_is_injected(
    sim: Simulation,
) -> None:
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    ids, ask = A + QUESTION, Inject("alice", ((a, 30),))
    failing(sim, "all")
    inject(sim, ask, ids, tokens=40)
    assert sim.hittable(ids, sim.salt(ask)) == 0
    failing(sim)
    reply, made = inject(sim, ask, ids)
    assert (reply["injected"], made) == (30, answer(ids, 4, sim.marks(a)))


def test_a_load_has_failed_when_it_fails_on_one_rank(folder: Path) -> None:
    sim = Simulation(folder, ranks=2)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    sim.ranks[1].fails = lambda name: True
    reply, made = inject(sim, Inject("alice", segments), ids)
    assert (reply["injected"], made) == (0, answer(ids, 4))
    assert sim.hittable(ids, sim.salt(Inject("alice", segments))) == 0


def test_a_failed_load_does_not_affect_other_requests_in_its_step(sim: Simulation) -> None:
    one, two = chain(sim, "alice", A), chain(sim, "bob", B)
    first = sim.add(A + QUESTION, Inject("alice", one))
    second = sim.add(B + QUESTION, Inject("bob", two))
    failing(sim, first)
    sim.drain()
    assert [sim.replies[name]["injected"] for name in (first, second)] == [0, 25]
    assert tuple(sim.generated[first]) == answer(A + QUESTION, 4)
    assert tuple(sim.generated[second]) == answer(B + QUESTION, 4)
    assert sim.hittable(A + QUESTION, sim.salt(Inject("alice", one))) == 0
    assert sim.hittable(B + QUESTION, sim.salt(Inject("bob", two))) == 32


def test_requests_that_share_the_blocks_of_a_failed_load_are_recomputed_too(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    first, second = (sim.add(ids + words(9, n), Inject("alice", segments)) for n in (1, 2))
    failing(sim, first)
    sim.drain()
    for n, name in ((1, first), (2, second)):
        assert tuple(sim.generated[name]) == answer(ids + words(9, n), 4)


def test_a_request_that_is_aborted_while_its_load_fails_leaves_no_wrong_block_behind(
    sim: Simulation,
) -> None:
    """vLLM takes aborts in before the step's report. Blocks after the load were computed from garbage and are
    cached already: once their prefix is cached again, they would be hit."""
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    ids, ask = A + words(60, 8), Inject("alice", ((a, 30),))
    name = sim.add(ids, ask)
    failing(sim, name)
    sim.schedule()
    sim.abort(name)
    sim.take()
    assert sim.hittable(ids, sim.salt(ask)) == 0
    for _ in range(3):
        _, made = inject(sim, ask, ids)
        assert made == answer(ids, 4, sim.marks(a))
    assert no_leaks(sim, [512])


def test_a_request_whose_load_failed_is_not_loaded_again_after_a_preemption(folder: Path) -> None:
    sim = Simulation(folder, blocks=12, caching=False)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    failing(sim, "all")
    sim.add(words(40, 7), tokens=60)
    sim.step()
    name, loads = sim.add(ids, Inject("alice", segments), tokens=40), 0
    while name not in sim.finished:
        loads += len(sim.step().kv_connector_metadata.orders.loads)
    assert sim.requests[name].num_preemptions > 0
    assert loads == 1
    assert tuple(sim.generated[name]) == answer(ids, 40)


def test_the_blocks_of_a_failed_load_are_reported_from_the_first_bad_one(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    inject(sim, Inject("alice", segments), A + words(9, 3))  # caches the first two... of which one is whole
    name = sim.add(ids, Inject("alice", segments))
    output = sim.schedule()
    (load,) = output.kv_connector_metadata.orders.loads
    table = sim.scheduler.kv_cache_manager.get_block_ids(name)[0]
    first = int(load.positions[0]) // 16
    assert first > 0
    assert load.blocks == tuple(table[first:4])
    assert sim.side.loads_failed({name}, lambda _: table) == set(table[first:])


def test_a_load_that_cannot_be_planned_is_recomputed(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are claimed already: it has to be reported as failed, never forgotten."""
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    ids, ask = A + QUESTION, Inject("alice", ((a, 30),))
    monkeypatch.setattr(sim.store, "promote", lambda entries: False)
    reply, made = inject(sim, ask, ids)
    assert (reply["injected"], made) == (0, answer(ids, 4))
    assert sim.hittable(ids, sim.salt(ask)) == 0
    assert no_leaks(sim, [512])


# vLLM 0.32 takes back what was computed from a failed load in the step that reads it, but not in a step that was in
# flight meanwhile, not in model runner V2, and not what slid out of an attention window: there loads go ahead.
AHEAD: list[dict[str, Any]] = [
    {"runner": runner, "asynchronous": asynchronous, "window": window}
    for runner in ("v1", "v2")
    for asynchronous in (False, True)
    for window in (None, 24)
] + [{"runner": "v1", "stages": stages, "window": None, "batch": 32} for stages in (2, 3)]


@pytest.mark.parametrize("options", AHEAD, ids=str)
@pytest.mark.parametrize("fails", [False, True], ids=["", "failing"])
def test_the_answer_is_right_whether_the_load_succeeds_or_fails_however_the_engine_runs(
    folder: Path, options: dict[str, Any], fails: bool
) -> None:
    sim, ids = Simulation(folder, **options), words(90) + QUESTION
    keys = sim.encode("alice", ids[:90], (0, 40), (40, 90))
    ask = Inject("alice", ((keys[0], 40), (keys[1], 50)))
    if fails:
        failing(sim, "all")
    reply, made = inject(sim, ask, ids, tokens=12)
    assert made == answer(ids, 12, window=options["window"])
    assert reply["injected"] == (0 if fails else 90)
    failing(sim)
    assert inject(sim, ask, ids, tokens=12)[1] == made  # whatever is in the prefix cache now is right
    assert no_leaks(sim, [512])


@pytest.mark.parametrize("options", AHEAD, ids=str)
def test_a_request_waits_a_step_for_its_load_only_where_vllm_could_not_undo_a_failed_load(
    folder: Path, options: dict[str, Any]
) -> None:
    sim = Simulation(folder, **options)
    name = sim.add(A + QUESTION, Inject("alice", chain(sim, "alice", A)))
    output = sim.schedule()
    (load,) = output.kv_connector_metadata.orders.loads
    at_once = options == {"runner": "v1", "asynchronous": False, "window": None}  # step by step
    assert load.ahead is not at_once
    assert (name in output.num_scheduled_tokens) is at_once
    sim.drain()
    assert tuple(sim.generated[name]) == answer(A + QUESTION, 4, window=options["window"])


@pytest.mark.parametrize("fails", [False, True], ids=["", "failing"])
def test_a_request_that_is_aborted_while_it_waits_for_its_load_leaves_nothing_behind(
    folder: Path, fails: bool
) -> None:
    sim = Simulation(folder, asynchronous=True)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    if fails:
        failing(sim, "all")
    name = sim.add(ids, Inject("alice", segments))
    assert sim.schedule().kv_connector_metadata.orders.loads
    sim.abort(name)
    sim.drain()
    assert sim.hittable(ids, sim.salt(Inject("alice", segments))) == 0
    assert no_leaks(sim, [512])


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_aborted_request_with_a_composition_leaves_nothing_behind(sim: Simulation, steps: int) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    name = sim.add(ids, Inject("alice", segments))
    for _ in range(steps):
        sim.step()
    sim.abort(name)
    sim.drain()
    _, made = inject(sim, Inject("alice", segments), ids)
    assert made == answer(ids, 4)
    assert no_leaks(sim, [512])


def test_a_request_that_is_aborted_in_flight_does_not_disturb_the_next_owner_of_its_blocks(
    folder: Path,
) -> None:
    sim = Simulation(folder, blocks=8, asynchronous=True)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    first = sim.add(ids, Inject("alice", segments))
    sim.step()
    sim.abort(first)
    second = sim.add(words(75, 12), tokens=10)
    sim.drain()
    assert tuple(sim.generated[second]) == answer(words(75, 12), 10)
    assert no_leaks(sim, [512])
