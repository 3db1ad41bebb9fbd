"""The faces of the library: mem0's `Memory` and `AsyncMemory`, whose facts are prefilled once, and injected."""

from inferscale_memory.mem0_adapter import environment

environment.prepare_mem0()  # mem0 reads these when it is imported, so before anything below

from inferscale_memory.extraction.recording_llm import in_parts_next  # noqa: E402
from inferscale_memory.mem0_adapter.quiet import quiet  # noqa: E402
from inferscale_memory.memory.async_memory import AsyncMemory  # noqa: E402
from inferscale_memory.memory.audit import Audit, Place  # noqa: E402
from inferscale_memory.memory.chat import Chat  # noqa: E402
from inferscale_memory.memory.memory import Memory  # noqa: E402
from inferscale_memory.memory.session import AsyncChatSession, ChatSession  # noqa: E402
from inferscale_memory.recall.injection import Injection  # noqa: E402
from inferscale_memory.recall.results import Prepared, Reply, ReplyChunk, Timings  # noqa: E402
from inferscale_memory.recall.retrieved import RetrievedMemory  # noqa: E402

quiet(in_parts_next)

__all__ = [
    "AsyncChatSession",
    "AsyncMemory",
    "Audit",
    "Chat",
    "ChatSession",
    "Injection",
    "Memory",
    "Place",
    "Prepared",
    "Reply",
    "ReplyChunk",
    "RetrievedMemory",
    "Timings",
]
