"""What the scheduler side decides, inside vLLM's own scheduler: see `simulation` for what stands for tensors.

A blob encoded after everything that stands before it gives the plain prompt's answer, whatever is injected of
it; a blob encoded elsewhere gives the answer of its own marks. Both are computed again, without any engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from inferscale_memory.connector import admission, protocol
from inferscale_memory.connector.metadata import Report
from inferscale_memory.connector.protocol import NAME, Encode, Forget, Inject, Outcome, Probe
from inferscale_memory.connector.receipts import MOST_OF_OWNER
from inferscale_memory.connector.scheduler import NULL_BLOCK
from inferscale_memory.prompt.segments import PUBLIC_OWNER
from tests.connector.simulation import Ids, Simulation, answer, prefill

RUNNERS = ["v1", "v2"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(autouse=True)
def small_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers here are as small as what one encode keeps: a quarter of one would hold nothing."""
    monkeypatch.setattr(admission, "ENCODE_SHARE", 1)


@pytest.fixture
def sim(folder: Path) -> Simulation:
    return Simulation(folder)


def words(count: int, seed: int = 0) -> Ids:
    draw = random.Random(seed)
    return tuple(draw.randrange(8, 500) for _ in range(count))


def chain(sim: Simulation, owner: str, *facts: Ids, tags: Sequence[str] = ()) -> tuple[tuple[str, int], ...]:
    """Encode facts each after all earlier ones; the composition, which is exact."""
    ids: Ids = ()
    spans = []
    for fact in facts:
        spans.append((len(ids), len(ids) + len(fact)))
        ids += fact
    mentions = [(tag, start) for tag, (start, _) in zip(tags, spans, strict=False)]
    keys = sim.encode(owner, ids, *spans, mentions=mentions)
    return tuple(zip(keys, map(len, facts), strict=True))


def inject(
    sim: Simulation, ask: Inject, ids: Ids, *, tokens: int = 4, **options: Any
) -> tuple[dict[str, Any], Ids]:
    """Serve one request alone: its reply, and what it generated."""
    name = sim.add(ids, ask, tokens=tokens, **options)
    sim.drain()
    return sim.replies[name], tuple(sim.generated[name])


def whole(sim: Simulation, capacity: Sequence[int]) -> bool:
    """Nothing is left behind: every row is free or holds a blob, what is free holds nothing, and no request is
    remembered."""
    held = [0] * len(capacity)
    for entry in sim.store._entries.values():
        for tier, rows in entry.rows.items():
            held[tier] += len(rows)
    assert [free + rows for free, rows in zip(sim.free(), held, strict=True)] == list(capacity)
    assert sim.side._requests == {}
    assert sim.side._loading == {}
    assert len(sim.side._running) == len(sim.side._running._holders) == 0
    assert sim.store._pinned == set()
    assert [sum(share.tokens for share in shares._owners.values()) for shares in sim.store._shares] == held
    assert sim.stray() == []
    return True


A, B, C = words(30, 1), words(25, 2), words(41, 3)
QUESTION = words(20, 9)


# -- encoding ---


def test_an_encode_keeps_the_marks_of_its_spans_and_nothing_else(sim: Simulation) -> None:
    ids = words(60)
    keys = sim.encode("alice", ids, (3, 20), (20, 21), (40, 60))
    marks = prefill(ids)
    assert [sim.marks(key) for key in keys] == [marks[3:20], marks[20:21], marks[40:60]]
    assert sim.free() == [512 - 38]
    assert whole(sim, [512])


def test_an_encode_over_many_chunks_is_caught_piece_by_piece(folder: Path) -> None:
    sim, ids = Simulation(folder, batch=16), words(100)
    keys = sim.encode("alice", ids, (5, 50), (50, 99))
    assert sim.marks(keys[0]) + sim.marks(keys[1]) == prefill(ids)[5:99]


def test_encodes_and_other_requests_share_steps(sim: Simulation) -> None:
    prompts = [words(30 + 3 * n, n) for n in range(6)]
    names = [sim.add(ids, Encode("alice", ((n, 25),)), tokens=2) for n, ids in enumerate(prompts)]
    plain = sim.add(words(70, 50), tokens=9)
    sim.drain()
    for n, (name, ids) in enumerate(zip(names, prompts, strict=True)):
        ((key, tokens),) = sim.replies[name]["blobs"]
        assert (sim.marks(key), tokens) == (prefill(ids)[n:25], 25 - n)
    assert tuple(sim.generated[plain]) == answer(words(70, 50), 9)


def test_the_key_is_computed_from_the_ids_that_were_prefilled(sim: Simulation) -> None:
    from inferscale_memory.kv.key import blob_key

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


def test_a_cached_prefix_that_reaches_into_a_span_is_not_read(sim: Simulation) -> None:
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
def test_an_encode_that_may_not_read_the_cache_waits_for_room(folder: Path, asynchronous: bool) -> None:
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
    assert whole(sim, [100])


def test_an_encode_that_may_not_read_the_cache_and_never_fits_says_so(folder: Path) -> None:
    sim = Simulation(folder, device=40)
    ids = words(64)
    sim.encode("alice", ids, (0, 30))
    reply = sim.ask(Encode("alice", ((0, 60),)), ids, tokens=2)
    assert "60 tokens are more than one encode may keep" in reply["error"]
    assert "device tier of 40" in reply["error"]
    assert whole(sim, [40])


@pytest.mark.parametrize("kind", ["plain", "based", "fresh"])
def test_a_large_encode_has_its_turn_among_small_ones(folder: Path, kind: str) -> None:
    """At every step one of them is under way: together they leave no room for it."""
    sim = Simulation(folder, device=100)
    ids, span, base = words(80, 7), (0, 80), ()
    if kind == "based":  # the blobs it stands on have to be on the device beside it
        ids, _, base = stacked(sim)
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
    assert sim.side._waiting is None
    assert whole(sim, [100])


def test_a_waiting_encode_that_may_not_read_the_cache_holds_nobody_up(sim: Simulation) -> None:
    ids = words(64)
    sim.encode("alice", ids, (0, 60))
    encode = sim.add(ids, Encode("alice", ((0, 50),)), tokens=2)
    other = sim.add(words(20, 3))
    assert set(sim.step().num_scheduled_tokens) == {other}
    sim.drain()
    assert sim.replies[encode]["error"] is None


def test_the_same_fact_encoded_twice_at_once_is_stored_once(sim: Simulation) -> None:
    names = [sim.add(words(50), Encode("alice", ((10, 40),)), tokens=2) for _ in range(3)]
    sim.drain()
    assert len({tuple(sim.replies[name]["blobs"][0]) for name in names}) == 1
    assert sim.free() == [512 - 30]
    assert whole(sim, [512])


