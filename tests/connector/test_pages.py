"""Pages are written without the engine's operator only where the same bits come out."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from inferscale_memory.connector import page_kernel
from inferscale_memory.connector.compose import Composer
from inferscale_memory.connector.metadata import Load
from inferscale_memory.connector.pages import learn_layout, prove
from inferscale_memory.kv.arena import Arena, Shape

LAYERS, ROWS, BLOCKS = 3, 400, 12


class Layer(SimpleNamespace):
    """An attention layer of vLLM's CPU backend, with that backend's own cache update."""

    def __init__(self, shape: Shape, block_size: int, isa: str = "vec") -> None:
        impl = SimpleNamespace(attn_type="decoder", kv_cache_dtype="auto")
        impl.do_kv_cache_update = lambda *args: CPUAttentionBackendImpl.do_kv_cache_update(impl, *args)
        super().__init__(
            layer_name="layer",
            num_kv_heads=shape.kv_heads,
            head_size=shape.head_dim,
            isa=isa,
            impl=impl,
            _k_scale_float=1.0,
            _v_scale_float=1.0,
            kv_cache=torch.randn(BLOCKS, shape.kv_heads, block_size, 2 * shape.head_dim).to(shape.dtype),
        )


def filled(shape: Shape) -> Arena:
    arena = Arena(shape, ROWS)
    arena.keys.normal_()
    arena.values.normal_()
    return arena


def load(block_size: int, tokens: int) -> Load:
    """Facts scattered in the arena, into blocks in any order, from the middle of one on."""
    draw = np.random.default_rng(5)
    rows = np.concatenate([np.arange(start, start + 7) for start in draw.integers(0, ROWS - 7, tokens)])[
        :tokens
    ]
    table, at = draw.permutation(np.arange(1, BLOCKS)), np.arange(tokens) + block_size // 2
    slots = table[at // block_size] * block_size + at % block_size
    return Load("r", rows, np.arange(tokens), slots, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (3, 64), (2, 128), (8, 80)])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_a_composition_leaves_the_bits_that_the_operator_leaves(
    dtype: torch.dtype, heads: int, dim: int, block_size: int
) -> None:
    shape = Shape(LAYERS, heads, dim, dtype)
    arena, layers = filled(shape), [Layer(shape, block_size) for _ in range(LAYERS)]
    writer = prove(arena, layers, block_size)
    assert writer is not None
    composer = Composer(arena, layers, [None] * LAYERS)
    before = [layer.kv_cache.clone() for layer in layers]
    composer.write([load(block_size, 150)])
    by_operator = [layer.kv_cache.clone() for layer in layers]
    for layer, cache in zip(layers, before, strict=True):
        assert not torch.equal(layer.kv_cache, cache)
        layer.kv_cache.copy_(cache)
    composer.direct = writer
    composer.write([load(block_size, 150)])
    for layer, cache in zip(layers, by_operator, strict=True):
        assert torch.equal(layer.kv_cache.view(torch.int16), cache.view(torch.int16))


def test_proving_leaves_the_cache_and_the_arena_as_they_are() -> None:
    shape = Shape(LAYERS, 2, 32, torch.float32)
    arena, layers = filled(shape), [Layer(shape, 16) for _ in range(LAYERS)]
    before = [arena.keys.clone(), arena.values.clone(), *(layer.kv_cache.clone() for layer in layers)]
    assert prove(arena, layers, 16) is not None
    after = [arena.keys, arena.values, *(layer.kv_cache for layer in layers)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_cache_that_was_moved_is_found_where_it_is_now() -> None:
    shape = Shape(1, 2, 32, torch.float32)
    arena, layer = filled(shape), Layer(shape, 16)
    writer = prove(arena, [layer], 16)
    assert writer is not None
    old, layer.kv_cache = layer.kv_cache.clone(), torch.zeros_like(layer.kv_cache)
    composer = Composer(arena, [layer], [None])
    composer.direct = writer
    composer.write([load(16, 20)])
    assert layer.kv_cache.any()
    assert not torch.equal(old, layer.kv_cache)


def rearranged(layer: Layer, change: Any) -> Layer:
    """The layer with an operator that does something to the scratch cache after the real one."""
    real = layer.impl.do_kv_cache_update

    def update(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: Any) -> None:
        real(layer, key, value, cache, slots)
        change(cache, slots)

    layer.impl = SimpleNamespace(do_kv_cache_update=update)
    return layer


def test_where_the_operator_does_more_than_move_the_operator_it_is() -> None:
    shape = Shape(1, 2, 32, torch.float32)

    def twice(cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache.view(-1)[-1] = 1.0  # a second place for everything

    def in_crowds(cache: torch.Tensor, slots: torch.Tensor) -> None:
        if len(slots) > 1:  # regular for one token alone
            cache.view(-1)[:64] = cache.view(-1)[:64].flip(0)

    for change in (twice, in_crowds):
        assert prove(filled(shape), [rearranged(Layer(shape, 16), change)], 16) is None


def test_where_layers_differ_or_hold_another_type_the_operator_it_is() -> None:
    shape = Shape(2, 2, 32, torch.float32)
    arena = filled(shape)
    one, other = Layer(shape, 16), Layer(shape, 16)
    other.kv_cache = other.kv_cache.to(torch.bfloat16)
    assert learn_layout(other, 16, torch.float32) is None
    assert prove(arena, [one, other], 16) is None


def test_an_operator_that_raises_ends_nothing() -> None:
    shape = Shape(1, 2, 32, torch.float32)
    layer = Layer(shape, 16)

    def broken(*args: Any) -> None:
        raise RuntimeError("no such kernel")

    layer.impl = SimpleNamespace(do_kv_cache_update=broken)
    assert prove(filled(shape), [layer], 16) is None


@pytest.mark.parametrize(
    ("rows", "slots"),
    [([0, ROWS], [16, 17]), ([0, -1], [16, 17]), ([0, 1], [16, 16 * BLOCKS]), ([0, 1], [-1, 16])],
)
def test_nothing_is_written_outside_the_cache_or_read_outside_the_arena(
    rows: list[int], slots: list[int]
) -> None:
    shape = Shape(1, 2, 32, torch.float32)
    arena, layer = filled(shape), Layer(shape, 16)
    writer = prove(arena, [layer], 16)
    assert writer is not None
    before = layer.kv_cache.clone()
    with pytest.raises(IndexError):
        writer.write(arena.keys[:, :2].contiguous(), arena.values, np.array(rows), np.array(slots))
    assert torch.equal(layer.kv_cache, before)


def test_a_cache_of_another_kind_than_at_start_up_is_not_written() -> None:
    shape = Shape(1, 2, 32, torch.float32)
    arena, layer = filled(shape), Layer(shape, 16)
    writer = prove(arena, [layer], 16)
    assert writer is not None
    layer.kv_cache = layer.kv_cache.transpose(1, 2)
    with pytest.raises(ValueError, match="start-up"):
        writer.write(arena.keys[:, :2].contiguous(), arena.values, np.array([0, 1]), np.array([16, 17]))


def test_without_numba_or_torchs_openmp_the_operator_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(1, 2, 32, torch.float32)

    def missing(*_: Any) -> Any:
        raise LookupError("torch does not run on GNU's OpenMP")

    for name in ("openmp", "kernel"):
        with monkeypatch.context() as patch:
            patch.setattr(page_kernel, name, missing)
            assert prove(filled(shape), [Layer(shape, 16)], 16) is None
