"""InferScale Memory: a remembered fact is prefilled once and injected ever after.

Everything public has its name here.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from warnings import warn

if TYPE_CHECKING:
    __version__: str
    from inferscale_memory.engine.base import (
        Chunk,
        Completion,
        EncodeRequest,
        EncodeResult,
        Engine,
        SamplingOptions,
        Span,
    )
    from inferscale_memory.engine.remote import RemoteEngine
    from inferscale_memory.engine.transformers import TransformersEngine
    from inferscale_memory.engine.vllm import VLLMEngine
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
    from inferscale_memory.journal import FailedAdd
    from inferscale_memory.memory import (
        AsyncChatSession,
        AsyncMemory,
        Audit,
        Chat,
        ChatSession,
        Injection,
        Memory,
        Prepared,
        Reply,
        ReplyChunk,
        RetrievedMemory,
        Timings,
    )
    from inferscale_memory.prompt import Prompt, Segment, ToolCall

__all__ = [
    "AsyncChatSession",
    "AsyncMemory",
    "Audit",
    "BlobError",
    "Chat",
    "ChatSession",
    "Chunk",
    "ClosedError",
    "Completion",
    "ConfigurationError",
    "ContextOverflowError",
    "CopyError",
    "EncodeRequest",
    "EncodeResult",
    "Engine",
    "EngineError",
    "ExtractionError",
    "FailedAdd",
    "FetchError",
    "ForkedError",
    "InferScaleError",
    "Injection",
    "Memory",
    "MigrationError",
    "Prepared",
    "Prompt",
    "PromptError",
    "RemoteEngine",
    "Reply",
    "ReplyChunk",
    "RetrievedMemory",
    "SamplingOptions",
    "Segment",
    "Span",
    "StoreError",
    "Timings",
    "ToolCall",
    "TransformersEngine",
    "VLLMEngine",
    "__version__",
]
_ROOMS = {
    "engine.base": (
        "Chunk",
        "Completion",
        "EncodeRequest",
        "EncodeResult",
        "Engine",
        "SamplingOptions",
        "Span",
    ),
    "engine.remote": ("RemoteEngine",),
    "engine.transformers": ("TransformersEngine",),
    "engine.vllm": ("VLLMEngine",),
    "errors": (
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
    "journal": ("FailedAdd",),
    "memory": (
        "AsyncChatSession",
        "AsyncMemory",
        "Audit",
        "Chat",
        "ChatSession",
        "Injection",
        "Memory",
        "Prepared",
        "Reply",
        "ReplyChunk",
        "RetrievedMemory",
        "Timings",
    ),
    "prompt": ("Prompt", "Segment", "ToolCall"),
}
"""Where each public name is defined."""
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}

_RENAMED = {"Recalled": "RetrievedMemory"}
"""Earlier public names, which are accepted for one release."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: mem0, torch and vLLM take seconds, and not every program needs them."""
    if name == "__version__":
        return version("inferscale-memory")
    if name in _RENAMED:
        warn(f"{__name__}.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