def test_an_encode_under_any_other_salt_is_refused_and_served_as_text(sim: Simulation) -> None:
    for salt in ("", "some", protocol.encode_salt(sim.secret, sim.fingerprint, "bob")):
        reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2, salt=salt)
        assert reply["blobs"] == []
        assert "salt" in reply["error"]
    assert sim.free() == [512]


def test_a_span_beyond_the_prompt_is_refused(sim: Simulation) -> None:
    reply = sim.ask(Encode("alice", ((0, 31),)), words(30), tokens=2)
    assert (reply["blobs"], reply["error"]) == ([], "a span ends at 31, the prompt has 30 tokens")


def test_an_encode_that_does_not_fit_the_device_fails_and_evicts_nothing(folder: Path) -> None:
    sim = Simulation(folder, device=40)
    (key,) = sim.encode("alice", words(30), (0, 30))
    reply = sim.ask(Encode("alice", ((0, 41),)), words(50, 1), tokens=2)
    assert reply["blobs"] == []
    assert "40" in reply["error"]
    assert sim.at_hand("alice", key) == {key}
    assert whole(sim, [40])


def test_an_encode_waits_for_the_rows_of_those_before_it(folder: Path) -> None:
    """Together they do not fit the device; each of them does."""
    sim = Simulation(folder, device=40, host=400, batch=32)
    names = [sim.add(words(50, n), Encode("alice", ((0, 30),)), tokens=2) for n in range(6)]
    sim.drain()
    for n, name in enumerate(names):
        ((key, _),) = sim.replies[name]["blobs"]
        assert sim.marks(key) == prefill(words(50, n))[:30]
    assert whole(sim, [40, 400])


def test_an_encode_that_waits_for_rows_holds_nobody_up(folder: Path) -> None:
    sim = Simulation(folder, device=40, batch=32)
    first = sim.add(words(60), Encode("alice", ((0, 40),)), tokens=2)
    sim.step()
    second = sim.add(words(60, 1), Encode("alice", ((0, 40),)), tokens=2)
    text = sim.add(words(3, 2), tokens=1)
    assert set(sim.step().num_scheduled_tokens) == {first, text}
    sim.drain()
    assert [sim.replies[name]["error"] for name in (first, second)] == [None, None]


def test_an_encode_that_waits_is_let_in_when_the_one_before_it_is_aborted(folder: Path) -> None:
    sim = Simulation(folder, device=40, batch=32)
    first = sim.add(words(60), Encode("alice", ((0, 40),)), tokens=2)
    sim.step()
    second = sim.add(words(60, 1), Encode("alice", ((0, 40),)), tokens=2)
    sim.step()
    sim.abort(first)
    sim.drain()
    assert sim.replies[second]["error"] is None
    assert whole(sim, [40])


def test_an_encode_that_is_lost_by_the_worker_fails_cleanly(sim: Simulation) -> None:
    sim.ranks[0].loses = lambda name: True
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)
    assert reply == {"blobs": [], "error": "it was lost on purpose"}
    assert sim.free() == [512]
    assert whole(sim, [512])


def test_an_encode_of_which_one_piece_is_lost_keeps_nothing(folder: Path) -> None:
    sim = Simulation(folder, batch=16)
    name = sim.add(words(60), Encode("alice", ((0, 30), (30, 60))), tokens=2)
    sim.step()
    sim.ranks[0].loses = lambda name: True
    sim.step()
    sim.ranks[0].loses = lambda name: False
    sim.drain()
    assert sim.replies[name] == {"blobs": [], "error": "it was lost on purpose"}
    assert whole(sim, [512])


def test_a_blob_is_at_hand_only_when_every_rank_has_caught_it(folder: Path) -> None:
    sim = Simulation(folder, ranks=2)
    sim.ranks[1].loses = lambda name: True
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)
    assert reply["blobs"] == []
    sim.ranks[1].loses = lambda name: False
    assert sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)["error"] is None
    assert whole(sim, [512])


def test_an_encode_of_one_token_ends_before_the_confirmation_and_fails(sim: Simulation) -> None:
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=1)
    assert reply == {"blobs": [], "error": "the encode ended before all of it was kept"}
    assert whole(sim, [512])


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_aborted_encode_gives_its_rows_back(folder: Path, steps: int) -> None:
    sim = Simulation(folder, batch=16)
    name = sim.add(words(60), Encode("alice", ((0, 60),)), tokens=2)
    for _ in range(steps):
        sim.step()
    sim.abort(name)
    sim.drain()
    assert sim.free() == [512] or (steps == 4 and sim.free() == [512 - 60])
    assert whole(sim, [512])


def test_an_encode_aborted_between_its_step_and_the_report_gives_its_rows_back(sim: Simulation) -> None:
    name = sim.add(words(30), Encode("alice", ((0, 30),)), tokens=2)
    sim.schedule()
    sim.abort(name)
    sim.take()
    sim.drain()
    assert sim.free() == [512]
    assert whole(sim, [512])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_preempted_midway_is_caught_whole(folder: Path, runner: str, asynchronous: bool) -> None:
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
    assert whole(sim, [512])


# -- encodes that stand on blobs ---


def stacked(sim: Simulation, *, owner: str = "alice") -> tuple[Ids, list[int], tuple[tuple[str, int], ...]]:
    """Two facts encoded elsewhere, as something to stand on: ids, marks, and the composition."""
    (a,) = sim.encode(owner, words(12, 5) + A, (12, 42))
    (b,) = sim.encode(owner, words(7, 6) + B, (7, 32))
    return A + B, sim.marks(a) + sim.marks(b), ((a, 30), (b, 25))


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_stands_on_injected_blobs(
    folder: Path, batch: int, runner: str, asynchronous: bool
) -> None:
    from inferscale_memory.kv.key import blob_key

    sim = Simulation(folder, batch=batch, runner=runner, asynchronous=asynchronous)
    before, marks, base = stacked(sim)
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
    assert whole(sim, [512])


def test_an_encode_that_stands_on_a_missing_blob_keeps_nothing(sim: Simulation) -> None:
    before, _, base = stacked(sim)
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
    assert whole(sim, [512])


def test_an_encode_stands_on_nobody_elses_blobs(sim: Simulation) -> None:
    before, _, base = stacked(sim, owner="bob")
    reply = sim.ask(Encode("alice", ((55, 96),), (), base), before + C, tokens=2)
    assert (reply["blobs"], reply["injected"]) == ([], 0)
    assert "not at hand" in reply["error"]


