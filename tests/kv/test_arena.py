"""An arena puts rows where it is told and gives them back as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferscale_memory.kv.arena import Arena, Shape
from inferscale_memory.kv.tier import Rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def shape(dtype: torch.dtype = torch.float32) -> Shape:
    return Shape(layers=3, kv_heads=2, head_dim=4, dtype=dtype)


def rows(*numbers: int) -> Rows:
    return np.array(numbers, dtype=np.int64)


def data(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A blob's data: [layers, 2, tokens, kv_heads, head_dim]."""
    return torch.randn(3, 2, tokens, 2, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_bytes_of_one_token(dtype: torch.dtype) -> None:
    arena = Arena(shape(dtype), 10)
    held = arena.keys.numel() * dtype.itemsize + arena.values.numel() * dtype.itemsize
    assert shape(dtype).row_bytes * 10 == held


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_into_scattered_rows_is_read_back(dtype: torch.dtype) -> None:
    arena = Arena(shape(dtype), 10)
    arena.write(rows(7, 0, 9), data(3, dtype))
    assert torch.equal(arena.read(rows(7, 0, 9)), data(3, dtype))


def test_rows_are_read_in_the_order_asked_for() -> None:
    arena = Arena(shape(), 10)
    arena.write(rows(7, 0, 9), data(3))
    assert torch.equal(arena.read(rows(9, 7)), data(3)[:, :, [2, 0]])


def test_writing_leaves_other_rows_alone() -> None:
    arena = Arena(shape(), 10)
    arena.write(rows(1, 2), data(2, seed=1))
    arena.write(rows(3, 0), data(2, seed=2))
    assert torch.equal(arena.read(rows(1, 2)), data(2, seed=1))


def test_layers_written_one_by_one_are_the_blob() -> None:
    arena = Arena(shape(), 10)
    index = arena.index(rows(4, 8))
    for layer in range(3):
        arena.write_layer(index, layer, data(2)[layer, 0], data(2)[layer, 1])
    assert torch.equal(arena.read(rows(4, 8)), data(2))


def test_what_is_read_is_a_copy() -> None:
    arena = Arena(shape(), 4)
    arena.write(rows(1), data(1))
    arena.read(rows(1)).zero_()
    assert torch.equal(arena.read(rows(1)), data(1))


def test_rows_are_copied_into_other_rows_of_another_arena() -> None:
    device, host = Arena(shape(), 4), Arena(shape(), 50)
    device.write(rows(3, 1), data(2))
    host.copy_rows(device, rows(3, 1), rows(40, 2))
    device.write(rows(3, 1), data(2, seed=9))
    assert torch.equal(host.read(rows(40, 2)), data(2))


def test_no_rows_can_be_written_read_and_copied() -> None:
    arena, other = Arena(shape(), 4), Arena(shape(), 4)
    arena.write(rows(), data(0))
    other.copy_rows(arena, rows(), rows())
    assert arena.read(rows()).shape == (3, 2, 0, 2, 4)


@pytest.mark.parametrize("bad", [-1, 10, 1_000_000])
def test_a_row_outside_the_arena_is_refused(bad: int) -> None:
    arena, other = Arena(shape(), 10), Arena(shape(), 10)
    with pytest.raises(IndexError, match="10 rows"):
        arena.write(rows(0, bad), data(2))
    with pytest.raises(IndexError):
        arena.read(rows(bad))
    with pytest.raises(IndexError):
        arena.copy_rows(other, rows(0), rows(bad))
    with pytest.raises(IndexError):
        arena.copy_rows(other, rows(bad), rows(0))


def test_a_row_outside_the_arena_is_refused_before_anything_is_written() -> None:
    arena = Arena(shape(), 10)
    arena.write(rows(0), data(1))
    with pytest.raises(IndexError):
        arena.write(rows(0, 10), data(2, seed=9))
    assert torch.equal(arena.read(rows(0)), data(1))
