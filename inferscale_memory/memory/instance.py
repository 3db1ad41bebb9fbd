"""Which instances are ours: those with a core. It must never be misled by a class, a mock or a bare instance, as
mem0's own tests pass them for `self`."""

from __future__ import annotations

from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

from inferscale_memory.errors import ClosedError

if TYPE_CHECKING:
    from inferscale_memory.memory.core import Core

INHERITED = "_inherited"
"""Where an instance keeps that it was opened by the parent of this process."""


class Inherited:
    """An instance that was opened before this process was forked is opened again by the first that uses it."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.opened_by: int | None = None


def core_of(memory: Any) -> Core | None:
    """What stands behind `memory`, where something does; in a forked child it is opened first. Raises ClosedError where
    `memory` was closed."""
    open_here(memory)
    core: Core | None = getattr(memory, "__dict__", {}).get("_core")
    if core is None and not never_had_core(memory):
        raise ClosedError("this memory is closed: open another one")
    return core


def open_here(memory: Any) -> None:
    """In a forked child, open again what the parent had opened."""
    inherited: Inherited | None = getattr(memory, "__dict__", {}).get(INHERITED)
    if inherited is not None and inherited.opened_by != get_ident():
        memory._open_again(inherited)


def never_had_core(memory: Any) -> bool:
    """Whether nothing ever stood behind `memory`: a closed one is another matter."""
    return "_core" not in getattr(memory, "__dict__", {})


def behind(memory: Any) -> Core:
    """The core of a memory that must have one."""
    core = core_of(memory)
    if core is None:
        raise RuntimeError("this memory has no vector store behind it: open another one")
    return core
