"""Writing the paged cache without the engine's operator, where start-up proves the two equal bit for bit.

The operator is the truth: where it puts each element is learned by watching it on a scratch cache, and this way is
taken only if a random composition written both ways leaves the same bits. It moves bits and computes nothing: keys
are still rotated by the model's own module. It exists because the operator of vLLM's CPU backend takes several times
as long as the memory it moves. Never run on a GPU: there the operator is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inferscale_memory.connector.metadata import Slots
from inferscale_memory.kv.arena import Arena, Rows, Shape

logger = logging.getLogger(__name__)

_SCRATCH_BLOCKS = 4
_UNSIGNED = {2: torch.uint16, 4: torch.uint32}
Mover = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Strides:
    """Where an element lies in a layer's cache, in elements: `base + block * b + head * h + slot * s + dim * d`."""

    base: int
    block: int
    head: int
    slot: int
    dim: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where keys and values lie in the cache of one layer, whose blocks have `block_size` slots."""

    block_size: int
    keys: Strides
    values: Strides


def learn_layout(layer: Any, block_size: int, dtype: torch.dtype) -> PageLayout | None:
    """The layout that the engine's own cache update writes, if it is regular; found by writing single elements."""
    cache = layer.kv_cache
    if cache.dtype != dtype or dtype.itemsize not in _UNSIGNED or not cache.is_contiguous():
        return None  # quantized, or spread over memory
    scratch = torch.zeros_like(cache[:_SCRATCH_BLOCKS])

    def place(number: int, slot: int, head: int, dim: int) -> int:
        pair = [torch.zeros(1, layer.num_kv_heads, layer.head_size, dtype=dtype) for _ in range(2)]
        pair[number][0, head, dim] = 1.0
        scratch.zero_()
        layer.impl.do_kv_cache_update(layer, *pair, scratch, torch.tensor([slot]))
        found = torch.nonzero(scratch.flatten()).flatten().tolist()
        if len(found) != 1:
            raise LookupError("one element was not written to one place")
        return int(found[0])

    def strides(number: int) -> Strides:
        base = place(number, 0, 0, 0)
        return Strides(
            base,
            place(number, block_size, 0, 0) - base,
            place(number, 0, 1, 0) - base if layer.num_kv_heads > 1 else 0,
            place(number, 1, 0, 0) - base,
            place(number, 0, 0, 1) - base,
        )

    try:
        return PageLayout(block_size, strides(0), strides(1))
    except LookupError:
        return None


