"""Tests run in several processes at once (`pytest -n 2`): each has cores of its own, and engines that it starts stay on
them. Without that vLLM would bind every engine to the same cores."""

from __future__ import annotations

import os


def _take_own_cores() -> None:
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if worker is None or workers is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // int(workers)
    if each:
        first = int(worker.removeprefix("gw")) * each
        os.sched_setaffinity(0, cores[first : first + each])
        os.environ["OMP_NUM_THREADS"] = str(each)


_take_own_cores()
