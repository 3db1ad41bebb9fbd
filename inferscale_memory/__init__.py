"""InferScale Memory: a remembered fact is prefilled once and injected ever after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferscale_memory.memory import AsyncMemory, Memory

__all__ = ["AsyncMemory", "Memory"]


def __getattr__(name: str) -> Any:
    """The faces on first use: mem0 takes seconds to import, and not everybody who imports us wants it."""
    if name in __all__:
        from inferscale_memory import memory

        return getattr(memory, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