class PageWriter:
    """Writes rotated keys and rows of values into the paged caches of all layers.

    Args:
        layout: of every layer.
        caches: the layers' paged caches, asked for at each write.
    """

    def __init__(self, layout: PageLayout, caches: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._layout = layout
        self._caches = caches
        self._move = mover()

    def write(self, keys: torch.Tensor, values: torch.Tensor, rows: Rows, slots: Slots) -> None:
        """Into slot `slots[t]` of layer `l`: `keys[l, t]` and `values[l, rows[t]]`. Both are contiguous,
        [layers, tokens or rows, kv_heads, head_dim]."""
        layout = self._layout
        pages = tuple(_bits(cache) for cache in self._caches())
        size = (layout.block_size, *keys.shape[2:])
        self._move(_bits(keys), np.arange(len(slots)), pages, slots, *size, *astuple(layout.keys))
        self._move(_bits(values), rows, pages, slots, *size, *astuple(layout.values))


def prove(arena: Arena, layers: Sequence[Any], block_size: int) -> PageWriter | None:
    """A writer whose bits are those of the engine's operator on every layer, or None: then the operator it is."""
    if arena.device.type != "cpu":
        return None
    try:
        return _prove(arena.shape, layers, block_size)
    except Exception as error:
        logger.info("inferscale: the paged cache is written by the engine's operator (%r)", error)
        return None


def _prove(shape: Shape, layers: Sequence[Any], block_size: int) -> PageWriter | None:
    layouts = {learn_layout(layer, block_size, shape.dtype) for layer in layers}
    if len(layouts) != 1 or (layout := layouts.pop()) is None:
        return None
    # Runs that cross blocks, in memory and in the cache, and single rows and slots here and there.
    tokens, draw = 2 * block_size + 5, np.random.default_rng(0)
    rows, slots = draw.permutation(tokens), np.arange(block_size - 3, 3 * block_size + 2)
    rows[: tokens // 2].sort()
    slots[-tokens // 4 :] = draw.permutation(slots[-tokens // 4 :])
    keys, values = (
        torch.randn(shape.layers, tokens, shape.kv_heads, shape.head_dim).to(shape.dtype) for _ in "kv"
    )
    ours = [torch.randn(layer.kv_cache[:_SCRATCH_BLOCKS].shape).to(shape.dtype) for layer in layers]
    theirs = [cache.clone() for cache in ours]
    writer = PageWriter(layout, lambda: ours)
    writer.write(keys, values, rows, slots)
    for number, layer in enumerate(layers):
        moved = values[number][torch.from_numpy(rows)]
        layer.impl.do_kv_cache_update(layer, keys[number], moved, theirs[number], torch.from_numpy(slots))
        if not np.array_equal(_bits(ours[number]), _bits(theirs[number])):
            return None
    writer._caches = lambda: [layer.kv_cache for layer in layers]
    return writer


def _bits(tensor: torch.Tensor) -> NDArray[Any]:
    """The bits of a contiguous tensor, as unsigned integers."""
    flat: NDArray[Any] = tensor.view(-1).view(_UNSIGNED[tensor.dtype.itemsize]).numpy()
    return flat


@cache
def mover() -> Mover:
    """The kernel, compiled for elements of 16 and of 32 bits. Raises ImportError without numba.

    It runs on OpenMP's threads, and numba and torch load the same OpenMP (GNU's): threads of our own would fight
    those that torch leaves spinning on their cores for a while after all it does.
    """
    import numba
    from llvmlite.binding import ffi

    # llvmlite's library answers to every name, to `__dict__` as well, and vLLM 0.32 reads the `__dict__` of whatever
    # is imported when another engine starts in this process: let it find a dict.
    ffi.lib._fntab.setdefault("__dict__", {})
    numba.config.THREADING_LAYER = "omp"
    # numba counts the cores of the thread that imports it, which vLLM may have bound to one.
    numba.config.NUMBA_NUM_THREADS = max(numba.config.NUMBA_NUM_THREADS, torch.get_num_threads())
    numba.set_num_threads(torch.get_num_threads())
    u = np.uint64

    @numba.njit(nogil=True, cache=True, parallel=True)
    def move(  # type: ignore[no-untyped-def]
        source, rows, pages, slots, block_size, heads, dim, base, block, head, slot, step
    ):
        """For every layer and token: pages[layer][where slots[t] lies] = source[layer, rows[t]].
        Indices are unsigned, or each would be tested for being negative."""
        width, tokens = heads * dim, len(rows)
        held = len(source) // (len(pages) * width)
        for layer in numba.prange(len(pages)):
            page = pages[layer]
            t = 0
            while t < tokens:
                at = slots[t] % block_size
                run = 1
                if slot == 1:  # transposed: a run through a block is written line after line
                    most = min(tokens - t, block_size - at)
                    while run < most and slots[t + run] == slots[t] + run and rows[t + run] == rows[t] + run:
                        run += 1
                origin = u((layer * held + rows[t]) * width)
                to = u(base + (slots[t] // block_size) * block + at * slot)
                for h in range(u(heads)):
                    a, b = origin + h * u(dim), to + h * u(head)
                    if run == 1:
                        for d in range(u(dim)):
                            page[b + d * u(step)] = source[a + d]
                    else:
                        for d in range(u(dim)):
                            for j in range(u(run)):
                                page[b + d * u(step) + j] = source[a + d + j * u(width)]
                t += run

    compiled: Mover = move
    return compiled
