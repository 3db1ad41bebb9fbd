"""A tier never hands a row to two."""

from __future__ import annotations

import random

import numpy as np
import pytest

from inferscale_memory.kv.tier import RowAllocator, Rows


def rows(*numbers: int) -> Rows:
    return np.array(numbers, dtype=np.int64)


def test_a_tier_hands_out_every_row_once() -> None:
    tier = RowAllocator("device", 10)
    taken = [tier.take(3), tier.take(7)]
    assert sorted(np.concatenate(taken).tolist()) == list(range(10))  # type: ignore[arg-type]
    assert (tier.free, tier.capacity, tier.name) == (0, 10, "device")


def test_a_tier_without_room_hands_out_nothing() -> None:
    tier = RowAllocator("device", 10)
    assert tier.take(11) is None
    assert tier.free == 10


def test_nothing_at_all_can_be_taken_and_given() -> None:
    tier = RowAllocator("device", 0)
    nothing = tier.take(0)
    assert nothing is not None
    assert len(nothing) == 0
    tier.give(nothing)
    assert tier.take(1) is None


def test_what_was_handed_out_does_not_change_when_more_is_taken() -> None:
    tier = RowAllocator("device", 10)
    first = tier.take(4)
    assert first is not None
    before = first.copy()
    tier.give(tier.take(3))  # type: ignore[arg-type]
    tier.take(6)
    assert np.array_equal(first, before)


def test_rows_given_back_are_handed_out_again() -> None:
    tier = RowAllocator("device", 4)
    first = tier.take(4)
    assert first is not None
    tier.give(first[1:3])
    assert tier.free == 2
    assert sorted(tier.take(2).tolist()) == sorted(first[1:3].tolist())  # type: ignore[union-attr]


def test_rows_given_back_twice_are_refused_while_others_are_out() -> None:
    tier = RowAllocator("device", 10)
    first, _second = tier.take(3), tier.take(3)
    assert first is not None
    tier.give(first)
    with pytest.raises(ValueError, match="device"):
        tier.give(first)
    assert tier.free == 7


def test_a_row_given_back_twice_at_once_is_refused() -> None:
    tier = RowAllocator("device", 10)
    taken = tier.take(3)
    assert taken is not None
    with pytest.raises(ValueError):
        tier.give(np.concatenate([taken, taken[:1]]))
    assert tier.free == 7


@pytest.mark.parametrize("stray", [-1, 10, 99])
def test_rows_of_another_arena_are_refused(stray: int) -> None:
    tier = RowAllocator("device", 10)
    tier.take(10)
    with pytest.raises(ValueError):
        tier.give(rows(stray))


def test_more_rows_than_the_tier_has_are_refused() -> None:
    tier = RowAllocator("device", 3)
    with pytest.raises(ValueError):
        tier.give(rows(0, 1, 2, 3))


def test_over_thousands_of_takes_and_gives_no_row_is_out_twice() -> None:
    draw, tier, out = random.Random(3), RowAllocator("device", 40), []
    for _ in range(5_000):
        if out and draw.random() < 0.5:
            tier.give(out.pop(draw.randrange(len(out))))
        else:
            taken = tier.take(draw.randrange(1, 9))
            if taken is not None:
                out.append(taken)
        held = np.concatenate([rows(), *out])
        assert len(set(held.tolist())) == len(held)
        assert tier.free == 40 - len(held)
