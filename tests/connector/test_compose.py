"""A composition is rotated as prefill rotates, written slot by slot, and captured from where it stands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import get_rope

from inferscale_memory.connector.capture import into_arena, rows_of
from inferscale_memory.connector.compose import Composer, unsupported_rotary
from inferscale_memory.connector.metadata import Load
from inferscale_memory.kv.arena import Arena, Shape

LAYERS, HEADS, DIM, TOKENS = 6, 2, 32, 37
DTYPES = [torch.float32, torch.bfloat16]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10_000.0},
    "far base": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "partial": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine two threads take ten times as long over tensors as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, params=["none", "all"], ids=["torch", "kernels"])
def configured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's rotary modules as a compiled engine runs them, and as an eager one: with kernels, in place."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    with set_current_vllm_config(
        VllmConfig(compilation_config=CompilationConfig(custom_ops=[request.param]))
    ):
        yield


def rope(variant: str, dtype: torch.dtype, *, neox: bool = True) -> Any:
    """One of vLLM's own rotary modules."""
    return get_rope(DIM, 4096, is_neox_style=neox, rope_parameters=VARIANTS[variant], dtype=dtype)


def keys(dtype: torch.dtype, tokens: int = TOKENS) -> torch.Tensor:
    """[layers, tokens, kv_heads, head_dim]"""
    return torch.randn(LAYERS, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def positions(tokens: int = TOKENS) -> torch.Tensor:
    """Any, in any order, some of them twice."""
    return torch.randint(0, 4096, (tokens,), generator=torch.Generator().manual_seed(2))


class Layer(SimpleNamespace):
    """An attention layer that remembers what the backend's op was called with."""

    def __init__(self) -> None:
        super().__init__(kv_cache=object(), calls=[])
        self.impl = SimpleNamespace(do_kv_cache_update=self._update)

    def _update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
        assert layer is self
        assert cache is self.kv_cache
        self.calls.append((key.clone(), value.clone(), slots.clone()))

    @property
    def written(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and slots of all calls, in order."""
        parts = zip(*self.calls, strict=True)
        first, second, third = (torch.cat(part) for part in parts)
        return first, second, third


def composer(
    rotations: list[Any], dtype: torch.dtype, *, rows: int = 100, **options: Any
) -> tuple[Composer, Arena, list[Layer]]:
    arena = Arena(Shape(LAYERS, HEADS, DIM, dtype), rows)
    generator = torch.Generator().manual_seed(3)
    arena.keys.copy_(torch.randn(arena.keys.shape, generator=generator))
    arena.values.copy_(torch.randn(arena.values.shape, generator=generator))
    layers = [Layer() for _ in range(LAYERS)]
    return Composer(arena, layers, rotations, **options), arena, layers


def one_by_one(rotations: list[Any], data: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Each layer rotated as prefill rotates it: its keys beside queries, through the module itself."""
    rotated = data.clone()
    for number, module in enumerate(rotations):
        if module is not None:
            query = torch.randn(len(where), 4 * DIM).to(data.dtype)
            key = data[number].reshape(len(where), -1).clone()
            rotated[number] = module(where, query, key)[1].view(len(where), HEADS, DIM)
    return rotated


def arrangement(kind: str, variant: str, dtype: torch.dtype) -> list[Any]:
    """Which module rotates which layer."""
    first, second = rope(variant, dtype), rope("far base", dtype)
    match kind:
        case "one module":
            return [first] * LAYERS
        case "two modules":
            return [first, second] * (LAYERS // 2)
        case "a layer without":
            return [first, second, None, first, None, second]
        case "one layer":
            return [None, None, first, None, None, None]
    return [None] * LAYERS


# -- rotating ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["one module", "two modules", "a layer without", "one layer", "none"])
def test_all_layers_at_once_are_rotated_as_each_by_itself(
    kind: str, variant: str, dtype: torch.dtype
) -> None:
    rotations = arrangement(kind, variant, dtype)
    expected = one_by_one(rotations, keys(dtype), positions())
    rotated = composer(rotations, dtype)[0].rotate(keys(dtype), positions())
    assert torch.equal(rotated, expected)
    assert torch.equal(rotated, keys(dtype)) == (kind == "none")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_interleaved_rotation_is_the_modules_own(dtype: torch.dtype) -> None:
    rotations = [rope("plain", dtype, neox=False)] * LAYERS
    expected = one_by_one(rotations, keys(dtype), positions())
    assert torch.equal(composer(rotations, dtype)[0].rotate(keys(dtype), positions()), expected)
    assert not torch.equal(expected, one_by_one([rope("plain", dtype)] * LAYERS, keys(dtype), positions()))


def test_keys_are_rotated_where_they_stand() -> None:
    for kind in ("one module", "two modules"):
        data = keys(torch.float32)
        rotated = composer(arrangement(kind, "plain", torch.float32), torch.float32)[0].rotate(
            data, positions()
        )
        assert rotated.data_ptr() == data.data_ptr()


def test_one_token_is_rotated_like_many() -> None:
    rotations = arrangement("two modules", "llama3", torch.float32)
    subject = composer(rotations, torch.float32)[0]
    together = subject.rotate(keys(torch.float32), positions())
    for token in range(0, TOKENS, 9):
        part = slice(token, token + 1)
        alone = subject.rotate(keys(torch.float32)[:, part].clone(), positions()[part])
        assert torch.equal(alone[:, 0], together[:, token])


def test_position_zero_changes_nothing() -> None:
    rotations = arrangement("one module", "plain", torch.float32)
    rotated = composer(rotations, torch.float32)[0].rotate(
        keys(torch.float32), torch.zeros(TOKENS, dtype=torch.int64)
    )
    assert torch.equal(rotated, keys(torch.float32))


def test_rotating_fires_no_hook_of_an_encode_in_the_same_step() -> None:
    module, fired = rope("plain", torch.float32), []
    handle = module.register_forward_pre_hook(lambda *args: fired.append(args))
    try:
        composer([module] * LAYERS, torch.float32)[0].rotate(keys(torch.float32), positions())
    finally:
        handle.remove()
    assert fired == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_rotations_by_position_alone_are_supported(variant: str) -> None:
    assert unsupported_rotary(rope(variant, torch.float32)) is None


def test_a_layer_without_rotation_is_supported() -> None:
    assert unsupported_rotary(None) is None


def test_rotations_that_depend_on_the_running_length_are_refused_by_name() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    module = get_rope(DIM, 4096, rope_parameters=dynamic, dtype=torch.float32)
    reason = unsupported_rotary(module)
    assert reason is not None
    assert type(module).__name__ in reason


# -- writing ---


def loads_of(*sizes: int, seed: int = 4) -> list[Load]:
    """Loads out of scattered rows into scattered slots."""
    draw = np.random.default_rng(seed)
    rows, slots = draw.permutation(100), draw.permutation(10_000)
    loads, start = [], 0
    for number, size in enumerate(sizes):
        part = slice(start, start + size)
        where = np.arange(size, dtype=np.int64) + 7 * number
        loads.append(Load(f"r{number}", rows[part], where, slots[part], ()))
        start += size
    return loads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["one module", "two modules", "a layer without"])
def test_every_layer_gets_its_keys_and_values_in_the_slots_asked_for(kind: str, dtype: torch.dtype) -> None:
    rotations = arrangement(kind, "plain", dtype)
    subject, arena, layers = composer(rotations, dtype)
    loads = loads_of(20, 1, 16)
    subject.write(loads)
    rows = torch.from_numpy(np.concatenate([load.rows for load in loads]))
    where = torch.from_numpy(np.concatenate([load.positions for load in loads]))
    expected = one_by_one(rotations, arena.keys[:, rows], where)
    for number, layer in enumerate(layers):
        written_keys, written_values, slots = layer.written
        assert len(layer.calls) == 1
        assert slots.tolist() == [slot for load in loads for slot in load.slots.tolist()]
        assert torch.equal(written_keys, expected[number])
        assert torch.equal(written_values, arena.values[number, rows])


@pytest.mark.parametrize("part", [1, 5, 36, 37, 38])
@pytest.mark.parametrize("kind", ["one module", "a layer without"])
def test_a_long_composition_written_in_parts_is_the_same(kind: str, part: int) -> None:
    rotations = arrangement(kind, "llama3", torch.float32)
    whole, arena, at_once = composer(rotations, torch.float32)
    whole.write(loads_of(20, 1, 16))
    parted, _, in_parts = composer(rotations, torch.float32, stage_bytes=part * arena.shape.row_bytes)
    parted.write(loads_of(20, 1, 16))
    for left, right in zip(at_once, in_parts, strict=True):
        assert len(right.calls) == -(-37 // part)
        assert all(len(slots) <= part for _, _, slots in right.calls)
        for one, other in zip(left.written, right.written, strict=True):
            assert torch.equal(one, other)


def test_writing_leaves_the_arena_as_it_was() -> None:
    subject, arena, _ = composer(arrangement("one module", "plain", torch.float32), torch.float32)
    before = arena.keys.clone(), arena.values.clone()
    subject.write(loads_of(37))
    assert torch.equal(arena.keys, before[0])
    assert torch.equal(arena.values, before[1])


def test_a_short_composition_after_a_long_one_writes_only_its_own() -> None:
    """The stage is kept between steps: what is left in it from before is not written."""
    subject, _, layers = composer(arrangement("one module", "plain", torch.float32), torch.float32)
    fresh, _, expected = composer(arrangement("one module", "plain", torch.float32), torch.float32)
    subject.write(loads_of(60, 20))
    for layer in layers:
        layer.calls.clear()
    subject.write(loads_of(3, seed=5))
    fresh.write(loads_of(3, seed=5))
    for layer, other in zip(layers, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(layer.written, other.written, strict=True))


def test_a_composition_of_nothing_writes_nothing() -> None:
    """Everything of it slid out of the attention window."""
    subject, _, layers = composer(arrangement("one module", "plain", torch.float32), torch.float32)
    subject.write(loads_of(0))
    assert all(layer.calls == [] for layer in layers)


def test_a_row_outside_the_arena_is_refused_before_anything_is_written() -> None:
    subject, _, layers = composer(arrangement("one module", "plain", torch.float32), torch.float32, rows=50)
    with pytest.raises(IndexError):
        subject.write(loads_of(80))
    assert all(layer.calls == [] for layer in layers)


# -- finding rows of a step ---


def mapping(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def wanted(*slots: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(slots, dtype=np.int64)


def test_rows_are_found_by_slot_wherever_they_stand_in_the_step() -> None:
    assert rows_of(wanted(7, 40, 3), mapping(40, 12, 7, 99, 3)).tolist() == [2, 0, 4]


def test_padding_is_never_found() -> None:
    assert rows_of(wanted(7, 3), mapping(-1, 3, -1, 7, -1, -1)).tolist() == [3, 1]


def test_slots_of_any_integer_kind_are_found() -> None:
    assert rows_of(wanted(7, 3), mapping(3, 7).to(torch.int32)).tolist() == [1, 0]


@pytest.mark.parametrize("missing", [0, 5, 1_000, 2**40])
def test_a_slot_that_is_not_written_in_this_step_is_an_error(missing: int) -> None:
    with pytest.raises(LookupError):
        rows_of(wanted(7, missing), mapping(40, 12, 7, -1, 3))


def test_in_a_step_of_padding_alone_nothing_is_found() -> None:
    with pytest.raises(LookupError):
        rows_of(wanted(0), mapping(-1, -1))


def test_no_slots_are_found_in_any_step() -> None:
    assert rows_of(wanted(), mapping(3, 4)).tolist() == []


def test_over_many_shuffled_steps_every_row_is_found() -> None:
    generator = torch.Generator().manual_seed(6)
    for _ in range(200):
        slots = torch.randperm(5_000, generator=generator)[:60]
        step = torch.cat([slots, torch.full((9,), -1)])[torch.randperm(69, generator=generator)]
        some = slots[torch.randperm(60, generator=generator)[:23]]
        assert torch.equal(step[rows_of(some.numpy(), step)], some)


# -- capturing into the arena ---


def test_captured_layers_are_written_into_their_rows() -> None:
    arena = Arena(Shape(LAYERS, HEADS, DIM, torch.float32), 20)
    module = rope("plain", torch.float32)
    rows = wanted(11, 3, 19)
    receive = into_arena(arena, rows, dict.fromkeys(range(LAYERS), module))
    data = torch.randn(LAYERS, 2, 3, HEADS, DIM)
    for number in range(LAYERS):
        receive(number, module, data[number, 0], data[number, 1])
    assert torch.equal(arena.read(rows), data)


def test_a_layer_rotated_by_another_module_than_at_start_up_is_refused() -> None:
    arena = Arena(Shape(LAYERS, HEADS, DIM, torch.float32), 20)
    module, other = rope("plain", torch.float32), rope("far base", torch.float32)
    receive = into_arena(arena, wanted(1), {0: module})
    for found in (other, None):
        with pytest.raises(RuntimeError, match="layer 0"):
            receive(0, found, torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS, DIM))
