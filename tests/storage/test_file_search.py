"""Looking for what was forgotten in a database's file: right to the byte, and no slower for texts that repeat."""

from __future__ import annotations

import random
from timeit import repeat

from inferscale_memory.storage.file_search import _common


def test_the_common_beginning_of_two_texts_is_found_to_the_byte() -> None:
    draw = random.Random(3)
    for _ in range(500):
        one, other = (bytes(draw.choices(b"ab", k=draw.randint(0, 12))) for _ in range(2))
        same = next((at for at in range(min(len(one), len(other))) if one[at] != other[at]), None)
        assert _common(one, other) == (min(len(one), len(other)) if same is None else same)


def test_long_texts_that_begin_alike_are_not_compared_byte_by_byte() -> None:
    one, other = b"my cat " * 100_000 + b"Miso", b"my cat " * 100_000 + b"Rex"
    copied = min(repeat(lambda: one[:-5] == other[:-5], number=3, repeat=5))
    assert min(repeat(lambda: _common(one, other), number=3, repeat=5)) < 50 * copied
