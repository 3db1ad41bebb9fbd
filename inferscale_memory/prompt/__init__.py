"""From a conversation and facts to token ids: chat template, segments, and what facts are encoded behind.

It knows nobody: no engine, no store, no memory. What it is told of those arrives as ids, keys and numbers.
"""

from inferscale_memory.prompt.calls import CallReader, Said, ToolCall
from inferscale_memory.prompt.compose import Composed, Fact, compose
from inferscale_memory.prompt.line import fact_line
from inferscale_memory.prompt.segments import PUBLIC_OWNER, Prompt, Segment
from inferscale_memory.prompt.template import Frame, Message, PromptTemplate
from inferscale_memory.prompt.windows import (
    EncodePlan,
    Turn,
    plan_session,
    window_start,
)

__all__ = [
    "PUBLIC_OWNER",
    "CallReader",
    "Composed",
    "EncodePlan",
    "Fact",
    "Frame",
    "Message",
    "Prompt",
    "PromptTemplate",
    "Said",
    "Segment",
    "ToolCall",
    "Turn",
    "compose",
    "fact_line",
    "plan_session",
    "window_start",
]
