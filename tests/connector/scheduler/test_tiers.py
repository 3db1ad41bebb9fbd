"""Blobs on the host are promoted to the device tier, as far as there is room in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscale_memory.connector.protocol import Encode, Inject
from tests.connector.scenarios import (
    QUESTION,
    A,
    B,
    C,
    chain,
    inject,
    no_leaks,
    words,
)
from tests.connector.simulation import Simulation, answer, prefill


def test_a_blob_on_the_host_is_promoted_before_it_is_loaded(folder: Path) -> None:
    sim = Simulation(folder, device=64, host=256)
    segments = chain(sim, "alice", A, B)
    sim.encode("alice", words(60, 77), (0, 60))
    assert all(0 not in sim.store.get(key).rows for key, _ in segments)
    reply, made = inject(sim, Inject("alice", segments), A + B + QUESTION)
    assert (reply["injected"], made) == (55, answer(A + B + QUESTION, 4))
    assert no_leaks(sim, [64, 256])


def test_the_reply_says_how_many_tokens_were_promoted_from_the_host(folder: Path) -> None:
    sim = Simulation(folder, device=64, host=256)
    (a, b), ids = chain(sim, "alice", A, B), A + B + QUESTION
    sim.encode("alice", words(60, 77), (0, 60))
    promoted = [inject(sim, Inject("alice", (a, b), nonce), ids)[0]["promoted"] for nonce in ("1", "2")]
    assert promoted == [55, 0], "it stays on the device"
    sim.encode("alice", words(60, 78), (0, 30))  # the room of one blob: the end of the composition gives way
    assert 0 in sim.store.get(a[0]).rows
    assert 0 not in sim.store.get(b[0]).rows
    reply, _ = inject(sim, Inject("alice", (a, b), "3"), ids)
    assert (reply["injected"], reply["promoted"]) == (55, 25)


def test_the_leading_part_of_a_composition_larger_than_the_device_is_injected(folder: Path) -> None:
    sim = Simulation(folder, device=64, host=256)
    a, b = chain(sim, "alice", A, B)
    (c,) = sim.encode("alice", A + B + C, (55, 96))
    ids = A + B + C + QUESTION
    for _ in range(3):
        reply, made = inject(sim, Inject("alice", (a, b, (c, 41)), f"nonce{_}"), ids)
        assert (reply["injected"], made) == (55, answer(ids, 4))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_compositions_that_do_not_fit_the_device_together_are_injected_in_successive_steps(
    folder: Path, asynchronous: bool
) -> None:
    """To prefill what is at hand would take longer, and hold up everybody else."""
    sim = Simulation(folder, device=64, host=512, batch=256, asynchronous=asynchronous)
    prompts, names = [], []
    for n in range(3):
        fact = words(50, 100 + n)
        prompts.append((fact + QUESTION, chain(sim, f"owner{n}", fact)))
    for n, (ids, segments) in enumerate(prompts):
        names.append(sim.add(ids, Inject(f"owner{n}", segments)))
    text = sim.add(words(9, 3), tokens=1)
    first, second = (set(sim.step().num_scheduled_tokens) for _ in range(2))
    assert text in first, "those that wait hold nobody up"
    if not asynchronous:  # there a request that is loaded ahead is scheduled a step later
        assert (first & set(names), second & set(names[1:])) == ({names[0]}, {names[1]})
    sim.drain()
    assert [sim.replies[name]["injected"] for name in names] == [50, 50, 50]
    for name, (ids, _) in zip(names, prompts, strict=True):
        assert tuple(sim.generated[name]) == answer(ids, 4)
    assert no_leaks(sim, [64, 512])


def test_a_composition_does_not_wait_for_room_that_an_encode_has_reserved(folder: Path) -> None:
    """Its rows are kept until it is done, which may take many steps."""
    sim = Simulation(folder, device=64, host=512, batch=32)
    fact = words(50, 100)
    segments, ids = chain(sim, "alice", fact), fact + QUESTION
    encode = sim.add(words(60, 78), Encode("alice", ((0, 45),)), tokens=2)
    sim.step()
    name = sim.add(ids, Inject("alice", segments))
    assert set(sim.step().num_scheduled_tokens) == {encode, name}
    sim.drain()
    assert sim.replies[encode]["error"] is None
    assert sim.replies[name]["injected"] == 0
    assert tuple(sim.generated[name]) == answer(ids, 4)
    assert no_leaks(sim, [64, 512])


def test_an_encode_and_a_composition_in_one_step_do_not_take_each_others_rows(folder: Path) -> None:
    sim = Simulation(folder, device=100, host=512, batch=256)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    sim.encode("alice", words(45, 77), (0, 45))
    encode = sim.add(words(60, 78), Encode("alice", ((0, 45),)), tokens=2)
    first = sim.add(ids, Inject("alice", segments))
    second = sim.add(words(60, 79), Encode("alice", ((0, 45),)), tokens=2)
    sim.step()
    sim.drain()
    assert tuple(sim.generated[first]) == answer(ids, 4)
    for name, seed in ((encode, 78), (second, 79)):
        for key, _ in sim.replies[name]["blobs"]:
            assert sim.marks(key) == prefill(words(60, seed))[:45]
    assert no_leaks(sim, [100, 512])
