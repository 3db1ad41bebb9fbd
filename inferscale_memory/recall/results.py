"""What a question brings back. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from inferscale_memory.engine.base import Completion
from inferscale_memory.journal import Epoch
from inferscale_memory.prompt import Prompt, ToolCall
from inferscale_memory.recall.retrieved import RetrievedMemory
from inferscale_memory.recall.tool_calling import Calling


@dataclass(frozen=True, slots=True)
class Prepared:
    """A question with its memories, ready to be run along any path: as it is, or `prompt.as_text()`.

    Attributes:
        prompt: what the engine is given.
        memories: those in the prompt, most relevant first; `injected` says what is asked for.
        dropped: those that did not fit, most relevant first.
        search_s: seconds for retrieval.
        compose_s: seconds for building the prompt.
        calling: the tools of the question, if it has any.
        memory_tokens: how many tokens the memories in the prompt have.
        epoch: the journal's epoch in which every one of `memories` existed in these words; None where it was not asked.
        continued: the prompt goes on from an earlier one, so no memory can be taken out of it.
        left_out: how many of the oldest messages of a session are not in the prompt, because it has outgrown the
            model's context.
    """

    prompt: Prompt
    memories: tuple[RetrievedMemory, ...]
    dropped: tuple[RetrievedMemory, ...]
    search_s: float
    compose_s: float
    calling: Calling | None = None
    memory_tokens: int = 0
    epoch: Epoch | None = None
    continued: bool = False
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds: retrieval, composition, and from the call to the first token, with both of them included."""

    search_s: float
    compose_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        text: what the model said, without its tool calls.
        memories: those in the prompt, most relevant first.
        dropped: those that were recalled and did not fit into the context.
        completion: what the engine reports: its whole answer, token counts, finish reason.
        tool_calls: the tools it asks for.
        left_out: how many of the oldest messages of a session were not in the prompt, because it has outgrown the
            model's context.
    """

    text: str
    memories: tuple[RetrievedMemory, ...]
    dropped: tuple[RetrievedMemory, ...]
    completion: Completion
    timings: Timings
    tool_calls: tuple[ToolCall, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class ReplyChunk:
    """A piece of a streamed answer; the last one carries the whole `Reply`."""

    text: str
    reply: Reply | None = None