def test_a_span_within_what_is_injected_is_refused(sim: Simulation) -> None:
    before, _, base = stacked(sim)
    reply = sim.ask(Encode("alice", ((50, 96),), (), base), before + C, tokens=2)
    assert reply["blobs"] == []
    assert "within the 55 tokens" in reply["error"]


def test_the_salt_of_an_encode_names_what_it_stands_on(sim: Simulation) -> None:
    before, _, base = stacked(sim)
    salt = sim.salt(Encode("alice", ((55, 96),)))
    reply = sim.ask(Encode("alice", ((55, 96),), (), base), before + C, tokens=2, salt=salt)
    assert reply["blobs"] == []
    assert "salt" in reply["error"]


def test_what_was_prefilled_in_place_of_missing_blobs_is_not_stood_on_later(sim: Simulation) -> None:
    """A refused encode leaves prefilled blocks under its salt."""
    before, marks, base = stacked(sim)
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
    assert whole(sim, [512])


def test_an_encode_that_is_not_injected_into_keeps_nothing(sim: Simulation) -> None:
    """vLLM does not ask a connector about a request that may not read the prefix cache."""
    before, _, base = stacked(sim)
    name = sim.add(before + C, Encode("alice", ((55, 96),), (), base), tokens=2)
    sim.requests[name].skip_reading_prefix_cache = True
    sim.drain()
    assert sim.replies[name]["blobs"] == []
    assert "not injected" in sim.replies[name]["error"]
    assert whole(sim, [512])


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_whose_base_cannot_be_loaded_keeps_nothing(
    folder: Path, batch: int, runner: str, asynchronous: bool
) -> None:
    sim = Simulation(folder, batch=batch, runner=runner, asynchronous=asynchronous)
    before, _, base = stacked(sim)
    failing(sim, "all")
    name = sim.add(before + C, Encode("alice", ((55, 96),), (), base), tokens=9)
    sim.drain()
    reply = sim.replies[name]
    assert (reply["blobs"], reply["error"]) == ([], "what it stands on could not be loaded")
    assert tuple(sim.generated[name]) == answer(before + C, 9), "it goes on as text"
    assert whole(sim, [512])


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_on_blobs_that_is_preempted_midway_stands_on_them_again(
    folder: Path, runner: str, asynchronous: bool
) -> None:
    sim = Simulation(folder, blocks=11, batch=32, runner=runner, asynchronous=asynchronous)
    before, marks, base = stacked(sim)
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
    assert whole(sim, [512])


@pytest.mark.parametrize("lost", [False, True], ids=["", "lost"])
def test_an_encode_on_blobs_that_is_preempted_before_all_was_kept_keeps_nothing(
    folder: Path, lost: bool
) -> None:
    """What it finds in the prefix cache then may be its own, but nobody can tell."""
    sim = Simulation(folder, blocks=11, batch=16)
    before, _, base = stacked(sim)
    sim.add(words(40, 7), tokens=60)
    for _ in range(9):
        sim.step()
    encode = sim.add(before + words(50, 8), Encode("alice", ((55, 105),), (), base), tokens=12)
    while not sim.requests[encode].num_preemptions:
        sim.step()
    assert sim.side._requests[encode].open, "it was preempted before all was kept"
    if lost:
        sim.store.forget(base[0][0])  # as eviction would: nobody is told
    sim.drain()
    assert sim.replies[encode]["blobs"] == []
    assert "preempted" in sim.replies[encode]["error"]
    assert whole(sim, [512])


def test_the_rows_of_an_encode_are_not_those_it_stands_on(folder: Path) -> None:
    """The tier is full: what must give way is neither what is loaded now nor what is pinned."""
    sim = Simulation(folder, device=100)
    before, marks, base = stacked(sim)
    sim.encode("alice", words(45, 20), (0, 45))
    ids = before + C
    reply = sim.ask(Encode("alice", ((55, 96),), (), base), ids, tokens=2)
    assert reply["error"] is None
    ((key, _),) = reply["blobs"]
    assert sim.marks(key) == prefill(ids, marks)[55:]
    assert sim.at_hand("alice", *(name for name, _ in base)) == {name for name, _ in base}
    assert whole(sim, [100])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_an_encode_on_blobs_waits_until_it_and_they_fit(folder: Path, asynchronous: bool) -> None:
    """There is room for its rows now, but only in the place of what it stands on."""
    sim = Simulation(folder, device=100, batch=32, asynchronous=asynchronous)
    before, marks, base = stacked(sim)
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
    assert whole(sim, [100])


def test_an_encode_on_blobs_that_can_never_fit_says_so(folder: Path) -> None:
    sim = Simulation(folder, device=90)
    before, _, base = stacked(sim)
    reply = sim.ask(Encode("alice", ((55, 96),), (), base), before + C, tokens=2)
    assert reply["blobs"] == []
    assert "do not fit the device tier" in reply["error"]
    assert whole(sim, [90])


def test_an_encode_is_discarded_when_a_blob_it_stands_on_is_forgotten_meanwhile(folder: Path) -> None:
    sim = Simulation(folder, batch=16)
    before, _, base = stacked(sim)
    name = sim.add(before + C, Encode("alice", ((55, 96),), (), base), tokens=2)
    sim.step()
    sim.ask(Forget("alice", (base[0][0],)))
    assert sim.replies[name]["blobs"] == []
    assert "forgotten" in sim.replies[name]["error"]
    assert sim.hittable(before + C, sim.salt(Encode("alice", ((55, 96),), (), base))) == 0
    assert whole(sim, [512])


# -- injecting ---


def test_what_became_of_a_request_with_a_receipt_is_told_once_and_to_its_owner(sim: Simulation) -> None:
    segments = chain(sim, "alice", A, B)
    reply, _ = inject(sim, Inject("alice", segments, receipt="r1"), A + B + QUESTION)
    assert sim.ask(Outcome("bob", "r1"))["outcome"] is None
    assert sim.ask(Outcome("alice", "r2"))["outcome"] is None
    assert sim.ask(Outcome("alice", "r1"))["outcome"] == reply
    assert reply["injected"] == 55
    assert sim.ask(Outcome("alice", "r1"))["outcome"] is None


def test_the_outcome_of_a_refused_and_of_an_aborted_request(sim: Simulation) -> None:
    segments = chain(sim, "alice", A)
    inject(sim, Inject("alice", segments, receipt="refused"), A + QUESTION, salt="another")
    assert "only under the salt" in sim.ask(Outcome("alice", "refused"))["outcome"]["refused"]
    name = sim.add(A + QUESTION, Inject("alice", segments, receipt="aborted"), tokens=9)
    sim.step()
    sim.abort(name)
    sim.drain()
    assert sim.ask(Outcome("alice", "aborted"))["outcome"]["injected"] == 30


