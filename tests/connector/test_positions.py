"""Blobs are used only where it is certain how a position gets into a key; every other model is served as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inferscale_memory.connector.positions import MIN_RUN, repeated_slots, without_position
from inferscale_memory.prompt.segments import Prompt, Segment
from tests.connector.rig import Rig
from tests.models import tiny_model


def layer(number: int, **impl: Any) -> Any:
    return SimpleNamespace(layer_name=f"model.layers.{number}.self_attn.attn", impl=SimpleNamespace(**impl))


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "without"),
    [
        ({"model_type": "llama"}, []),
        ({"no_rope_layers": [1, 1, 0, 1]}, [2]),
        ({"no_rope_layers": []}, []),
        ({"use_rope_layers": [False, True, True, False]}, [0, 3]),
        ({"position_embedding_type": "nope"}, [0, 1, 2, 3]),
        ({"position_embedding_type": "absolute"}, []),
        ({"layer_rope_theta": [1e4, 0, 1e4, 0]}, [1, 3]),
        ({"rope_parameters": {"rope_theta": 0}}, [0, 1, 2, 3]),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6}}}, []),
        ({"model_type": "cohere2", "layer_types": [SLIDING, SLIDING, SLIDING, FULL]}, [3]),
        ({"model_type": "exaone4", "layer_types": [FULL, FULL, FULL, FULL]}, []),
        ({"model_type": "gemma3_text", "layer_types": [SLIDING, SLIDING, SLIDING, FULL]}, []),
    ],
)
def test_a_layer_has_no_position_only_where_the_configuration_says_so(
    config: dict[str, Any], without: list[int]
) -> None:
    asked = SimpleNamespace(**config)
    assert [n for n in range(4) if without_position(asked, layer(n))] == without


def test_alibi_puts_no_position_into_keys() -> None:
    assert without_position(SimpleNamespace(), layer(0, alibi_slopes=[0.5]))
    assert not without_position(SimpleNamespace(), layer(0, alibi_slopes=None))


def test_evidence_is_a_prompt_that_begins_with_one_token_again_and_again() -> None:
    def new(name: str, ids: list[int], computed: int = 0) -> Any:
        return SimpleNamespace(
            req_id=name, prompt_token_ids=ids, num_computed_tokens=computed, block_ids=([5, 2, 9],)
        )

    run = [7] * 10 + [8, 7]
    scheduled = {"a": 12, "b": 12, "c": 12, "d": MIN_RUN - 1, "e": 9}
    useless = [new("a", list(range(12))), new("b", run, computed=4), new("d", run)]
    assert repeated_slots(useless, scheduled, 4) is None
    found = repeated_slots([*useless, new("c", run)], scheduled, 4)
    assert found is not None
    assert found.tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 36, 37]
    found = repeated_slots([new("e", run)], scheduled, 4)
    assert found is not None
    assert np.array_equal(found, [20, 21, 22, 23, 8, 9, 10, 11, 36])


# -- in vLLM ----------------------------------------------------------------------------------------------------------


def served_as_text(rig: Rig) -> None:
    """Facts are refused for the reason given, and the answer is the plain prompt's."""
    fact, suffix = rig.words(20, 1), rig.words(9, 2)
    [reply] = [answer.reply for answer in encode(rig, fact)]
    assert reply["error"] == rig.unsupported
    answer = rig.inject(Prompt("alice", (Segment(fact, "a blob of this fact"), Segment(suffix))))
    assert (answer.injected, answer.reply["refused"]) == (0, rig.unsupported)
    assert answer.tokens == rig.plain((*fact, *suffix)).tokens


def encode(rig: Rig, ids: tuple[int, ...]) -> list[Any]:
    from inferscale_memory.connector import protocol
    from inferscale_memory.connector.protocol import Encode

    ask = Encode("alice", ((0, len(ids)),), ())
    salt = protocol.encode_salt(rig._secret, rig.fingerprint, "alice")
    return rig.run([(ids, salt)], [rig.sampling(2, ask)])


@pytest.mark.engine
@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_a_model_with_learned_positions_is_served_as_text(family: str, tmp_path: Path) -> None:
    with Rig.open(tiny_model(family, tmp_path)) as rig:
        assert "no rotary embedding was seen at work before layer" in rig.unsupported
        assert ".0." in rig.unsupported
        assert "learned positions" in rig.unsupported
        served_as_text(rig)


@pytest.fixture
def past_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that calls its rotary module's function itself."""
    from vllm.model_executor.models.llama import LlamaAttention

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb.forward_native(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]

    monkeypatch.setattr(LlamaAttention, "forward", forward)


@pytest.mark.engine
@pytest.mark.usefixtures("past_the_hooks")
def test_a_model_that_rotates_past_the_hooks_is_served_as_text(tmp_path: Path) -> None:
    with Rig.open(tiny_model("llama", tmp_path)) as rig:
        assert "rotate keys where that cannot be followed" in rig.unsupported
        served_as_text(rig)


@pytest.mark.engine
@pytest.mark.usefixtures("past_the_hooks")
def test_a_configuration_that_denies_a_rotation_is_found_out_by_moving_keys(tmp_path: Path) -> None:
    with Rig.open(tiny_model("llama", tmp_path, no_rope_layers=[0, 0, 0])) as rig:
        assert "a key that was moved is not the one computed at that position" in rig.unsupported
        served_as_text(rig)


@pytest.mark.engine
def test_keys_that_have_a_position_before_they_are_rotated_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated to where they stood they are right; anywhere else they would be wrong."""
    from vllm.model_executor.models.llama import LlamaAttention

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb.forward_native(positions, q, k)
        return self.o_proj(self.attn(*self.rotary_emb(positions, q, k), v))[0]

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with Rig.open(tiny_model("llama", tmp_path)) as rig:
        assert "a key that was moved is not the one computed at that position" in rig.unsupported
        served_as_text(rig)


@pytest.mark.engine
def test_learned_positions_beside_a_rotation_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.llama import LlamaModel

    real: Callable[..., Any] = LlamaModel.forward
    learned = torch.randn(4096, 128, generator=torch.Generator().manual_seed(3))

    def forward(self: Any, ids: torch.Tensor, positions: torch.Tensor, *_: Any, **__: Any) -> Any:
        return real(self, ids, positions, None, self.embed_input_ids(ids) + learned[positions])

    monkeypatch.setattr(LlamaModel, "forward", forward)
    with Rig.open(tiny_model("llama", tmp_path)) as rig:
        assert "its values depend on the position" in rig.unsupported
        served_as_text(rig)


@pytest.mark.engine
@pytest.mark.parametrize("family", ["exaone4", "bloom"])
def test_layers_without_position_are_injected(family: str, tmp_path: Path) -> None:
    """Some of Exaone 4's layers, and all of Bloom's, which biases scores by distance."""
    with Rig.open(tiny_model(family, tmp_path)) as rig:
        assert rig.unsupported is None
        facts = [rig.words(5 + 3 * number, number) for number in range(6)]
        prompt = Prompt("alice", (*rig.remember("alice", facts, rig.words(17, 8)), Segment(rig.words(9, 9))))
        rig.poison()
        injected, plain = rig.inject(prompt), rig.plain(prompt.ids)
        assert injected.injected == len(prompt.ids) - 9
        assert injected.tokens == plain.tokens
        assert injected.differs(plain) <= 1e-4
