"""What is injected into a prompt: the leading blobs that are there, belong to it and have its ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscale_memory.connector.protocol import Forget, Inject
from inferscale_memory.prompt.segments import PUBLIC_OWNER
from tests.connector.scenarios import (
    QUESTION,
    RUNNERS,
    A,
    B,
    C,
    chain,
    inject,
    no_leaks,
    words,
)
from tests.connector.simulation import Simulation, answer


def test_of_a_prompt_with_a_composition_only_the_question_is_computed(sim: Simulation) -> None:
    segments = chain(sim, "alice", A, B, C)
    ids = A + B + C + QUESTION
    name = sim.add(ids, Inject("alice", segments))
    assert sim.step().num_scheduled_tokens == {name: len(QUESTION)}
    sim.drain()
    assert tuple(sim.generated[name]) == answer(ids, 4)
    assert sim.replies[name] == {
        "injected": 96,
        "promoted": 0,
        "lost": 0,
        "compose_s": 0.001,
        "refused": None,
        "missing": [],
    }
    assert no_leaks(sim, [512])


def test_a_fact_that_was_encoded_elsewhere_is_injected_as_it_was_encoded(sim: Simulation) -> None:
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    (b,) = sim.encode("alice", words(7, 6) + B, (7, 32))
    for order in ([(a, A), (b, B)], [(b, B), (a, A)], [(a, A), (a, A)]):
        ids = order[0][1] + order[1][1] + QUESTION
        reply, made = inject(sim, Inject("alice", tuple((key, len(fact)) for key, fact in order)), ids)
        assert reply["injected"] == len(ids) - 20
        assert made == answer(ids, 4, sim.marks(order[0][0]) + sim.marks(order[1][0]))
        assert made != answer(ids, 4)


def test_at_least_one_prompt_token_is_computed(sim: Simulation) -> None:
    segments = chain(sim, "alice", A, B)
    reply, made = inject(sim, Inject("alice", segments), A + B)
    assert reply["injected"] == 54
    assert made == answer(A + B, 4)


def test_a_prompt_of_one_token_is_computed_even_if_it_has_a_blob(sim: Simulation) -> None:
    ids = words(1)
    reply, made = inject(sim, Inject("alice", chain(sim, "alice", ids)), ids)
    assert reply["injected"] == 0
    assert made == answer(ids, 4)


def test_an_empty_composition_is_served_as_text(sim: Simulation) -> None:
    reply, made = inject(sim, Inject("alice", ()), QUESTION)
    assert reply == {
        "injected": 0,
        "promoted": 0,
        "lost": 0,
        "compose_s": 0.0,
        "refused": None,
        "missing": [],
    }
    assert made == answer(QUESTION, 4)


def test_only_the_blobs_before_the_first_missing_one_are_injected(sim: Simulation) -> None:
    a, b, c = chain(sim, "alice", A, B, C)
    sim.ask(Forget("alice", (b[0],)))
    reply, made = inject(sim, Inject("alice", (a, b, c)), A + B + C + QUESTION)
    assert (reply["injected"], reply["missing"]) == (30, [b[0]])
    assert made == answer(A + B + C + QUESTION, 4)


def test_nothing_is_injected_when_the_first_blob_is_missing(sim: Simulation) -> None:
    a, b = chain(sim, "alice", A, B)
    sim.ask(Forget("alice", (a[0],)))
    reply, made = inject(sim, Inject("alice", (a, b)), A + B + QUESTION)
    assert (reply["injected"], reply["missing"]) == (0, [a[0]])
    assert made == answer(A + B + QUESTION, 4)


def test_injection_stops_at_a_blob_of_other_ids_than_the_prompt(sim: Simulation) -> None:
    segments = chain(sim, "alice", A, B, C)
    ids = A + B[:-1] + (7,) + C + QUESTION
    reply, made = inject(sim, Inject("alice", segments), ids)
    assert reply["injected"] == 30
    assert "ids" in reply["refused"]
    assert made == answer(ids, 4)


def test_injection_stops_at_a_segment_of_another_length_than_its_blob(sim: Simulation) -> None:
    a, b = chain(sim, "alice", A, B)
    ids = A + B + QUESTION
    reply, made = inject(sim, Inject("alice", (a, (b[0], 24))), ids)
    assert (reply["injected"], made) == (30, answer(ids, 4))


def test_nothing_is_injected_under_any_salt_but_that_of_the_composition(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    ask = Inject("alice", segments, "nonce")
    for other in (
        Inject("alice", segments),
        Inject("alice", segments[:1], "nonce"),
        Inject("alice", segments[::-1], "nonce"),
        Inject("bob", segments, "nonce"),
    ):
        reply, made = inject(sim, ask, ids, salt=sim.salt(other))
        assert reply["injected"] == 0
        assert "salt" in reply["refused"]
        assert made == answer(ids, 4)


def test_blobs_of_another_owner_are_not_injected(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    reply, made = inject(sim, Inject("bob", segments), ids)
    assert (reply["injected"], reply["missing"]) == (0, [key for key, _ in segments])
    assert made == answer(ids, 4)
    assert sim.hittable(ids, sim.salt(Inject("alice", segments))) == 0


def test_public_blobs_are_injected_for_every_owner(sim: Simulation) -> None:
    (head,) = chain(sim, PUBLIC_OWNER, A)
    for owner in ("alice", "bob"):
        reply, _ = inject(sim, Inject(owner, (head,)), A + QUESTION)
        assert reply["injected"] == 30


def test_a_composition_longer_than_the_prompt_is_refused(sim: Simulation) -> None:
    segments = chain(sim, "alice", A, B)
    reply, made = inject(sim, Inject("alice", segments), A + B[:-1])
    assert (reply["injected"], reply["refused"]) == (0, "the composition is longer than the prompt")
    assert made == answer(A + B[:-1], 4)


@pytest.mark.parametrize("batch", [16, 24, 64])
def test_the_prompt_after_the_injected_blobs_is_computed_in_chunks(folder: Path, batch: int) -> None:
    sim = Simulation(folder, batch=batch)
    segments, ids = chain(sim, "alice", A, B), A + B + words(90, 4)
    reply, made = inject(sim, Inject("alice", segments), ids)
    assert (reply["injected"], made) == (55, answer(ids, 4))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_a_preempted_request_is_injected_again_into_its_new_blocks(
    folder: Path, runner: str, asynchronous: bool
) -> None:
    """Model runner V1 hears of it among the cached requests, V2 among the new ones."""
    sim = Simulation(folder, blocks=12, runner=runner, asynchronous=asynchronous, caching=False)
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    (b,) = sim.encode("alice", words(7, 6) + B, (7, 32))
    first = sim.add(words(40, 7), tokens=60)
    sim.step()
    ids = A + B + QUESTION
    second = sim.add(ids, Inject("alice", ((a, 30), (b, 25))), tokens=40)
    loads, resumed = [], 0
    while len(sim.finished & {first, second}) < 2:
        output = sim.step()
        loads += output.kv_connector_metadata.orders.loads
        among_new = [new.req_id for new in output.scheduled_new_reqs]
        if runner == "v1" and second in output.scheduled_cached_reqs.resumed_req_ids:
            resumed += 1
            assert second not in among_new
        elif runner == "v2" and second in among_new:
            resumed += sim.requests[second].num_preemptions > 0
            assert not output.scheduled_cached_reqs.resumed_req_ids
    sim.drain()
    assert sim.requests[second].num_preemptions == resumed > 0
    assert len(loads) == 1 + resumed
    assert all(load.positions.tolist() == list(range(55)) for load in loads)
    assert tuple(sim.generated[first]) == answer(words(40, 7), 60)
    assert tuple(sim.generated[second]) == answer(ids, 40, sim.marks(a) + sim.marks(b))
    assert sim.replies[second]["injected"] == 55
    assert no_leaks(sim, [512])


def test_a_preempted_request_goes_on_as_text_when_its_blobs_were_forgotten(folder: Path) -> None:
    sim = Simulation(folder, blocks=12, caching=False)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    first = sim.add(words(40, 7), tokens=60)
    second = sim.add(ids, Inject("alice", segments), tokens=40)
    while sim.requests[second].num_preemptions == 0:
        sim.step()
    forget = sim.add((7,), Forget("alice", tuple(key for key, _ in segments)), tokens=1)
    sim.drain()
    assert sim.replies[forget]["dropped"] == 2
    assert tuple(sim.generated[first]) == answer(words(40, 7), 60)
    assert tuple(sim.generated[second]) == answer(ids, 40)


def test_a_request_that_found_no_free_blocks_is_matched_again_later(folder: Path) -> None:
    sim = Simulation(folder, blocks=9, caching=False)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    first = sim.add(words(60, 7), tokens=20)
    sim.step()
    second = sim.add(ids, Inject("alice", segments))
    output = sim.step()
    assert second not in output.num_scheduled_tokens
    assert output.kv_connector_metadata.orders.loads == ()
    sim.drain()
    assert tuple(sim.generated[first]) == answer(words(60, 7), 20)
    assert tuple(sim.generated[second]) == answer(ids, 4)
    assert sim.replies[second]["injected"] == 55


def test_leading_blobs_are_injected_again_after_a_mismatch_behind_them(folder: Path) -> None:
    sim = Simulation(folder, blocks=9, caching=False)
    segments, ids = chain(sim, "alice", A, B), A + words(25, 44) + QUESTION
    sim.add(words(60, 7), tokens=20)
    sim.step()
    second = sim.add(ids, Inject("alice", segments))
    sim.step()
    sim.drain()
    assert sim.replies[second]["injected"] == 30
