"""Everything at once: random requests of several owners, with aborts, failures and forgets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferscale_memory.connector.protocol import Encode, Forget, Inject
from tests.connector.scenarios import (
    no_leaks,
    words,
)
from tests.connector.simulation import Ids, Simulation, answer, prefill
from tests.kv.store_view import entries


def run_random_traffic(
    folder: Path, shape: str, runner: str, asynchronous: bool, seed: int, steps: int
) -> None:
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
        sim.take_due()
        collect()
        if count % 100 == 99:
            sim.drain()
            collect()
            assert no_leaks(
                sim, [options.get("device", 512), *([options["host"]] if "host" in options else [])]
            )
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
    for entry in entries(sim.store):  # and every blob that is left holds what was written into it
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
def test_under_random_traffic_every_answer_is_right_and_nothing_is_left_behind(
    folder: Path, shape: str, runner: str, asynchronous: bool
) -> None:
    run_random_traffic(folder, shape, runner, asynchronous, seed=0, steps=600)
