"""One owner's use of the blob tiers leaves the others theirs."""

from __future__ import annotations

import hmac
import random
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.connector.protocol import Encode, Inject, Outcome, Probe
from inferscale_memory.connector.scheduler.receipts import MOST, MOST_OF_OWNER, Receipts
from tests.connector.simulation import Ids, Simulation
from tests.kv.store_view import rows_in_use


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def words(count: int, seed: int) -> Ids:
    draw = random.Random(seed)
    return tuple(draw.randrange(8, 500) for _ in range(count))


def remember(sim: Simulation, owner: str, seed: int) -> tuple[tuple[tuple[str, int], ...], Ids]:
    """A composition of four facts of twenty tokens, and its ids."""
    ids = words(80, seed)
    keys = sim.encode(owner, ids, *((20 * n, 20 * n + 20) for n in range(4)))
    return tuple((key, 20) for key in keys), ids


def test_an_owner_that_recalls_thirteen_compositions_evicts_nobody_elses(folder: Path) -> None:
    """The device holds five of them, the host ten."""
    sim = Simulation(folder, blocks=256, device=420, host=840, batch=256)
    mine, my_ids = remember(sim, "ada", 1)
    theirs = [remember(sim, "mallory", 10 + n) for n in range(13)]
    for round_ in range(3):
        for composition, ids in theirs:
            sim.ask(Inject("mallory", composition, str(round_)), ids + words(9, 3), tokens=2)
        reply = sim.ask(Inject("ada", mine, str(round_)), my_ids + words(9, 2), tokens=2)
        assert (reply["injected"], reply["promoted"]) == (80, 0), "it was not on the device any more"
    held = rows_in_use(sim.store)
    assert held[0] > 340, "the rest of the tier is hers"


def test_an_encode_keeps_at_most_a_quarter_of_the_device_tier(folder: Path) -> None:
    sim = Simulation(folder, device=400)
    reply = sim.ask(Encode("alice", ((0, 101),)), words(120, 1), tokens=2)
    assert reply["blobs"] == []
    for part in ("101 tokens", "a quarter of the device tier of 400", "device_bytes", "keep fewer"):
        assert part in reply["error"]
    reply = sim.ask(Encode("alice", ((0, 50), (60, 111))), words(120, 1), tokens=2)
    assert "101 tokens" in reply["error"]
    assert sim.ask(Encode("alice", ((0, 50), (60, 110))), words(120, 1), tokens=2)["error"] is None
    assert sim.free() == [300]


def test_four_encodes_of_that_size_are_under_way_at_once(folder: Path) -> None:
    sim = Simulation(folder, device=400, batch=480)
    names = [sim.add(words(110, n), Encode(f"o{n}", ((0, 100),)), tokens=2) for n in range(4)]
    sim.step()
    assert sim.free() == [0]
    sim.drain()
    assert [sim.replies[name]["error"] for name in names] == [None] * 4


# -- receipts ---


def test_receipts_that_one_owner_never_asks_for_drop_nobody_elses() -> None:
    receipts = Receipts()
    receipts.keep("ada", "r", {"injected": 1})
    for n in range(10 * MOST):
        receipts.keep("mallory", f"r{n}", {})
    assert len(receipts) == MOST_OF_OWNER + 1
    assert receipts.take("ada", "r") == {"injected": 1}
    assert receipts.take("ada", "r") is None
    assert receipts.take("mallory", f"r{10 * MOST - 1}") == {}


def test_receipts_are_few_however_many_owners_keep_some() -> None:
    receipts = Receipts()
    for n in range(3 * MOST):
        receipts.keep(f"o{n}", "r", {})
        receipts.keep(f"o{n}", "r", {"again": n})
    assert len(receipts) == MOST
    assert receipts.take(f"o{3 * MOST - 1}", "r") == {"again": 3 * MOST - 1}
    for n in range(3 * MOST):
        receipts.take(f"o{n}", "r")
    assert (len(receipts), receipts._replies) == (0, {})


# -- time ---


def test_secrets_are_compared_in_a_time_that_tells_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A salt that is right but for its end takes as long to refuse as one that is wrong from the beginning."""
    sim = Simulation(folder)
    compared: list[Any] = []
    real = hmac.compare_digest

    def watched(one: Any, other: Any) -> bool:
        compared.append(one)
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    inject = Inject("alice", (), "n", (("t", 0),))
    token_mac, seal = 40, 40
    for ask in (inject, Encode("alice", ((0, 5),), (("t", 0),))):
        compared.clear()
        sim.ask(ask, words(30, 1), tokens=2)
        assert sim.salt(ask).encode() in compared
        assert [len(one) for one in compared] == [token_mac, seal, 40]
    for salt in ("", "é", sim.salt(inject)[:-1] + "x"):
        assert "salt" in sim.ask(inject, words(30, 1), tokens=2, salt=salt)["refused"]
    assert sim.ask(Probe("alice"))["unsupported"] is None
    assert sim.ask(Outcome("alice", "r"))["outcome"] is None
