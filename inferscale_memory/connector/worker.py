"""The worker side: obeys the orders of each step and reports. It decides nothing.

A step on one rank: moves between tiers, the forward (with hooks where an encode is to be caught), and loads into the
paged cache before it, or behind it where their requests wait; then a report. The first step that offers evidence is
also the start-up check.

All ranks run one step the same way, compiled or not: that is decided by the step's orders alone, which they share, and
before anything that might fail on one of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from inferscale_memory.connector import pages
from inferscale_memory.connector.capture import Hooks, into_arena, rows_of
from inferscale_memory.connector.check import StartupCheck, unsupported_layers, unsupported_rotations
from inferscale_memory.connector.compose import Composer
from inferscale_memory.connector.configuration import DEFAULT_BYTES, DEVICE_BYTES
from inferscale_memory.connector.metadata import Load, Orders, Report
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.kv.arena import Arena, Shape

logger = logging.getLogger(__name__)


class WorkerSide:
    """One rank's arenas, and what is done to them.

    Args:
        rows: rows of each tier, fastest first (device, host).
        dtype: in which the model computes keys and values.
        block_size: slots of a block of the paged cache.
        rotaries: the model's rotary modules, asked for when layers are known.
        without_position: whether the model says that an attention layer has no position.
    """

    def __init__(
        self,
        rows: Sequence[int],
        dtype: torch.dtype,
        block_size: int,
        rotaries: Callable[[], Sequence[Any]],
        without_position: Callable[[Any], bool],
    ) -> None:
        self._rows = rows
        self._dtype = dtype
        self._block_size = block_size
        self._find_rotaries = rotaries
        self._without_position = without_position
        self._rotaries: Sequence[Any] = ()
        self._layers: list[Any] = []
        self.arenas: list[Arena] = []
        self.composer: Composer | None = None
        self._modules: dict[int, Any | None] = {}
        self._hooks: Hooks | None = None
        self._check: StartupCheck | None = None
        self._checked = False
        self._orders = Orders()
        self._context: Any = None
        self._report = Report()
        self._arrived: set[str] = set()
        self._bad_blocks: set[int] = set()

    @property
    def rotations(self) -> list[Any | None]:
        """The rotary module of each layer, once the start-up check has passed."""
        return [self._modules[number] for number in sorted(self._modules)]

    def register(self, layers: list[Any]) -> None:
        """The attention layers of this rank, in order, once their caches exist."""
        self._layers = layers
        problem = unsupported_layers(layers)
        if problem is not None:
            self._settle(problem)
            return
        self._rotaries = self._find_rotaries()
        first = layers[0]
        shape = Shape(len(layers), first.num_kv_heads, first.head_size, self._dtype)
        device = first.kv_cache.device
        places = [device, *["cpu"] * (len(self._rows) - 1)]
        self.arenas = [
            _allocated(shape, count, place, name)
            for count, place, name in zip(self._rows, places, DEFAULT_BYTES, strict=False)
        ]

    def refuse(self, problem: str) -> None:
        """Blobs cannot be used, for a reason that is known already."""
        self._settle(problem)

    # -- one step -----------------------------------------------------------------------------------------------

    def begin(self, orders: Orders, context: Any) -> None:
        """Take the step's orders; where something must be caught, stand ready and have the step run uncompiled."""
        self._orders = orders
        self._context = context
        # No forward, or a graph that is replayed: nothing can be followed.
        followed = context is not None and bool(context.attn_metadata)
        if followed and (orders.captures or orders.repeated is not None):
            context.skip_compiled = True
        try:
            self._move()
        except (
            Exception
        ) as error:  # the directory believes in blobs that are not there: none can be trusted now
            logger.exception("inferscale: moving blobs between tiers failed")
            self.composer = None
            self._settle(f"moving blobs between tiers failed ({error!r}); restart the engine")
        if followed:
            try:
                self._stand_ready(orders, context)
            except Exception:  # without hooks the captures of this step are reported as lost
                logger.exception("inferscale: a step cannot be followed")

    def _stand_ready(self, orders: Orders, context: Any) -> None:
        if not self._checked and orders.repeated is not None:
            if not isinstance(context.slot_mapping, dict):
                self._settle("its steps are split into micro-batches")
                return
            self._check = StartupCheck(self._layers)
            self._hook(lambda: self._real_rows(context), self._check.on_layer)
        elif orders.captures and self._checked and self.composer is not None:
            slots = np.concatenate([capture.slots for capture in orders.captures])
            rows = np.concatenate([capture.rows for capture in orders.captures])
            receive = into_arena(self.arenas[0], rows, self._modules)
            self._hook(lambda: rows_of(slots, self._slot_mapping(context)), receive)

    def load(self) -> None:
        """Write the step's compositions into the paged cache. A load that fails is reported, never raised."""
        self._arrived |= {load.request for load in self._orders.loads if load.ahead}
        self._fail_loads([load for load in self._orders.loads if load.broken])
        loads = [load for load in self._orders.loads if not load.broken]
        if not loads:
            return
        started = time.perf_counter()
        try:
            if self.composer is None:
                raise RuntimeError("nothing can be injected before the start-up check")
            self.composer.write(loads)
            seconds = time.perf_counter() - started
            self._report.loaded = {load.request: seconds for load in loads}
        except Exception:
            logger.exception("inferscale: loading failed; the requests are prefilled as text")
            self._fail_loads(loads)

    def end(self) -> None:
        """After the forward: settle the check or the captures. Never raises: every rank must report."""
        hooks, self._hooks = self._hooks, None
        try:
            if hooks is not None:
                hooks.__exit__(None, None, None)
            if self._check is not None:
                check, self._check = self._check, None
                check.close()
                self._conclude(check, hooks)
            elif self._orders.captures:
                self._settle_captures(hooks)
        except Exception as error:
            logger.exception("inferscale: what was caught in this step is lost")
            self._report.captured.clear()
            self._report.lost |= {capture.piece[0]: repr(error) for capture in self._orders.captures}
        self._orders, self._context = Orders(), None

    def report(self) -> Report | None:
        """What this rank did in the step; None when nothing."""
        report, self._report = self._report, Report()
        return report if report else None

    def take_arrived(self) -> tuple[set[str], set[str]]:
        """Requests that waited for a load that is over now, and those of them whose load failed."""
        arrived, self._arrived = self._arrived, set()
        return arrived, arrived & self._report.failed_loads

    def take_bad_blocks(self) -> set[int]:
        """Blocks whose load failed in the step whose forward reads them."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    # -- loads and moves ----------------------------------------------------------------------------------------

    def _move(self) -> None:
        for move in self._orders.moves:
            self.arenas[move.target].copy_rows(self.arenas[move.source], move.source_rows, move.target_rows)
        for wipe in self._orders.wipes:
            if self.arenas:  # none where blobs were refused before there was any
                self.arenas[wipe.tier].wipe(wipe.rows)

    def _fail_loads(self, loads: Sequence[Load]) -> None:
        for load in loads:
            if not load.ahead:
                self._bad_blocks.update(load.blocks)
            self._report.failed_loads.add(load.request)

    # -- captures -----------------------------------------------------------------------------------------------

    def _hook(self, select: Callable[[], torch.Tensor], receive: Any) -> None:
        self._hooks = Hooks(self._layers, self._rotaries, select, receive)
        self._hooks.__enter__()

    def _slot_mapping(self, context: Any) -> torch.Tensor:
        mapping: torch.Tensor = context.slot_mapping[self._layers[0].layer_name]
        return mapping

    def _settle_captures(self, hooks: Hooks | None) -> None:
        problem = None
        if hooks is None and not self._checked:
            problem = "the engine has not finished its start-up check"
        elif hooks is None:
            problem = "the step could not be followed: it was replayed from a graph, or blobs are refused"
        elif hooks.problem is not None:
            problem = hooks.problem
        elif len(hooks.fired) != len(self._layers):
            problem = f"{len(hooks.fired)} of {len(self._layers)} layers could be followed in this step"
        for capture in self._orders.captures:
            if problem is None:
                self._report.captured.add(capture.piece)
            else:
                self._report.lost[capture.piece[0]] = problem

    # -- the start-up check -------------------------------------------------------------------------------------

    def _real_rows(self, context: Any) -> torch.Tensor:
        """Rows of the step that are tokens, not padding."""
        return torch.nonzero(self._slot_mapping(context) >= 0).flatten()

    def _conclude(self, check: StartupCheck, hooks: Hooks | None) -> None:
        try:
            self._settle(self._examine(check, hooks))
        except Exception as error:
            logger.exception("inferscale: the start-up check failed")
            self._settle(f"the start-up check failed: {error!r}")
        for capture in self._orders.captures:
            self._report.lost[capture.piece[0]] = "the engine was still in its start-up check; encode again"

    def _examine(self, check: StartupCheck, hooks: Hooks | None) -> str | None:
        assert self._orders.repeated is not None, "the check runs in a step that was ordered for it"
        if hooks is None or hooks.problem is not None:
            return hooks.problem if hooks is not None else "no hooks"
        if len(hooks.fired) != len(self._layers):
            return f"only {len(hooks.fired)} of {len(self._layers)} attention layers could be followed"
        problem = unsupported_rotations(check.rotations, self._layers, self._without_position)
        if problem is not None:
            return problem
        composer = Composer(self.arenas[0], self._layers, check.rotations)
        rows = self._real_rows(self._context)
        slots = self._slot_mapping(self._context)[rows]
        positions = hooks.positions if hooks.positions is not None else torch.zeros_like(slots)
        run = rows_of(self._orders.repeated, slots)
        problem = check.verdict(composer, positions, slots, run, self._context.attn_metadata)
        if problem is None:
            composer.direct = pages.prove(self.arenas[0], self._layers, self._block_size)
            self.composer = composer
            self._modules = dict(enumerate(check.rotations))
        return problem

    def _settle(self, problem: str | None) -> None:
        self._checked = True
        self._report.status = problem or ""
        if problem:
            logger.warning(
                "inferscale: blobs cannot be used with this model: %s. It is served as text.", problem
            )


def _allocated(shape: Shape, rows: int, place: torch.device | str, option: str) -> Arena:
    """Room for one tier. vLLM has taken its own memory before.

    Raises:
        ConfigurationError: there is not so much; it names the option.
    """
    try:
        return Arena(shape, rows, place)
    except (RuntimeError, MemoryError) as error:
        vllms = ", or vLLM's --gpu-memory-utilization" if option == DEVICE_BYTES else ""
        raise ConfigurationError(
            f"no room on {place} for {rows * shape.row_bytes} bytes of blobs: lower {option}{vllms} ({error})"
        ) from error
