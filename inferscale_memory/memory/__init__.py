"""The face of the library: mem0's `Memory`, whose facts are prefilled once and injected ever after."""

from inferscale_memory.memory import environment

environment.prepare_mem0()  # mem0 reads these when it is imported, so before anything below

from inferscale_memory.memory.config import Injection  # noqa: E402
from inferscale_memory.memory.memory import Memory  # noqa: E402
from inferscale_memory.memory.reply import Prepared, Recalled, Reply, ReplyChunk, Timings  # noqa: E402
from inferscale_memory.memory.session import ChatSession  # noqa: E402

__all__ = ["ChatSession", "Injection", "Memory", "Prepared", "Recalled", "Reply", "ReplyChunk", "Timings"]
