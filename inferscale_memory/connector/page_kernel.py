"""The kernel that moves a composition's bits into pages, on torch's own OpenMP threads.

It reads and writes raw memory, so only `PageWriter` calls it, with what start-up has proved. Threads of our own, or
of a second OpenMP such as numba loads, would fight those that torch leaves spinning on their cores for a while.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDER = (
    *(
        "ticket",
        "layers",
        "tokens",
        "heads",
        "dim",
        "block_size",
        "held",
        "keys",
        "values",
        "rows",
        "slots",
        "pages",
    ),
    *(f"{kind}_{stride}" for kind in ("key", "value") for stride in ("base", "block", "head", "slot", "dim")),
)
"""What the kernel is told, as int64s in this order. `keys` to `pages` are addresses: keys
[layers, tokens, heads, dim], values [layers, held, heads, dim], rows and slots [tokens], and the page of each layer.
Strides are in elements."""


@cache
def openmp() -> Callable[..., None]:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP that torch runs on: GNU's, or LLVM's, which has it
    too. Raises LookupError where there is none."""
    try:
        parallel: Any = ctypes.CDLL(
            None
        ).GOMP_parallel  # torch loads its OpenMP for everybody, or it was preloaded
    except (AttributeError, OSError) as error:
        raise LookupError("torch does not run on an OpenMP that has GNU's entry points") from error
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel  # type: ignore[no-any-return]


def run(bits: int, told: NDArray[np.int64], threads: int) -> None:
    """Run the kernel for elements of `bits` bits; `told` as `ORDER` says."""
    openmp()(kernel(bits).address, told.ctypes.data, threads, 0)


@cache
def kernel(bits: int) -> Any:
    """The kernel as a C function of a pointer to what it is told. Raises ImportError without numba."""
    import numba
    from llvmlite import ir
    from llvmlite.binding import ffi
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    # llvmlite's library answers to every name, to `__dict__` as well, and vLLM 0.32 reads the `__dict__` of whatever
    # is imported when another engine starts in this process: let it find a dict.
    ffi.lib._fntab.setdefault("__dict__", {})
    u, element = np.uint64, np.dtype(f"uint{bits}")
    count, first_stride = len(ORDER), ORDER.index("key_base")
    (
        _,
        layers_at,
        tokens_at,
        heads_at,
        dim_at,
        block_size_at,
        held_at,
        keys_at,
        values_at,
        rows_at,
        slots_at,
        pages_at,
    ) = range(first_stride)

    @intrinsic  # type: ignore[untyped-decorator]
    def at(context: Any, address: Any) -> Any:
        """An address as a pointer."""
        return types.voidptr(types.int64), lambda _, builder, __, args: builder.inttoptr(
            args[0], cgutils.voidptr_t
        )

    @intrinsic  # type: ignore[untyped-decorator]
    def next_of(context: Any, address: Any) -> Any:
        """Fetch and add one, atomically."""

        def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

        return types.int64(types.int64), code

    @numba.njit  # type: ignore[untyped-decorator]
    def move(source: Any, first: Any, page: Any, rows: Any, slots: Any, sizes: Any, strides: Any) -> None:
        """page[where slots[t] lies] = source[first + rows[t]] for all t; rows None means t itself. Indices are
        unsigned, or each would be tested for being negative."""
        tokens, heads, dim, block_size = sizes
        base, block, head, slot, step = strides
        width = heads * dim
        t = 0
        while t < tokens:
            at = slots[t] % block_size
            run = 1
            if slot == 1:  # transposed: a run through a block is written line after line
                most = min(tokens - t, block_size - at)
                while run < most and slots[t + run] == slots[t] + run:
                    if rows is not None and rows[t + run] != rows[t] + run:
                        break
                    run += 1
            row = t if rows is None else rows[t]
            origin = u((first + row) * width)
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

    @numba.njit  # type: ignore[untyped-decorator]
    def strides(told: Any, i: Any) -> Any:
        return told[i], told[i + 1], told[i + 2], told[i + 3], told[i + 4]

    @numba.cfunc(types.void(types.CPointer(types.int64)))  # type: ignore[untyped-decorator]
    def work(pointer: Any) -> None:
        """What every thread of the team does: one layer after another, until none is left."""
        told = numba.carray(pointer, count)
        layers, tokens, held = told[layers_at], told[tokens_at], told[held_at]
        sizes = (tokens, told[heads_at], told[dim_at], told[block_size_at])
        row = told[heads_at] * told[dim_at]
        keys = numba.carray(at(told[keys_at]), layers * tokens * row, element)
        values = numba.carray(at(told[values_at]), layers * held * row, element)
        rows = numba.carray(at(told[rows_at]), tokens, np.int64)
        slots = numba.carray(at(told[slots_at]), tokens, np.int64)
        pages = numba.carray(at(told[pages_at]), layers, np.int64)
        key_strides = strides(told, first_stride)
        value_strides = strides(told, first_stride + 5)
        while True:
            layer = next_of(told.ctypes.data)
            if layer >= layers:
                return
            page = numba.carray(at(pages[layer]), 1, element)
            move(keys, layer * tokens, page, None, slots, sizes, key_strides)
            move(values, layer * held, page, rows, slots, sizes, value_strides)

    return work
