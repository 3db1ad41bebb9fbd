"""What one rank does must not depend on what went wrong on it alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inferscale_memory.connector.metadata import Capture, Orders
from inferscale_memory.connector.worker import WorkerSide
from inferscale_memory.kv.store import Move

SLOTS = np.arange(8, dtype=np.int64)
CAPTURE = Orders(captures=(Capture(("encode", 0, 8), SLOTS, SLOTS),))
CHECK = Orders(repeated=SLOTS)


def step() -> Any:
    return SimpleNamespace(attn_metadata={"layer": object()}, slot_mapping={}, skip_compiled=False)


def rank() -> WorkerSide:
    return WorkerSide([100], torch.float32, 16, lambda: (), lambda _: False)


@pytest.mark.parametrize("orders", [CAPTURE, CHECK], ids=["capture", "check"])
@pytest.mark.parametrize("trouble", ["none", "its check failed", "its blobs could not be moved", "no hooks"])
def test_all_ranks_leave_the_compiled_graph_together(
    orders: Orders, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stayed in it would wait for the others in a collective operation that they do not run."""
    side, context = rank(), step()
    if trouble == "its check failed":
        side._settle("it has another kind of layer on this rank")
    if trouble == "its blobs could not be moved":
        orders = Orders((Move(0, SLOTS, 1, SLOTS),), (), orders.captures, orders.repeated)
    if trouble == "no hooks":
        monkeypatch.setattr(side, "_stand_ready", lambda *_: 1 / 0)
    side.begin(orders, context)
    assert context.skip_compiled
    side.end()
    if orders.captures:
        report = side.report()
        assert report is not None
        assert set(report.lost) == {"encode"}


def test_a_step_in_which_nothing_is_caught_stays_compiled() -> None:
    side, context = rank(), step()
    side.begin(Orders(), context)
    assert not context.skip_compiled