def test_outcomes_that_nobody_asks_for_are_dropped_the_oldest_first(sim: Simulation) -> None:
    segments = chain(sim, "alice", A)
    for number in range(3):
        inject(sim, Inject("alice", segments, str(number), receipt=f"r{number}"), A + QUESTION)
    for number in range(3, MOST_OF_OWNER + 1):
        sim.side._receipts.keep("alice", f"r{number}", {})
    assert sim.ask(Outcome("alice", "r0"))["outcome"] is None
    assert sim.ask(Outcome("alice", "r1"))["outcome"]["injected"] == 30
    inject(sim, Inject("alice", segments, "again"), A + QUESTION)
    assert len(sim.side._receipts) == MOST_OF_OWNER - 1, "one without a receipt is kept"


def test_a_composition_is_injected_and_only_the_question_is_computed(sim: Simulation) -> None:
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
    assert whole(sim, [512])


def test_a_fact_encoded_elsewhere_is_injected_with_its_own_marks(sim: Simulation) -> None:
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    (b,) = sim.encode("alice", words(7, 6) + B, (7, 32))
    for order in ([(a, A), (b, B)], [(b, B), (a, A)], [(a, A), (a, A)]):
        ids = order[0][1] + order[1][1] + QUESTION
        reply, made = inject(sim, Inject("alice", tuple((key, len(fact)) for key, fact in order)), ids)
        assert reply["injected"] == len(ids) - 20
        assert made == answer(ids, 4, sim.marks(order[0][0]) + sim.marks(order[1][0]))
        assert made != answer(ids, 4)


def test_at_least_one_token_is_left_to_compute(sim: Simulation) -> None:
    segments = chain(sim, "alice", A, B)
    reply, made = inject(sim, Inject("alice", segments), A + B)
    assert reply["injected"] == 54
    assert made == answer(A + B, 4)


def test_a_prompt_of_one_injected_token_is_computed(sim: Simulation) -> None:
    ids = words(1)
    reply, made = inject(sim, Inject("alice", chain(sim, "alice", ids)), ids)
    assert reply["injected"] == 0
    assert made == answer(ids, 4)


def test_a_composition_of_nothing_is_text(sim: Simulation) -> None:
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


def test_only_what_leads_up_to_the_first_missing_blob_is_injected(sim: Simulation) -> None:
    a, b, c = chain(sim, "alice", A, B, C)
    sim.ask(Forget("alice", (b[0],)))
    reply, made = inject(sim, Inject("alice", (a, b, c)), A + B + C + QUESTION)
    assert (reply["injected"], reply["missing"]) == (30, [b[0]])
    assert made == answer(A + B + C + QUESTION, 4)


def test_when_the_first_blob_is_missing_nothing_is_injected(sim: Simulation) -> None:
    a, b = chain(sim, "alice", A, B)
    sim.ask(Forget("alice", (a[0],)))
    reply, made = inject(sim, Inject("alice", (a, b)), A + B + QUESTION)
    assert (reply["injected"], reply["missing"]) == (0, [a[0]])
    assert made == answer(A + B + QUESTION, 4)


def test_where_the_prompt_has_other_ids_than_the_blob_injection_stops(sim: Simulation) -> None:
    segments = chain(sim, "alice", A, B, C)
    ids = A + B[:-1] + (7,) + C + QUESTION
    reply, made = inject(sim, Inject("alice", segments), ids)
    assert reply["injected"] == 30
    assert "ids" in reply["refused"]
    assert made == answer(ids, 4)


def test_a_length_that_is_not_the_blobs_stops_injection(sim: Simulation) -> None:
    a, b = chain(sim, "alice", A, B)
    ids = A + B + QUESTION
    reply, made = inject(sim, Inject("alice", (a, (b[0], 24))), ids)
    assert (reply["injected"], made) == (30, answer(ids, 4))


def test_under_any_other_salt_nothing_is_injected(sim: Simulation) -> None:
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


