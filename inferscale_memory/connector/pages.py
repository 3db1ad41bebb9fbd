"""Writing the paged cache without the engine's operator, where start-up proves the two equal bit for bit.

The operator is the truth: where it puts each element is learned by watching it on a scratch cache, and this way is
taken only if a random composition written both ways leaves the same bits. It moves bits and computes nothing: keys
are still rotated by the model's own module. It exists because the operator of vLLM's CPU backend takes several times
as long as the memory it moves. Never run on a GPU: there the operator is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inferscale_memory.connector import page_kernel
from inferscale_memory.connector.check import Noise
from inferscale_memory.connector.metadata import Slots
from inferscale_memory.kv.arena import Arena, Shape
from inferscale_memory.kv.tier import Rows

logger = logging.getLogger(__name__)

_SCRATCH_BLOCKS = 4
_UNSIGNED = {2: torch.uint16, 4: torch.uint32}


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
    page = 2 * layer.num_kv_heads * layer.head_size * block_size
    if len(cache) < _SCRATCH_BLOCKS or cache[0].numel() != page:
        return None  # the operator does not look where it writes: its blocks must be those we think of
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
        layout = PageLayout(block_size, strides(0), strides(1))
    except LookupError:
        return None
    return layout if {layout.keys.block, layout.values.block} == {page} else None


class PageWriter:
    """Writes rotated keys and rows of values into the paged caches of all layers.

    Args:
        layout: of every layer.
        shape: of the arena's rows.
        caches: the layers' paged caches, asked for at each write.
    """

    def __init__(
        self, layout: PageLayout, shape: Shape, caches: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        self._layout = layout
        self._shape = shape
        self._caches = caches
        self._page = caches()[0].shape[1:]

    def write(self, keys: torch.Tensor, values: torch.Tensor, rows: Rows, slots: Slots) -> None:
        """Into slot `slots[t]` of layer `l`: `keys[l, t]` and `values[l, rows[t]]`. Both are contiguous,
        [layers, tokens or rows, kv_heads, head_dim].

        Raises:
            IndexError, ValueError: a slot or row is outside, or the cache has changed: the kernel writes raw memory.
        """
        shape, caches = self._shape, self._caches()
        layers, tokens, heads, dim = keys.shape
        row = (shape.kv_heads, shape.head_dim)
        whole = all(
            tensor.dtype == shape.dtype and tensor.is_contiguous() for tensor in (keys, values, *caches)
        )
        if not (
            whole
            and layers == len(values) == len(caches) == shape.layers
            and keys.shape[2:] == values.shape[2:] == row
            and all(cache.shape[1:] == self._page for cache in caches)
            and tokens == len(rows) == len(slots)
        ):
            raise ValueError("keys, values or the paged cache are not what they were at start-up")
        stop = min(len(cache) for cache in caches) * self._layout.block_size
        if not _within(slots, stop) or not _within(rows, values.shape[1]):
            raise IndexError("a slot outside the paged cache, or a row outside the arena")
        rows, slots = (np.ascontiguousarray(index, dtype=np.int64) for index in (rows, slots))
        addresses = np.array([cache.data_ptr() for cache in caches], dtype=np.int64)
        told = {
            "ticket": 0,
            "layers": layers,
            "tokens": tokens,
            "heads": heads,
            "dim": dim,
            "block_size": self._layout.block_size,
            "held": values.shape[1],
            "keys": keys.data_ptr(),
            "values": values.data_ptr(),
            "rows": rows.ctypes.data,
            "slots": slots.ctypes.data,
            "pages": addresses.ctypes.data,
        }
        for kind, strides in (("key", self._layout.keys), ("value", self._layout.values)):
            told |= {f"{kind}_{name}": value for name, value in asdict(strides).items()}
        page_kernel.run(
            8 * keys.dtype.itemsize,
            np.array([told[name] for name in page_kernel.ORDER], dtype=np.int64),
            min(layers, torch.get_num_threads()),
        )


def _within(index: NDArray[np.int64], stop: int) -> bool:
    return not len(index) or bool(index.min() >= 0 and index.max() < stop)


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
    noise = Noise(torch.device("cpu"))
    keys, values = (
        noise.normal(torch.empty(shape.layers, tokens, shape.kv_heads, shape.head_dim, dtype=shape.dtype))
        for _ in "kv"
    )
    ours = [noise.normal(layer.kv_cache[:_SCRATCH_BLOCKS]) for layer in layers]
    theirs = [cache.clone() for cache in ours]
    PageWriter(layout, shape, lambda: ours).write(keys, values, rows, slots)
    for number, layer in enumerate(layers):
        moved = values[number][torch.from_numpy(rows)]
        layer.impl.do_kv_cache_update(layer, keys[number], moved, theirs[number], torch.from_numpy(slots))
        if not np.array_equal(_bits(ours[number]), _bits(theirs[number])):
            return None
    return PageWriter(layout, shape, lambda: [layer.kv_cache for layer in layers])


def _bits(tensor: torch.Tensor) -> NDArray[Any]:
    """The bits of a contiguous tensor, as unsigned integers."""
    flat: NDArray[Any] = tensor.view(-1).view(_UNSIGNED[tensor.dtype.itemsize]).numpy()
    return flat
