"""Facts, and the steps that many tests of the scheduler side share: see `simulation` for what replaces tensors.

A blob that was encoded after the same tokens as in the prompt gives the answer of the plain text, whatever is injected.
A blob that was encoded elsewhere gives the answer of its own marks. The tests compute both without an engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from inferscale_memory.connector.protocol import Inject
from tests.connector.simulation import Ids, Simulation
from tests.kv.store_view import assert_at_rest, rows_in_use

RUNNERS = ["v1", "v2"]


def words(count: int, seed: int = 0) -> Ids:
    draw = random.Random(seed)
    return tuple(draw.randrange(8, 500) for _ in range(count))


def chain(sim: Simulation, owner: str, *facts: Ids, tags: Sequence[str] = ()) -> tuple[tuple[str, int], ...]:
    """Encode each fact after all earlier ones. Returns the composition, which gives the same answer as the text."""
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
    """Serve one request alone. Returns its reply, and the tokens that it generated."""
    name = sim.add(ids, ask, tokens=tokens, **options)
    sim.drain()
    return sim.replies[name], tuple(sim.generated[name])


def no_leaks(sim: Simulation, capacity: Sequence[int]) -> bool:
    """Every row is free or belongs to a blob, free rows are empty, and no request is remembered."""
    rows = zip(sim.free(), rows_in_use(sim.store), strict=True)
    assert [free + used for free, used in rows] == list(capacity)
    assert sim.side.requests == {}
    assert sim.side.injector.loading == {}
    assert len(sim.side.forgetter.running) == len(sim.side.forgetter.running._holders) == 0
    assert_at_rest(sim.store)
    assert sim.stray() == []
    return True


def encoded_base(
    sim: Simulation, *, owner: str = "alice"
) -> tuple[Ids, list[int], tuple[tuple[str, int], ...]]:
    """Two facts that were encoded elsewhere, for an encode to depend on: their ids, their marks, the composition."""
    (a,) = sim.encode(owner, words(12, 5) + A, (12, 42))
    (b,) = sim.encode(owner, words(7, 6) + B, (7, 32))
    return A + B, sim.marks(a) + sim.marks(b), ((a, 30), (b, 25))


def failing(sim: Simulation, *names: str) -> None:
    """From now on loads of these requests fail, or of `"all"`."""
    for rank in sim.ranks:
        rank.fails = lambda name: name in names or "all" in names


A, B, C = words(30, 1), words(25, 2), words(41, 3)


QUESTION = words(20, 9)
