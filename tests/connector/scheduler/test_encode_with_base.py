"""Encodes that depend on other blobs: those are injected, or nothing is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscale_memory.connector.protocol import Encode, Forget
from inferscale_memory.kv.key import blob_key
from tests.connector.scenarios import (
    RUNNERS,
    C,
    encoded_base,
    failing,
    no_leaks,
    words,
)
from tests.connector.simulation import Simulation, answer, prefill


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_captures_its_tokens_after_injected_blobs(
    folder: Path, batch: int, runner: str, asynchronous: bool
) -> None:
    sim = Simulation(folder, batch=batch, runner=runner, asynchronous=asynchronous)
    before, marks, base = encoded_base(sim)
    ids = before + words(5, 7) + C
    name = sim.add(ids, Encode("alice", ((60, 101),), (), base), tokens=2)
    scheduled = 0
    while name not in sim.finished:
        scheduled += sim.step().num_scheduled_tokens.get(name, 0)
    reply = sim.replies[name]
    assert (reply["error"], reply["injected"]) == (None, 55)
    assert scheduled <= 46 + 2, "only its own tokens were computed"
    ((key, tokens),) = reply["blobs"]
    assert (sim.marks(key), tokens) == (prefill(ids, marks)[60:], 41)
    assert sim.marks(key) != prefill(ids)[60:]
    assert key == blob_key(sim.secret, sim.fingerprint, "alice", ids[:60], C, base)
    assert key != blob_key(sim.secret, sim.fingerprint, "alice", ids[:60], C)
    sim.drain()
    assert no_leaks(sim, [512])


def test_an_encode_keeps_nothing_when_a_blob_that_it_depends_on_is_missing_or_differs(
    sim: Simulation,
) -> None:
    before, _, base = encoded_base(sim)
    ids, rows = before + C, sim.free()
    for wrong in (
        ((base[0][0], 30), ("f" * 40, 25)),
        (base[1], base[0]),  # these ids are not theirs
        ((base[0][0], 29), (base[1][0], 26)),
    ):
        reply = sim.ask(Encode("alice", ((55, 96),), (), wrong), ids, tokens=2)
        assert reply["blobs"] == []
        assert reply["error"]
    assert sim.free() == rows
    assert no_leaks(sim, [512])


def test_an_encode_cannot_depend_on_another_owners_blobs(sim: Simulation) -> None:
    before, _, base = encoded_base(sim, owner="bob")
    reply = sim.ask(Encode("alice", ((55, 96),), (), base), before + C, tokens=2)
    assert (reply["blobs"], reply["injected"]) == ([], 0)
    assert "missing" in reply["error"]


def test_an_encode_is_refused_when_a_span_begins_within_the_injected_blobs(sim: Simulation) -> None:
    before, _, base = encoded_base(sim)
    reply = sim.ask(Encode("alice", ((50, 96),), (), base), before + C, tokens=2)
    assert reply["blobs"] == []
    assert "within the 55 tokens" in reply["error"]


def test_the_salt_of_an_encode_names_the_blobs_that_it_depends_on(sim: Simulation) -> None:
    before, _, base = encoded_base(sim)
    salt = sim.salt(Encode("alice", ((55, 96),)))
    reply = sim.ask(Encode("alice", ((55, 96),), (), base), before + C, tokens=2, salt=salt)
    assert reply["blobs"] == []
    assert "salt" in reply["error"]


def test_an_encode_does_not_depend_on_text_that_was_prefilled_in_place_of_missing_blobs(
    sim: Simulation,
) -> None:
    """A refused encode leaves prefilled blocks under its salt."""
    before, marks, base = encoded_base(sim)
    ids = before + C
    missing = (base[0], ("f" * 40, 25))
    assert sim.ask(Encode("alice", ((55, 96),), (), missing, "once"), ids, tokens=2)["blobs"] == []
    reply = sim.ask(Encode("alice", ((55, 96),), (), missing, "once"), ids, tokens=2)
    assert reply["blobs"] == []
    assert "nonce was used before" in reply["error"]
    reply = sim.ask(Encode("alice", ((55, 96),), (), base, "once"), ids, tokens=2)
    ((key, _),) = reply["blobs"]
    assert sim.marks(key) == prefill(ids, marks)[55:]
    again = sim.ask(Encode("alice", ((55, 96),), (), base, "once"), ids, tokens=2)
    assert again["blobs"] == []
    assert "nonce was used before" in again["error"]
    assert no_leaks(sim, [512])


def test_an_encode_keeps_nothing_when_vllm_does_not_inject_its_base(sim: Simulation) -> None:
    """vLLM does not ask a connector about a request that may not read the prefix cache."""
    before, _, base = encoded_base(sim)
    name = sim.add(before + C, Encode("alice", ((55, 96),), (), base), tokens=2)
    sim.requests[name].skip_reading_prefix_cache = True
    sim.drain()
    assert sim.replies[name]["blobs"] == []
    assert "not injected" in sim.replies[name]["error"]
    assert no_leaks(sim, [512])


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_keeps_nothing_when_its_base_cannot_be_loaded(
    folder: Path, batch: int, runner: str, asynchronous: bool
) -> None:
    sim = Simulation(folder, batch=batch, runner=runner, asynchronous=asynchronous)
    before, _, base = encoded_base(sim)
    failing(sim, "all")
    name = sim.add(before + C, Encode("alice", ((55, 96),), (), base), tokens=9)
    sim.drain()
    reply = sim.replies[name]
    assert (reply["blobs"], reply["error"]) == (
        [],
        "the blobs that it depends on could not be loaded; encode again",
    )
    assert tuple(sim.generated[name]) == answer(before + C, 9), "it goes on as text"
    assert no_leaks(sim, [512])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_a_preempted_encode_has_its_base_injected_again(
    folder: Path, runner: str, asynchronous: bool
) -> None:
    sim = Simulation(folder, blocks=11, batch=32, runner=runner, asynchronous=asynchronous)
    before, marks, base = encoded_base(sim)
    decode = sim.add(words(40, 7), tokens=60)
    sim.step()
    sim.step()
    ids = before + words(50, 8)
    encode = sim.add(ids, Encode("alice", ((55, 105),), (), base), tokens=12)
    sim.drain()
    assert sim.requests[encode].num_preemptions > 0
    assert tuple(sim.generated[decode]) == answer(words(40, 7), 60)
    ((key, _),) = sim.replies[encode]["blobs"]
    assert sim.marks(key) == prefill(ids, marks)[55:]
    assert no_leaks(sim, [512])


@pytest.mark.parametrize("lost", [False, True], ids=["", "lost"])
def test_an_encode_with_a_base_keeps_nothing_when_it_is_preempted_before_all_is_captured(
    folder: Path, lost: bool
) -> None:
    """What it finds in the prefix cache then may be its own, but nobody can tell."""
    sim = Simulation(folder, blocks=11, batch=16)
    before, _, base = encoded_base(sim)
    sim.add(words(40, 7), tokens=60)
    for _ in range(9):
        sim.step()
    encode = sim.add(before + words(50, 8), Encode("alice", ((55, 105),), (), base), tokens=12)
    while not sim.requests[encode].num_preemptions:
        sim.step()
    assert sim.side.requests[encode].open, "it was preempted before all was kept"
    if lost:
        sim.store.forget(base[0][0])  # as eviction would: nobody is told
    sim.drain()
    assert sim.replies[encode]["blobs"] == []
    assert "preempted" in sim.replies[encode]["error"]
    assert no_leaks(sim, [512])


def test_an_encode_does_not_evict_the_blobs_that_it_depends_on(folder: Path) -> None:
    """The tier is full: what must give way is neither what is loaded now nor what is pinned."""
    sim = Simulation(folder, device=100)
    before, marks, base = encoded_base(sim)
    sim.encode("alice", words(45, 20), (0, 45))
    ids = before + C
    reply = sim.ask(Encode("alice", ((55, 96),), (), base), ids, tokens=2)
    assert reply["error"] is None
    ((key, _),) = reply["blobs"]
    assert sim.marks(key) == prefill(ids, marks)[55:]
    assert sim.at_hand("alice", *(name for name, _ in base)) == {name for name, _ in base}
    assert no_leaks(sim, [100])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_waits_until_it_and_its_base_fit_together(folder: Path, asynchronous: bool) -> None:
    """There is room for its rows now, but only in the place of what it stands on."""
    sim = Simulation(folder, device=100, batch=32, asynchronous=asynchronous)
    before, marks, base = encoded_base(sim)
    first = sim.add(words(60, 20), Encode("alice", ((0, 40),)), tokens=2)
    sim.step()
    second = sim.add(before + C, Encode("alice", ((55, 96),), (), base), tokens=2)
    text = sim.add(words(3, 2), tokens=1)
    assert second not in sim.step().num_scheduled_tokens
    sim.drain()
    assert [sim.replies[name]["error"] for name in (first, second)] == [None, None]
    ((key, _),) = sim.replies[second]["blobs"]
    assert sim.marks(key) == prefill(before + C, marks)[55:]
    assert text in sim.finished, "it has held nobody up"
    assert no_leaks(sim, [100])


def test_an_encode_that_can_never_fit_beside_its_base_says_so(folder: Path) -> None:
    sim = Simulation(folder, device=90)
    before, _, base = encoded_base(sim)
    reply = sim.ask(Encode("alice", ((55, 96),), (), base), before + C, tokens=2)
    assert reply["blobs"] == []
    assert "do not fit the device tier" in reply["error"]
    assert no_leaks(sim, [90])


def test_an_encode_is_discarded_when_a_blob_that_it_depends_on_is_forgotten_while_it_runs(
    folder: Path,
) -> None:
    sim = Simulation(folder, batch=16)
    before, _, base = encoded_base(sim)
    name = sim.add(before + C, Encode("alice", ((55, 96),), (), base), tokens=2)
    sim.step()
    sim.ask(Forget("alice", (base[0][0],)))
    assert sim.replies[name]["blobs"] == []
    assert "forgotten" in sim.replies[name]["error"]
    assert sim.hittable(before + C, sim.salt(Encode("alice", ((55, 96),), (), base))) == 0
    assert no_leaks(sim, [512])
