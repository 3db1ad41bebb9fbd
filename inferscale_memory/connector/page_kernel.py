"""The kernel that moves a composition's bits into pages, on torch's own OpenMP threads.

It reads and writes raw memory, so only `PageWriter` calls it, with what start-up has proved. Threads of our own, or
of a second OpenMP such as numba loads, would fight those that torch leaves spinning on their cores for a while.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP that torch runs on. Raises LookupError where that
    is not GNU's, or this is not Linux."""
    packages = Path(torch.__file__).parent.parent
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError as error:
        raise LookupError("there is no list of the libraries of this process") from error
    for path in sorted({Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines()}):
        # torch's wheels bring it along, in torch/lib or torch.libs; other packages bring others.
        if path.name.startswith("libgomp") and any(
            packages / name in path.parents for name in ("torch", "torch.libs")
        ):
            parallel: Any = ctypes.CDLL(str(path)).GOMP_parallel
            parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            parallel.restype = None
            return parallel  # type: ignore[no-any-return]
    raise LookupError("torch does not run on GNU's OpenMP")


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

    @numba.cfunc(types.void(types.CPointer(types.int64)))  # type: ignore[untyped-decorator]
    def work(pointer: Any) -> None:
        """What every thread of the team does: one layer after another, until none is left."""
        told = numba.carray(pointer, 22)
        layers, tokens, held = told[1], told[2], told[6]
        sizes = (tokens, told[3], told[4], told[5])
        row = told[3] * told[4]
        keys = numba.carray(at(told[7]), layers * tokens * row, element)
        values = numba.carray(at(told[8]), layers * held * row, element)
        rows, slots = (
            numba.carray(at(told[9]), tokens, np.int64),
            numba.carray(at(told[10]), tokens, np.int64),
        )
        pages = numba.carray(at(told[11]), layers, np.int64)
        key_strides = (told[12], told[13], told[14], told[15], told[16])
        value_strides = (told[17], told[18], told[19], told[20], told[21])
        while True:
            layer = next_of(told.ctypes.data)
            if layer >= layers:
                return
            page = numba.carray(at(pages[layer]), 1, element)
            move(keys, layer * tokens, page, None, slots, sizes, key_strides)
            move(values, layer * held, page, rows, slots, sizes, value_strides)

    return work
