"""Which instances are ours: those with a core. It must never be misled by a class, a mock or a bare instance, as
mem0's own tests pass them for `self`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferscale_memory.memory.core import Core


def core_of(memory: Any) -> Core | None:
    """What stands behind `memory`, where something does."""
    core: Core | None = getattr(memory, "__dict__", {}).get("_core")
    return core


def never_had_core(memory: Any) -> bool:
    """Whether nothing ever stood behind `memory`: a closed one is another matter."""
    return "_core" not in getattr(memory, "__dict__", {})
