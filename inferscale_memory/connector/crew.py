"""Threads that share one job, each standing where one of the engine's own OpenMP threads stands.

They take the place of OpenMP for work that must not wait for its threads, which spin on their cores for a while after
every parallel region. Within a crew torch computes on one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from threading import Barrier

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]


class Crew:
    """`size` threads, by default as many as torch computes with."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size or torch.get_num_threads()
        cores, number, all_here = _bound_cores(), count(), Barrier(self.size)
        openmp = ThreadpoolController()  # not torch.set_num_threads: vLLM makes that do nothing

        def settle() -> None:
            mine = next(number)
            if mine < len(cores):  # a new thread is bound to the one core of the thread that made it
                os.sched_setaffinity(0, {cores[mine]})
            torch.get_num_threads()  # torch settles it for a thread when first asked, and would overrule what follows
            openmp.limit(limits=1, user_api="openmp")  # of this thread alone, and for good
            all_here.wait()

        self._pool = ThreadPoolExecutor(self.size, "inferscale")
        for job in [self._pool.submit(settle) for _ in range(self.size)]:
            job.result()

    def share(self, total: int, job: Callable[[range], None]) -> None:
        """Have `job` done for parts of `range(total)`, at once; raises what a part raised."""
        bounds = [total * part // self.size for part in range(self.size + 1)]
        parts = [range(start, stop) for start, stop in pairwise(bounds) if start < stop]
        inference = (
            torch.is_inference_mode_enabled()
        )  # it is the calling thread's own, like all of torch's modes

        def do(part: range) -> None:
            with torch.inference_mode(inference):
                job(part)

        for done in [self._pool.submit(do, part) for part in parts]:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()


def _bound_cores() -> list[int]:
    """Cores that threads of this process are bound to one by one, as vLLM's CPU backend binds OpenMP's."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    bound = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            cores = os.sched_getaffinity(int(thread))
        except OSError:  # it has ended
            continue
        if len(cores) == 1:
            bound |= cores
    return sorted(bound)
