"""Forgetting reaches blobs, cached blocks and running requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscale_memory.connector import protocol
from inferscale_memory.connector.protocol import Encode, Forget, Inject
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


def test_a_forget_drops_the_blobs_and_says_how_many_there_were(sim: Simulation) -> None:
    a, b = (key for key, _ in chain(sim, "alice", A, B))
    assert sim.ask(Forget("alice", (a, "unknown"))) == {"dropped": 1}
    assert sim.at_hand("alice", a, b) == {b}
    assert sim.ask(Forget("alice", (a,))) == {"dropped": 0}
    assert no_leaks(sim, [512])


def test_a_forget_does_not_reach_another_owners_blobs(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    ask = Inject("alice", segments)
    inject(sim, ask, ids)
    assert sim.ask(Forget("bob", tuple(key for key, _ in segments))) == {"dropped": 0}
    assert sim.hittable(ids, sim.salt(ask)) == 64
    assert len(sim.store) == 2


def test_forgetting_a_blob_evicts_the_blocks_it_was_injected_into(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    ask = Inject("alice", segments)
    inject(sim, ask, ids)
    assert sim.hittable(ids, sim.salt(ask)) == 64
    sim.ask(Forget("alice", (segments[1][0],)))
    assert sim.hittable(ids, sim.salt(ask)) == 16  # B begins in the second block


def test_forgetting_a_tag_evicts_the_blocks_that_contain_it_as_text(sim: Simulation) -> None:
    ids = words(80)
    ask = Inject("alice", (), "text", (("fact", 40),))
    inject(sim, ask, ids)
    assert sim.hittable(ids, sim.salt(ask)) == 64
    sim.ask(Forget("alice", (), ("fact",)))
    assert sim.hittable(ids, sim.salt(ask)) == 32


def test_forgetting_a_tag_evicts_the_blocks_of_encodes_that_had_it_as_context(sim: Simulation) -> None:
    ids = words(80)
    sim.encode("alice", ids, (60, 80), mentions=[("neighbour", 20)])
    salt = protocol.encode_salt(sim.secret, sim.fingerprint, "alice")
    assert sim.hittable(ids, salt) == 64
    sim.ask(Forget("alice", (), ("neighbour",)))
    assert sim.hittable(ids, salt) == 16


def test_forgetting_a_tag_evicts_the_blocks_of_refused_requests_too(sim: Simulation) -> None:
    """It was prefilled all the same, under whatever salt it came with."""
    ids = words(80)
    sim.ask(Encode("alice", ((0, 20),), (("fact", 20),)), ids, tokens=2, salt="encode")
    sim.ask(Inject("alice", (), "", (("fact", 20),)), ids, tokens=2, salt="inject")
    assert [sim.hittable(ids, salt) for salt in ("encode", "inject")] == [64, 64]
    sim.ask(Forget("alice", (), ("fact",)))
    assert [sim.hittable(ids, salt) for salt in ("encode", "inject")] == [16, 16]


@pytest.mark.parametrize("by", ["tag of the kept", "tag of the context", "key"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_encode_is_discarded_when_its_fact_is_forgotten_while_it_runs(
    folder: Path, by: str, steps: int
) -> None:
    sim, ids = Simulation(folder, batch=16), words(80)
    (key,) = sim.encode("alice", ids, (30, 60))
    sim.ask(Forget("alice", (key,)))
    ask = Encode("alice", ((30, 60),), (("context", 10), ("kept", 30)))
    name = sim.add(ids, ask, tokens=2)
    for _ in range(steps):
        sim.step()
    tags = {"tag of the kept": ("kept",), "tag of the context": ("context",), "key": ()}[by]
    sim.add((7,), Forget("alice", (key,) if by == "key" else (), tags), tokens=1)
    sim.drain()
    assert sim.replies[name] == {"blobs": [], "error": "one of its facts was forgotten in the meantime"}
    assert len(sim.store) == 0
    assert sim.hittable(ids, sim.salt(ask)) <= (0 if by == "tag of the context" else 16)
    assert no_leaks(sim, [512])


def test_a_stored_blob_is_dropped_when_its_fact_is_forgotten_before_its_encode_is_answered(
    sim: Simulation,
) -> None:
    """Its client does not know the key yet, so it can forget it by its tag only."""
    name = sim.add(words(60), Encode("alice", ((30, 60),), (("fact", 30),)), tokens=9)
    while len(sim.store) == 0:
        sim.step()
    sim.add((7,), Forget("alice", (), ("fact",)), tokens=1)
    sim.drain()
    assert sim.replies[name] == {"blobs": [], "error": "one of its facts was forgotten in the meantime"}
    assert len(sim.store) == 0
    assert no_leaks(sim, [512])


def test_forgetting_a_tag_evicts_the_blocks_of_other_owners_prompts_too(sim: Simulation) -> None:
    """An agent's question may recall a user's fact: it is mentioned under the agent, and forgotten by the user."""
    ids, ask = words(80), Inject("agent:a", (), "", (("user's fact", 40),))
    inject(sim, ask, ids)
    sim.ask(Forget("user:u", (), ("user's fact",)))
    assert sim.hittable(ids, sim.salt(ask)) == 32


def test_forgetting_a_tag_that_equals_another_owners_key_does_not_touch_that_blob(sim: Simulation) -> None:
    ((key, _),) = segments = chain(sim, "alice", A)
    ids, ask = A + QUESTION, Inject("alice", segments)
    inject(sim, ask, ids)
    sim.ask(Forget("bob", (), (key,)))
    assert sim.hittable(ids, sim.salt(ask)) == 48
    assert sim.at_hand("alice", key) == {key}


@pytest.mark.parametrize("by", ["key", "tag"])
def test_a_running_request_leaves_nothing_of_a_forgotten_fact_in_the_prefix_cache(
    sim: Simulation, by: str
) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    ask = Inject("alice", segments, "", (("fact", 60), ("fact", 30)))
    name = sim.add(ids, ask, tokens=60)
    sim.step()
    sim.step()
    what = Forget("alice", (segments[1][0],)) if by == "key" else Forget("alice", (), ("fact",))
    sim.add((7,), what, tokens=1)
    assert sim.hittable(ids, sim.salt(ask)) == 16, "not from the first block that holds it"
    sim.drain()
    made = ids + tuple(sim.generated[name])
    assert sim.hittable(made, sim.salt(ask)) == 16, "what it cached after it was forgotten is still there"
    assert made[-60:] == answer(ids, 60)
    assert no_leaks(sim, [512])


def test_a_waiting_request_whose_blob_is_forgotten_is_served_as_text(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    name = sim.add(ids, Inject("alice", segments))
    sim.add((7,), Forget("alice", (segments[0][0],)), tokens=1)
    sim.drain()
    assert sim.replies[name]["injected"] == 0
    assert tuple(sim.generated[name]) == answer(ids, 4)


def test_forgetting_frees_the_rows_of_a_blob_on_every_tier(folder: Path) -> None:
    sim = Simulation(folder, device=64, host=256)
    segments = chain(sim, "alice", A, B)
    (other,) = sim.encode("alice", words(60, 77), (0, 60))
    inject(sim, Inject("alice", segments), A + B + QUESTION)
    sim.ask(Forget("alice", (other, *(key for key, _ in segments))))
    assert sim.free() == [64, 256]


def test_without_a_prefix_cache_forgetting_drops_blobs(folder: Path) -> None:
    sim = Simulation(folder, caching=False)
    segments = chain(sim, "alice", A, tags=("t",))
    inject(sim, Inject("alice", segments), A + QUESTION)
    assert sim.ask(Forget("alice", (segments[0][0],), ("t",))) == {"dropped": 1}
