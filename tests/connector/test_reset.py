"""When vLLM resets its caches, because it sleeps, pauses or takes in other weights, no blob outlives it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inferscale_memory.connector.protocol import Encode, Inject, Outcome
from inferscale_memory.connector.scheduler.encode import RESET
from inferscale_memory.prompt.segments import Prompt, Segment
from tests.connector.simulation import Ids, Simulation, answer, prefill


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def words(count: int, seed: int = 0) -> Ids:
    draw = random.Random(seed)
    return tuple(draw.randrange(8, 500) for _ in range(count))


FACT, QUESTION = words(40, 1), words(20, 9)


def reset(sim: Simulation) -> bool:
    """As vLLM does when it sleeps or pauses: when no step is in flight any more, running requests are preempted, and
    all caches cleared."""
    sim.take_all()
    return bool(sim.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True))


def test_after_a_reset_nothing_is_at_hand_and_every_row_is_free_and_empty(folder: Path) -> None:
    sim = Simulation(folder, device=256, host=256)
    (key,) = sim.encode("alice", FACT, (0, 40))
    ask = Inject("alice", ((key, 40),))
    sim.ask(ask, FACT + QUESTION, tokens=4)
    assert reset(sim)
    assert sim.at_hand("alice", key) == set()
    assert sim.free() == [256, 256]
    assert sim.stray() == []
    reply = sim.ask(ask, FACT + QUESTION, tokens=4)
    assert (reply["injected"], reply["missing"]) == (0, [key])
    (again,) = sim.encode("alice", FACT, (0, 40))
    assert again == key, "a client finds it by the key that it knows"
    assert sim.ask(Inject("alice", ((key, 40),), "n"), FACT + QUESTION, tokens=4)["injected"] == 40


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
@pytest.mark.parametrize("steps", [1, 2, 4, 5, 6])
def test_an_encode_that_has_begun_before_a_reset_keeps_nothing(
    folder: Path, runner: str, asynchronous: bool, steps: int
) -> None:
    """Part of it, or all, was computed with the old weights; its client is told to encode again."""
    sim = Simulation(folder, batch=16, runner=runner, asynchronous=asynchronous)
    ids = words(60)
    name = sim.add(ids, Encode("alice", ((0, 60),)), tokens=9)
    for _ in range(steps):
        sim.step()
    reset(sim)
    sim.drain()
    assert sim.replies[name] == {"blobs": [], "error": RESET}
    assert len(sim.store) == 0
    assert sim.free() == [512]
    assert sim.stray() == []
    assert tuple(sim.generated[name]) == answer(ids, 9)


def test_an_encode_that_waits_is_made_of_the_new_weights(folder: Path) -> None:
    sim, ids = Simulation(folder), words(60)
    name = sim.add(ids, Encode("alice", ((0, 60),)), tokens=2)
    reset(sim)
    sim.drain()
    ((key, _),) = sim.replies[name]["blobs"]
    assert sim.marks(key) == prefill(ids)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_running_injection_is_computed_again_as_text(folder: Path, runner: str) -> None:
    sim = Simulation(folder, runner=runner)
    (key,) = sim.encode("alice", words(7, 5) + FACT, (7, 47))  # not what text would have there
    ids = FACT + QUESTION
    name = sim.add(ids, Inject("alice", ((key, 40),), receipt="r"), tokens=30)
    while not sim.generated[name]:
        sim.step()
    before = len(sim.generated[name])
    reset(sim)
    sim.drain()
    made = tuple(sim.generated[name])
    assert made[before:] == answer(ids + made[:before], 30 - before), "old marks are in it"
    assert sim.ask(Outcome("alice", "r"))["outcome"]["injected"] == 40, "what was told of it stays true"


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_load_under_way_counts_as_failed(folder: Path, runner: str) -> None:
    """It was ordered before the reset, and the request that waits for it is computed afterwards."""
    sim = Simulation(folder, runner=runner, asynchronous=True)
    (key,) = sim.encode("alice", words(7, 5) + FACT, (7, 47))
    ids = FACT + QUESTION
    name = sim.add(ids, Inject("alice", ((key, 40),)), tokens=5)
    sim.schedule()  # the load is in this step, which is still in flight
    sim.scheduler.reset_prefix_cache(reset_connector=True)
    sim.drain()
    assert sim.replies[name]["injected"] == 0
    assert tuple(sim.generated[name]) == answer(ids, 5)
    assert sim.side.injector.loading == {}


# -- in a real engine ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models import tiny_model

    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def rig(model: Path) -> Iterator[object]:
    from tests.connector.rig import Rig

    with Rig.open(model) as rig:
        yield rig


@pytest.mark.engine
def test_a_blob_of_the_old_weights_is_never_injected_into_the_new(rig) -> None:  # type: ignore[no-untyped-def]
    """The weights change, the folder and so the fingerprint and all keys do not."""
    facts = [rig.words(30, n) for n in (1, 2)]
    prompt = Prompt("alice", (*rig.remember("alice", facts, rig.words(17, 3)), Segment(rig.words(9, 4))))
    old = rig.plain(prompt.ids)
    rig.poison()
    assert rig.inject(prompt).injected == 77

    def reload(worker) -> None:  # type: ignore[no-untyped-def]
        """As a trainer sends them: names and tensors. On the CPU vLLM packs what is multiplied, but not the norms."""
        parts = worker.model_runner.model.named_parameters()
        worker.model_runner.model.load_weights(
            (name, value * torch.linspace(0.5, 2.0, len(value)))
            for name, value in parts
            if name.endswith("layernorm.weight")
        )

    rig.llm.collective_rpc(reload)
    assert rig.llm.reset_prefix_cache(reset_connector=True)
    new = rig.plain(prompt.ids)
    assert new.differs(old) > 0.01, "the test must change what the model says"
    after = rig.inject(prompt)
    assert after.injected == 0
    assert len(after.reply["missing"]) == 3
    assert after.differs(new) < 1e-4
    again = rig.remember("alice", facts, rig.words(17, 3))
    assert [part.key for part in again] == [part.key for part in prompt.segments[:3]]
    rig.poison()
    injected = rig.inject(prompt)
    assert injected.injected == 77
    assert injected.differs(new) < 1e-4


@pytest.mark.engine
def test_a_pause_that_clears_caches_clears_blobs(rig) -> None:  # type: ignore[no-untyped-def]
    """What `sleep` and the updates of weights do first, on every platform."""
    (head,) = rig.remember("alice", [], rig.words(17, 3))
    assert rig.at_hand("alice", [head.key]) == {head.key}
    core = rig.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort", clear_cache=True)
    core.resume_scheduler()
    assert rig.at_hand("alice", [head.key]) == set()
