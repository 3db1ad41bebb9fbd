"""How injecting works together with vLLM's prefix cache and with sliding attention windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscale_memory.connector.protocol import Inject
from inferscale_memory.connector.scheduler.blocks import NULL_BLOCK
from tests.connector.scenarios import (
    QUESTION,
    A,
    B,
    C,
    chain,
    inject,
    words,
)
from tests.connector.simulation import Simulation, answer, prefill


def test_a_composition_that_was_injected_before_is_found_in_the_prefix_cache(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B, C), A + B + C + QUESTION
    ask = Inject("alice", segments)
    inject(sim, ask, ids)
    name = sim.add(ids, ask)
    output = sim.step()
    assert output.num_scheduled_tokens == {name: 4}  # 112 of 116 tokens are whole blocks
    assert output.kv_connector_metadata.orders.loads == ()
    sim.drain()
    assert sim.replies[name]["injected"] == 0
    assert tuple(sim.generated[name]) == answer(ids, 4)


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 5])
def test_the_rest_of_a_fact_is_injected_after_a_cached_part_that_ends_within_it(
    folder: Path, kept: int
) -> None:
    """Blocks of 16 tokens, facts of 30, 25 and 41: no block ends where a fact does."""
    sim = Simulation(folder)
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    (b,) = sim.encode("alice", words(7, 6) + B, (7, 32))
    (c,) = sim.encode("alice", words(9, 8) + C, (9, 50))
    ids, ask = A + B + C + QUESTION, Inject("alice", ((a, 30), (b, 25), (c, 41)))
    inject(sim, ask, ids)
    hashes = sim.last.block_hashes
    sim.side.forgetter.index.evict_hashes(hashes[kept:])
    assert sim.hittable(ids, sim.salt(ask)) == 16 * kept
    reply, made = inject(sim, ask, ids)
    assert reply["injected"] == 96 - 16 * kept
    assert made == answer(ids, 4, sim.marks(a) + sim.marks(b) + sim.marks(c))


def test_blobs_that_the_prefix_cache_has_completely_are_not_promoted(folder: Path) -> None:
    sim = Simulation(folder, device=64, host=256)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    ask = Inject("alice", segments)
    inject(sim, ask, ids)
    hashes = sim.last.block_hashes
    sim.encode("alice", words(60, 77), (0, 60))
    assert all(0 not in sim.store.get(key).rows for key, _ in segments)
    sim.side.forgetter.index.evict_hashes(hashes[2:])
    reply, made = inject(sim, ask, ids)
    assert (reply["injected"], made) == (23, answer(ids, 4))  # all but 32: A, and the beginning of B
    assert [0 in sim.store.get(key).rows for key, _ in segments] == [False, True]


def test_requests_in_one_step_share_the_blocks_that_one_of_them_loads(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B
    names = [sim.add(ids + words(n, n), Inject("alice", segments)) for n in range(1, 4)]
    assert set(sim.step().num_scheduled_tokens) == set(names)
    sim.drain()
    for n, name in enumerate(names, start=1):
        assert tuple(sim.generated[name]) == answer(ids + words(n, n), 4)
    assert [sim.replies[name]["injected"] for name in names] == [55, 7, 7]


def test_a_request_that_may_not_read_the_prefix_cache_is_served_as_text(sim: Simulation) -> None:
    """vLLM zeroes what we claim for it (prompt logprobs need every position computed)."""
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    name = sim.add(ids, Inject("alice", segments))
    sim.requests[name].skip_reading_prefix_cache = True
    sim.drain()
    assert sim.replies[name]["injected"] == 0
    assert tuple(sim.generated[name]) == answer(ids, 4)


def test_a_block_injected_under_one_composition_is_not_hit_under_another(sim: Simulation) -> None:
    """The same ids, the same facts, encoded after other neighbours: other keys and values, another salt."""
    (first,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    (second,) = sim.encode("alice", words(12, 6) + A, (12, 42))
    for key in (first, second, first):
        _, made = inject(sim, Inject("alice", ((key, 30),)), A + QUESTION)
        assert made == answer(A + QUESTION, 4, sim.marks(key))


@pytest.mark.parametrize("batch", [16, 64])
def test_tokens_that_slid_out_of_the_attention_window_are_not_written(folder: Path, batch: int) -> None:
    sim = Simulation(folder, window=24, batch=batch)
    ids = words(90) + QUESTION
    keys = sim.encode("alice", ids[:90], (0, 40), (40, 90))
    assert sim.marks(keys[0]) + sim.marks(keys[1]) == prefill(ids, window=24)[:90]
    name = sim.add(ids, Inject("alice", ((keys[0], 40), (keys[1], 50))))
    (load,) = sim.step().kv_connector_metadata.orders.loads
    assert load.positions.tolist() == list(range(64, 90))  # from the block in which the window begins
    assert NULL_BLOCK not in load.blocks
    assert len(load.blocks) == 2
    sim.drain()
    assert sim.replies[name]["injected"] == 90
    assert tuple(sim.generated[name]) == answer(ids, 4, window=24)


def test_with_an_attention_window_a_cached_composition_is_completed(folder: Path) -> None:
    sim = Simulation(folder, window=24)
    ids = words(90) + QUESTION
    keys = sim.encode("alice", ids[:90], (0, 40), (40, 90))
    ask = Inject("alice", ((keys[0], 40), (keys[1], 50)))
    for extra in ((), (9, 9), words(30, 3)):
        _, made = inject(sim, ask, ids + extra)
        assert made == answer(ids + extra, 4, window=24)