def test_nobody_injects_what_another_owner_encoded(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    reply, made = inject(sim, Inject("bob", segments), ids)
    assert (reply["injected"], reply["missing"]) == (0, [key for key, _ in segments])
    assert made == answer(ids, 4)
    assert sim.hittable(ids, sim.salt(Inject("alice", segments))) == 0


def test_everybody_injects_what_is_public(sim: Simulation) -> None:
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
def test_what_follows_an_injection_is_computed_in_chunks(folder: Path, batch: int) -> None:
    sim = Simulation(folder, batch=batch)
    segments, ids = chain(sim, "alice", A, B), A + B + words(90, 4)
    reply, made = inject(sim, Inject("alice", segments), ids)
    assert (reply["injected"], made) == (55, answer(ids, 4))


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_a_preempted_injection_is_injected_again_into_its_new_blocks(
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
    assert whole(sim, [512])


def test_an_injection_whose_blob_was_forgotten_while_it_was_preempted_goes_on_as_text(folder: Path) -> None:
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


def test_an_injection_that_found_no_blocks_is_matched_again_when_there_are_some(folder: Path) -> None:
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


def test_mismatched_ids_do_not_keep_the_leading_blobs_out_when_matched_again(folder: Path) -> None:
    sim = Simulation(folder, blocks=9, caching=False)
    segments, ids = chain(sim, "alice", A, B), A + words(25, 44) + QUESTION
    sim.add(words(60, 7), tokens=20)
    sim.step()
    second = sim.add(ids, Inject("alice", segments))
    sim.step()
    sim.drain()
    assert sim.replies[second]["injected"] == 30


# -- with the prefix cache ---


def test_the_same_composition_is_hit_for_free(sim: Simulation) -> None:
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
def test_where_the_cached_part_ends_within_a_fact_the_rest_of_it_is_injected(folder: Path, kept: int) -> None:
    """Blocks of 16 tokens, facts of 30, 25 and 41: no block ends where a fact does."""
    sim = Simulation(folder)
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    (b,) = sim.encode("alice", words(7, 6) + B, (7, 32))
    (c,) = sim.encode("alice", words(9, 8) + C, (9, 50))
    ids, ask = A + B + C + QUESTION, Inject("alice", ((a, 30), (b, 25), (c, 41)))
    inject(sim, ask, ids)
    hashes = sim.requests[f"r{sim._serial}"].block_hashes
    sim.side._residency.evict_hashes(hashes[kept:])
    assert sim.hittable(ids, sim.salt(ask)) == 16 * kept
    reply, made = inject(sim, ask, ids)
    assert reply["injected"] == 96 - 16 * kept
    assert made == answer(ids, 4, sim.marks(a) + sim.marks(b) + sim.marks(c))


def test_blobs_that_are_cached_already_are_not_brought_to_the_device(folder: Path) -> None:
    sim = Simulation(folder, device=64, host=256)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    ask = Inject("alice", segments)
    inject(sim, ask, ids)
    hashes = sim.requests[f"r{sim._serial}"].block_hashes
    sim.encode("alice", words(60, 77), (0, 60))
    assert all(0 not in sim.store.get(key).rows for key, _ in segments)
    sim.side._residency.evict_hashes(hashes[2:])
    reply, made = inject(sim, ask, ids)
    assert (reply["injected"], made) == (23, answer(ids, 4))  # all but 32: A, and the beginning of B
    assert [0 in sim.store.get(key).rows for key, _ in segments] == [False, True]


def test_requests_of_one_step_share_the_blocks_that_one_of_them_loads(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B
    names = [sim.add(ids + words(n, n), Inject("alice", segments)) for n in range(1, 4)]
    assert set(sim.step().num_scheduled_tokens) == set(names)
    sim.drain()
    for n, name in enumerate(names, start=1):
        assert tuple(sim.generated[name]) == answer(ids + words(n, n), 4)
    assert [sim.replies[name]["injected"] for name in names] == [55, 7, 7]


def test_an_injection_that_may_not_read_the_prefix_cache_is_text(sim: Simulation) -> None:
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


# -- with a sliding window ---


@pytest.mark.parametrize("batch", [16, 64])
def test_what_slid_out_of_the_window_is_not_written(folder: Path, batch: int) -> None:
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


def test_with_a_window_a_composition_is_hit_and_completed(folder: Path) -> None:
    sim = Simulation(folder, window=24)
    ids = words(90) + QUESTION
    keys = sim.encode("alice", ids[:90], (0, 40), (40, 90))
    ask = Inject("alice", ((keys[0], 40), (keys[1], 50)))
    for extra in ((), (9, 9), words(30, 3)):
        _, made = inject(sim, ask, ids + extra)
        assert made == answer(ids + extra, 4, window=24)


# -- tiers ---


def test_a_blob_on_the_host_is_brought_up_before_it_is_loaded(folder: Path) -> None:
    sim = Simulation(folder, device=64, host=256)
    segments = chain(sim, "alice", A, B)
    sim.encode("alice", words(60, 77), (0, 60))
    assert all(0 not in sim.store.get(key).rows for key, _ in segments)
    reply, made = inject(sim, Inject("alice", segments), A + B + QUESTION)
    assert (reply["injected"], made) == (55, answer(A + B + QUESTION, 4))
    assert whole(sim, [64, 256])


def test_the_reply_says_how_much_was_brought_up_for_it(folder: Path) -> None:
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


def test_of_a_composition_larger_than_the_device_the_leading_part_is_injected(folder: Path) -> None:
    sim = Simulation(folder, device=64, host=256)
    a, b = chain(sim, "alice", A, B)
    (c,) = sim.encode("alice", A + B + C, (55, 96))
    ids = A + B + C + QUESTION
    for _ in range(3):
        reply, made = inject(sim, Inject("alice", (a, b, (c, 41)), f"nonce{_}"), ids)
        assert (reply["injected"], made) == (55, answer(ids, 4))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "async"])
def test_injections_that_do_not_fit_together_are_injected_one_step_after_the_other(
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
    assert whole(sim, [64, 512])


def test_an_injection_does_not_wait_for_an_encode(folder: Path) -> None:
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
    assert whole(sim, [64, 512])


def test_a_reserve_and_an_injection_of_one_step_do_not_take_each_others_rows(folder: Path) -> None:
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
    assert whole(sim, [100, 512])


# -- loads that fail ---


def failing(sim: Simulation, *names: str) -> None:
    for rank in sim.ranks:
        rank.fails = lambda name: name in names or "all" in names


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("caching", [True, False], ids=["", "no prefix cache"])
def test_a_failed_load_is_recomputed_to_the_texts_answer(folder: Path, batch: int, caching: bool) -> None:
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
    assert whole(sim, [512])


def test_after_a_failed_load_nothing_can_be_hit_and_the_next_request_is_injected(sim: Simulation) -> None:
    (a,) = sim.encode("alice", words(12, 5) + A, (12, 42))
    ids, ask = A + QUESTION, Inject("alice", ((a, 30),))
    failing(sim, "all")
    inject(sim, ask, ids, tokens=40)
    assert sim.hittable(ids, sim.salt(ask)) == 0
    failing(sim)
    reply, made = inject(sim, ask, ids)
    assert (reply["injected"], made) == (30, answer(ids, 4, sim.marks(a)))


def test_a_load_that_fails_on_one_rank_has_failed(folder: Path) -> None:
    sim = Simulation(folder, ranks=2)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    sim.ranks[1].fails = lambda name: True
    reply, made = inject(sim, Inject("alice", segments), ids)
    assert (reply["injected"], made) == (0, answer(ids, 4))
    assert sim.hittable(ids, sim.salt(Inject("alice", segments))) == 0


def test_a_failed_load_of_one_request_leaves_the_others_of_its_step_alone(sim: Simulation) -> None:
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


def test_requests_that_share_blocks_of_a_failed_load_are_recomputed_too(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    first, second = (sim.add(ids + words(9, n), Inject("alice", segments)) for n in (1, 2))
    failing(sim, first)
    sim.drain()
    for n, name in ((1, first), (2, second)):
        assert tuple(sim.generated[name]) == answer(ids + words(9, n), 4)


def test_a_request_aborted_while_its_load_fails_leaves_no_wrong_block_behind(sim: Simulation) -> None:
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
    assert whole(sim, [512])


def test_a_request_whose_load_failed_is_not_loaded_again_when_it_is_resumed(folder: Path) -> None:
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
    assert whole(sim, [512])


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
def test_loaded_or_failed_the_answer_is_right_however_the_engine_runs(
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
    assert whole(sim, [512])


@pytest.mark.parametrize("options", AHEAD, ids=str)
def test_a_request_waits_a_step_only_where_vllm_could_not_take_a_failed_load_back(
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
def test_a_request_aborted_while_it_waits_for_its_load_leaves_nothing_behind(
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
    assert whole(sim, [512])


# -- aborts ---


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_aborted_injection_leaves_nothing_behind(sim: Simulation, steps: int) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    name = sim.add(ids, Inject("alice", segments))
    for _ in range(steps):
        sim.step()
    sim.abort(name)
    sim.drain()
    _, made = inject(sim, Inject("alice", segments), ids)
    assert made == answer(ids, 4)
    assert whole(sim, [512])


def test_an_injection_aborted_in_flight_does_not_disturb_who_gets_its_blocks(folder: Path) -> None:
    sim = Simulation(folder, blocks=8, asynchronous=True)
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    first = sim.add(ids, Inject("alice", segments))
    sim.step()
    sim.abort(first)
    second = sim.add(words(75, 12), tokens=10)
    sim.drain()
    assert tuple(sim.generated[second]) == answer(words(75, 12), 10)
    assert whole(sim, [512])


# -- forgetting ---


def test_a_forgotten_blob_is_gone_and_says_how_many_were_dropped(sim: Simulation) -> None:
    a, b = (key for key, _ in chain(sim, "alice", A, B))
    assert sim.ask(Forget("alice", (a, "unknown"))) == {"dropped": 1}
    assert sim.at_hand("alice", a, b) == {b}
    assert sim.ask(Forget("alice", (a,))) == {"dropped": 0}
    assert whole(sim, [512])


def test_nobody_forgets_what_another_owner_encoded(sim: Simulation) -> None:
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


def test_forgetting_a_tag_evicts_the_blocks_in_which_it_was_text(sim: Simulation) -> None:
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


def test_what_a_refused_request_mentions_is_evicted_too(sim: Simulation) -> None:
    """It was prefilled all the same, under whatever salt it came with."""
    ids = words(80)
    sim.ask(Encode("alice", ((0, 20),), (("fact", 20),)), ids, tokens=2, salt="encode")
    sim.ask(Inject("alice", (), "", (("fact", 20),)), ids, tokens=2, salt="inject")
    assert [sim.hittable(ids, salt) for salt in ("encode", "inject")] == [64, 64]
    sim.ask(Forget("alice", (), ("fact",)))
    assert [sim.hittable(ids, salt) for salt in ("encode", "inject")] == [16, 16]


@pytest.mark.parametrize("by", ["tag of the kept", "tag of the context", "key"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_encode_that_finishes_after_its_fact_was_forgotten_is_discarded(
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
    assert sim.replies[name] == {"blobs": [], "error": "a fact in it was forgotten meanwhile"}
    assert len(sim.store) == 0
    assert sim.hittable(ids, sim.salt(ask)) <= (0 if by == "tag of the context" else 16)
    assert whole(sim, [512])


def test_an_encode_stored_but_not_yet_answered_is_discarded_when_its_fact_is_forgotten(
    sim: Simulation,
) -> None:
    """Its client does not know the key yet, so it can forget it by its tag only."""
    name = sim.add(words(60), Encode("alice", ((30, 60),), (("fact", 30),)), tokens=9)
    while len(sim.store) == 0:
        sim.step()
    sim.add((7,), Forget("alice", (), ("fact",)), tokens=1)
    sim.drain()
    assert sim.replies[name] == {"blobs": [], "error": "a fact in it was forgotten meanwhile"}
    assert len(sim.store) == 0
    assert whole(sim, [512])


def test_a_fact_that_stood_as_text_in_another_owners_prompt_is_evicted_there_too(sim: Simulation) -> None:
    """An agent's question may recall a user's fact: it is mentioned under the agent, and forgotten by the user."""
    ids, ask = words(80), Inject("agent:a", (), "", (("user's fact", 40),))
    inject(sim, ask, ids)
    sim.ask(Forget("user:u", (), ("user's fact",)))
    assert sim.hittable(ids, sim.salt(ask)) == 32


def test_a_tag_that_is_another_ones_key_is_told_apart_from_it(sim: Simulation) -> None:
    ((key, _),) = segments = chain(sim, "alice", A)
    ids, ask = A + QUESTION, Inject("alice", segments)
    inject(sim, ask, ids)
    sim.ask(Forget("bob", (), (key,)))
    assert sim.hittable(ids, sim.salt(ask)) == 48
    assert sim.at_hand("alice", key) == {key}


@pytest.mark.parametrize("by", ["key", "tag"])
def test_a_running_injection_whose_fact_is_forgotten_leaves_none_of_it_cached(
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
    assert whole(sim, [512])


def test_a_waiting_injection_whose_blob_is_forgotten_is_served_as_text(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    name = sim.add(ids, Inject("alice", segments))
    sim.add((7,), Forget("alice", (segments[0][0],)), tokens=1)
    sim.drain()
    assert sim.replies[name]["injected"] == 0
    assert tuple(sim.generated[name]) == answer(ids, 4)


def test_forgetting_frees_the_rows_on_every_tier(folder: Path) -> None:
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


# -- what several ranks report ---


def test_a_piece_is_caught_only_where_all_ranks_caught_it() -> None:
    one, two = ("r", 0, 4), ("r", 4, 9)
    assert Report(captured={one, two}).merge(Report(captured={two})).captured == {two}
    assert Report(captured={one}).merge(Report(lost={"r": "why"})).captured == set()


def test_what_failed_on_any_rank_has_failed() -> None:
    fine = Report(loaded={"a": 0.2, "b": 0.1}, status="")
    broken = Report(loaded={"a": 0.3}, failed_loads={"b"}, lost={"c": "why"}, status="odd")
    for merged in (fine.merge(broken), broken.merge(fine)):
        assert merged.loaded == {"a": 0.3}
        assert (merged.failed_loads, merged.lost, merged.status) == ({"b"}, {"c": "why"}, "odd")


def test_the_check_has_passed_when_all_ranks_say_so_and_none_says_why_not() -> None:
    assert Report(status="").merge(Report(status="")).status == ""
    assert Report(status="").merge(Report()).status == ""
    assert Report().merge(Report()).status is None


def test_a_report_of_nothing_is_not_sent() -> None:
    assert not Report()
    assert Report(status="")
    assert Report(loaded={"a": 0.0})


# -- asking ---


def test_a_probe_says_which_keys_are_at_hand_and_what_model_this_is(sim: Simulation) -> None:
    (mine,) = sim.encode("alice", words(30), (0, 30))
    (theirs,) = sim.encode("bob", words(30, 1), (0, 30))
    (public,) = sim.encode(PUBLIC_OWNER, words(30, 2), (0, 30))
    assert sim.ask(Probe("alice", (mine, theirs, public, "unknown"))) == {
        "at_hand": [mine, public],
        "fingerprint": sim.fingerprint,
        "unsupported": None,
    }


def test_a_malformed_request_is_served_as_text_and_told_why(sim: Simulation) -> None:
    for raw in ({NAME: 7}, {NAME: {"owner": "alice", "token": "forged", "op": "probe"}}):
        name = sim.add(words(30), raw=raw)
        sim.drain()
        assert sim.replies[name]["error"] == sim.replies[name]["refused"] != ""
        assert tuple(sim.generated[name]) == answer(words(30), 4)


@pytest.mark.parametrize(
    "raw", [None, {}, {"do_remote_prefill": True}, [], "x", 7, [NAME], {"other": {NAME: 1}}]
)
def test_a_request_that_asks_nothing_of_us_is_told_nothing(sim: Simulation, raw: Any) -> None:
    name = sim.add(words(30), raw=raw)
    sim.drain()
    assert sim.replies[name] == {}
    assert tuple(sim.generated[name]) == answer(words(30), 4)


def test_two_thousand_random_parameters_end_nothing(sim: Simulation) -> None:
    from tests.connector.test_protocol import anything, mutated

    draw = random.Random(11)
    for count in range(2_000):
        raw = mutated(draw) if count % 2 else draw.choice([anything(draw), {NAME: anything(draw)}])
        sim.add((7, 8, 9), raw=raw, tokens=1)
        if count % 20 == 0:
            sim.drain()
    sim.drain()
    assert len(sim.finished) == 2_001
    assert whole(sim, [512])


def test_where_blobs_cannot_be_used_everything_is_text_and_told_why(sim: Simulation) -> None:
    segments, ids = chain(sim, "alice", A, B), A + B + QUESTION
    sim.side.observe(Report(status="its attention is odd"))
    reply, made = inject(sim, Inject("alice", segments), ids)
    assert (reply["injected"], reply["refused"], made) == (0, "its attention is odd", answer(ids, 4))
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)
    assert reply == {"blobs": [], "error": "its attention is odd"}
    assert sim.ask(Probe("alice"))["unsupported"] == "its attention is odd"


def test_a_probe_that_came_before_the_check_is_told_how_the_check_ended(folder: Path) -> None:
    sim = Simulation(folder, start=False)
    name = sim.add(words(10), Probe("alice"), tokens=2)
    sim.schedule()
    sim.side.observe(Report(status="its attention is odd"))
    sim.take()
    sim.drain()
    assert sim.replies[name]["unsupported"] == "its attention is odd"


def test_before_the_check_an_encode_fails_and_can_be_sent_again(folder: Path) -> None:
    sim = Simulation(folder, start=False)
    reply = sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)
    assert (reply["blobs"], reply["error"]) == ([], "it was lost on purpose")
    assert sim.ask(Encode("alice", ((0, 20),)), words(30), tokens=2)["error"] is None


@pytest.mark.parametrize("kind", ["images", "embeddings", "no ids"])
def test_prompts_that_are_not_plain_token_ids_are_served_as_they_are(sim: Simulation, kind: str) -> None:
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


# -- what vLLM can log ---


@pytest.mark.parametrize("kind", ["inject", "forget", "refused", "malformed"])
def test_what_a_request_carries_for_us_is_in_nothing_that_vllm_can_print(sim: Simulation, kind: str) -> None:
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
    request = Request("r", list(words(9)), sampling, None, cache_salt="s", block_hasher=sim._hasher)
    assert token in repr(sampling.extra_args)
    sim.side.arrived(request)
    shown = (sampling, request.sampling_params, sampling.extra_args, request.kv_transfer_params)
    for told in map(repr, shown):
        assert not [part for part in (token, token.split(".")[1], "ada", "k" * 40, "receipt") if part in told]
    assert request.kv_transfer_params == {"do_remote_prefill": False}, "it is another connector's"
    assert sampling.extra_args == {"kv_transfer_params": {"do_remote_prefill": False}, "other": 1}
    assert asked[NAME]["token"] == token, "what the client holds is not changed"
    assert sim.side.finished(request) is not None


# -- adapters ---


def adapter(name: str) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=f"/{name}", adapter_id=1, name=name)


def arrive(sim: Simulation, name: str, ids: Ids, ask: Encode | Inject, lora: str, salt_lora: str) -> Any:
    """Hand the scheduler side a request that uses an adapter, salted for one."""
    lora_of = f"{salt_lora}:1:/{salt_lora}" if salt_lora else ""
    same = (sim.secret, sim.fingerprint, ask.owner)
    salt = (
        protocol.encode_salt(*same, lora=lora_of)
        if isinstance(ask, Encode)
        else protocol.compose_salt(*same, ask.segments, lora=lora_of)
    )
    request = SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(ids),
        lora_request=adapter(lora) if lora else None,
        cache_salt=salt,
        kv_transfer_params=protocol.params(ask, sim.secret),
        block_hashes=[],
        num_computed_tokens=0,
        mm_features=[],
    )
    sim.side.arrived(request)
    return request


def encode_with(sim: Simulation, lora: str) -> str:
    """Encode A directly on the scheduler side, with an adapter; its key."""
    request = arrive(sim, f"encode {lora}", A, Encode("alice", ((0, 30),)), lora, lora)
    assert sim.side.match(request, 0) == (0, False)
    sim.side.allocated(request, [1, 2], 0)
    orders = sim.side.build({request.request_id: 30}, lambda name: [1, 2])
    (capture,) = orders.captures
    assert capture.slots.tolist() == list(range(16, 46))
    sim.side.observe(Report(captured={capture.piece}))
    reply = sim.side.finished(request)
    assert reply is not None
    ((key, tokens),) = reply[NAME]["blobs"]
    assert tokens == 30
    return str(key)


def test_an_adapter_makes_another_key(sim: Simulation) -> None:
    assert len({encode_with(sim, lora) for lora in ("", "one", "two")}) == 3


def test_a_blob_is_injected_only_with_the_adapter_it_was_encoded_with(sim: Simulation) -> None:
    keys = {lora: encode_with(sim, lora) for lora in ("", "one", "two")}
    for made_with, key in keys.items():
        for used_with in keys:
            ask = Inject("alice", ((key, 30),))
            request = arrive(sim, f"{made_with}-{used_with}", A + QUESTION, ask, used_with, used_with)
            assert sim.side.match(request, 0) == (30 if made_with == used_with else 0, False)


def test_the_salt_names_the_adapter(sim: Simulation) -> None:
    key = encode_with(sim, "one")
    request = arrive(sim, "wrong salt", A + QUESTION, Inject("alice", ((key, 30),)), "one", "two")
    assert sim.side.match(request, 0) == (0, False)
    request = arrive(sim, "wrong salt too", A, Encode("alice", ((0, 30),)), "one", "")
    assert "salt" in sim.side.finished(request)[NAME]["error"]  # type: ignore[index]


# -- everything at once ---


def turmoil(folder: Path, shape: str, runner: str, asynchronous: bool, seed: int, steps: int) -> None:
    """Random encodes, injections, texts, aborts, forgets and failed loads of three owners, whose facts are chains:
    any mixture of injected, cached and computed gives the text's one."""
    options: dict[str, Any] = {
        "roomy": {},
        "tight": {"blocks": 24, "batch": 40, "device": 120, "host": 200},
        "tight, no host": {"blocks": 24, "batch": 40, "device": 150},
        "window": {"window": 40, "blocks": 30, "device": 200, "host": 200},
        "no cache": {"caching": False, "blocks": 40, "device": 200, "host": 100},
        "two ranks": {"ranks": 2, "device": 200, "host": 300},
        "two stages": {"stages": 2, "blocks": 24, "batch": 40, "device": 120, "host": 200},
    }[shape]
    sim = Simulation(folder, runner=runner, asynchronous=asynchronous, **options)
    draw = random.Random(seed)
    unlucky, unheard = set(), set()
    for rank in sim.ranks:
        rank.fails = unlucky.__contains__
        rank.loses = unheard.__contains__
    chains = {
        owner: [words(draw.randrange(3, 24), hash((owner, n))) for n in range(5)] for owner in (1, 2, 3)
    }
    keys: dict[tuple[int, int], str] = {}
    asked: dict[str, tuple[Ids, int]] = {}
    encodes: dict[str, tuple[int, range]] = {}

    def prompt(owner: int, facts: int) -> Ids:
        return tuple(token for fact in chains[owner][:facts] for token in fact)

    def encode() -> None:
        owner, first = draw.choice((1, 2, 3)), draw.randrange(5)
        kept = range(first, draw.randrange(first + 1, 6))
        spans = tuple((len(prompt(owner, n)), len(prompt(owner, n + 1))) for n in kept)
        mentions = tuple((f"tag{n}", len(prompt(owner, n))) for n in range(kept.stop))
        name = sim.add(
            prompt(owner, kept.stop), Encode(str(owner), spans, mentions), tokens=draw.choice((2, 2, 9))
        )
        encodes[name] = owner, kept
        asked[name] = prompt(owner, kept.stop), sim.requests[name].max_tokens
        if draw.random() < 0.1:
            unheard.add(name)

    def inject_some() -> None:
        owner, facts = draw.choice((1, 2, 3)), draw.randrange(6)
        segments = []
        for n in range(facts):
            segments.append((keys.get((owner, n), "never stored"), len(chains[owner][n])))
        mentions = tuple((f"tag{n}", len(prompt(owner, n))) for n in range(facts))
        nonce = draw.choice(("", str(draw.randrange(8))))
        ids = prompt(owner, facts) + words(draw.randrange(1, 40), draw.randrange(4))
        if draw.random() < 0.1 and facts:
            ids = prompt(owner, facts)
        name = sim.add(
            ids, Inject(str(owner), tuple(segments), nonce, mentions), tokens=draw.randrange(1, 30)
        )
        asked[name] = ids, sim.requests[name].max_tokens
        if draw.random() < 0.15:
            unlucky.add(name)

    def text() -> None:
        ids = words(draw.randrange(1, 60), draw.randrange(10))
        asked[sim.add(ids, tokens=5)] = ids, 5

    def forget() -> None:
        owner = draw.choice((1, 2, 3))
        dropped = draw.randrange(5)
        names = [keys[pair] for pair in list(keys) if pair[0] == owner and pair[1] >= dropped]
        tags = (f"tag{dropped}",) if draw.random() < 0.5 else ()
        asked[sim.add((7,), Forget(str(owner), tuple(names), tags), tokens=1)] = (7,), 1

    def abort() -> None:
        running = [name for name in asked if name not in sim.finished]
        if running:
            sim.abort(draw.choice(running))

    def collect() -> None:
        for name in [name for name in encodes if name in sim.replies]:
            owner, kept = encodes.pop(name)
            for n, (key, tokens) in zip(kept, sim.replies[name]["blobs"], strict=False):
                assert tokens == len(chains[owner][n])
                keys[owner, n] = key

    for count in range(steps):
        if len(sim.scheduler.requests) < 12:
            draw.choices([encode, inject_some, text, forget], weights=[6, 18, 2, 1])[0]()
        if draw.random() < 0.04:
            abort()
        sim.schedule()
        if draw.random() < 0.03:  # in between, as vLLM takes aborts in
            abort()
        while len(sim._flight) > sim._ahead:
            sim.take()
        collect()
        if count % 100 == 99:
            sim.drain()
            collect()
            assert whole(sim, [options.get("device", 512), *([options["host"]] if "host" in options else [])])
    sim.drain()
    whole_prompts = 0
    for name, (ids, tokens) in asked.items():
        made = tuple(sim.generated[name])
        assert made == answer(ids, len(made), window=sim.window), f"{name}: {sim.replies.get(name)}"
        whole_prompts += len(made) == tokens
    assert whole_prompts > steps // 5
    assert sum(reply.get("injected", 0) > 0 for reply in sim.replies.values()) > steps // 40
    preempted = sum(request.num_preemptions > 0 for request in sim.requests.values())
    assert preempted > steps // 100 or not shape.startswith("tight")
    for entry in sim.store._entries.values():  # and every blob that is left holds what was written into it
        ((owner, n),) = {pair for pair, key in keys.items() if key == entry.key} or {(0, 0)}
        if owner:
            start = len(prompt(owner, n))
            marks = prefill(prompt(owner, n + 1), window=sim.window)
            assert sim.marks(entry.key) == marks[start:]
            assert np.array_equal(len(marks) - start, entry.tokens)


@pytest.mark.parametrize(
    ("shape", "runner", "asynchronous"),
    [
        ("roomy", "v1", False),
        ("roomy", "v2", True),
        ("tight", "v1", False),
        ("tight", "v1", True),
        ("tight", "v2", False),
        ("tight", "v2", True),
        ("tight, no host", "v1", False),
        ("window", "v1", False),
        ("window", "v2", True),
        ("no cache", "v1", True),
        ("two ranks", "v1", False),
        ("two stages", "v1", False),
    ],
    ids=str,
)
def test_whatever_happens_every_answer_is_right_and_nothing_is_left_behind(
    folder: Path, shape: str, runner: str, asynchronous: bool
) -> None:
    turmoil(folder, shape, runner, asynchronous, seed=0, steps=600)
