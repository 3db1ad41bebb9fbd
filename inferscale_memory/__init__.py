"""InferScale Memory: a remembered fact is prefilled once and injected ever after.

Everything public has its name here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferscale_memory.engine.base import Completion, Engine, SamplingOptions
    from inferscale_memory.errors import (
        BlobError,
        ClosedError,
        ConfigurationError,
        ContextOverflowError,
        CopyError,
        EngineError,
        ExtractionError,
        FetchError,
        ForkedError,
        InferScaleError,
        MigrationError,
        PromptError,
        StoreError,
    )
    from inferscale_memory.memory import (
        AsyncChatSession,
        AsyncMemory,
        Audit,
        Chat,
        ChatSession,
        Injection,
        Memory,
        Prepared,
        Recalled,
        Reply,
        ReplyChunk,
        Timings,
    )
    from inferscale_memory.prompt import ToolCall

__all__ = [
    "AsyncChatSession",
    "AsyncMemory",
    "Audit",
    "BlobError",
    "Chat",
    "ChatSession",
    "ClosedError",
    "Completion",
    "ConfigurationError",
    "ContextOverflowError",
    "CopyError",
    "Engine",
    "EngineError",
    "ExtractionError",
    "FetchError",
    "ForkedError",
    "InferScaleError",
    "Injection",
    "Memory",
    "MigrationError",
    "Prepared",
    "PromptError",
    "Recalled",
    "Reply",
    "ReplyChunk",
    "SamplingOptions",
    "StoreError",
    "Timings",
    "ToolCall",
]
_ELSEWHERE = {
    "Completion": "engine.base",
    "Engine": "engine.base",
    "SamplingOptions": "engine.base",
    "ToolCall": "prompt",
    **dict.fromkeys(
        (
            "BlobError",
            "ClosedError",
            "ConfigurationError",
            "ContextOverflowError",
            "CopyError",
            "EngineError",
            "ExtractionError",
            "FetchError",
            "ForkedError",
            "InferScaleError",
            "MigrationError",
            "PromptError",
            "StoreError",
        ),
        "errors",
    ),
}


def __getattr__(name: str) -> Any:
    """Names on first use: mem0 takes seconds to import, and not everybody who imports us wants it."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'memory')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
