"""A blob belongs to the LoRA adapter under which it was encoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inferscale_memory.connector import protocol
from inferscale_memory.connector.metadata import Report
from inferscale_memory.connector.protocol import NAME, Encode, Inject
from tests.connector.scenarios import (
    QUESTION,
    A,
)
from tests.connector.simulation import Ids, Simulation


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


def test_a_fact_has_another_key_under_each_adapter(sim: Simulation) -> None:
    assert len({encode_with(sim, lora) for lora in ("", "one", "two")}) == 3


def test_a_blob_is_injected_only_with_the_adapter_it_was_encoded_with(sim: Simulation) -> None:
    keys = {lora: encode_with(sim, lora) for lora in ("", "one", "two")}
    for made_with, key in keys.items():
        for used_with in keys:
            ask = Inject("alice", ((key, 30),))
            request = arrive(sim, f"{made_with}-{used_with}", A + QUESTION, ask, used_with, used_with)
            assert sim.side.match(request, 0) == (30 if made_with == used_with else 0, False)


def test_a_request_is_refused_under_the_salt_of_another_adapter(sim: Simulation) -> None:
    key = encode_with(sim, "one")
    request = arrive(sim, "wrong salt", A + QUESTION, Inject("alice", ((key, 30),)), "one", "two")
    assert sim.side.match(request, 0) == (0, False)
    request = arrive(sim, "wrong salt too", A, Encode("alice", ((0, 30),)), "one", "")
    assert "salt" in sim.side.finished(request)[NAME]["error"]  # type: ignore[index]
