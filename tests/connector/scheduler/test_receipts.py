"""Outcomes that clients of streamed answers ask for afterwards."""

from __future__ import annotations

from inferscale_memory.connector.protocol import Inject, Outcome
from inferscale_memory.connector.scheduler.receipts import MOST_OF_OWNER
from tests.connector.scenarios import (
    QUESTION,
    A,
    B,
    chain,
    inject,
)
from tests.connector.simulation import Simulation


def test_the_outcome_of_a_request_is_returned_once_and_only_to_its_owner(sim: Simulation) -> None:
    segments = chain(sim, "alice", A, B)
    reply, _ = inject(sim, Inject("alice", segments, receipt="r1"), A + B + QUESTION)
    assert sim.ask(Outcome("bob", "r1"))["outcome"] is None
    assert sim.ask(Outcome("alice", "r2"))["outcome"] is None
    assert sim.ask(Outcome("alice", "r1"))["outcome"] == reply
    assert reply["injected"] == 55
    assert sim.ask(Outcome("alice", "r1"))["outcome"] is None


def test_refused_and_aborted_requests_have_outcomes_too(sim: Simulation) -> None:
    segments = chain(sim, "alice", A)
    inject(sim, Inject("alice", segments, receipt="refused"), A + QUESTION, salt="another")
    assert "only under the salt" in sim.ask(Outcome("alice", "refused"))["outcome"]["refused"]
    name = sim.add(A + QUESTION, Inject("alice", segments, receipt="aborted"), tokens=9)
    sim.step()
    sim.abort(name)
    sim.drain()
    assert sim.ask(Outcome("alice", "aborted"))["outcome"]["injected"] == 30


def test_the_oldest_outcomes_are_dropped_first_when_nobody_asks_for_them(sim: Simulation) -> None:
    segments = chain(sim, "alice", A)
    for number in range(3):
        inject(sim, Inject("alice", segments, str(number), receipt=f"r{number}"), A + QUESTION)
    for number in range(3, MOST_OF_OWNER + 1):
        sim.side.receipts.keep("alice", f"r{number}", {})
    assert sim.ask(Outcome("alice", "r0"))["outcome"] is None
    assert sim.ask(Outcome("alice", "r1"))["outcome"]["injected"] == 30
    inject(sim, Inject("alice", segments, "again"), A + QUESTION)
    assert len(sim.side.receipts) == MOST_OF_OWNER - 1, "one without a receipt is kept"
