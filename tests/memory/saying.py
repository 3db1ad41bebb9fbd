"""Shorthand for tests: say something to a memory, and look at what became of it."""

from __future__ import annotations

from typing import Any

from inferscale_memory.memory import Memory, Reply

ADA = {"user_id": "ada"}
BEN = {"user_id": "ben"}
MAY = "2024-05-12T10:00:00"
WINDOWS = {"neighbours": 0, "context_turns": 24}
"""`injection` of a memory whose facts are encoded behind the turns of their session."""
CLOSE, APART = 1e-4, 1e-3
"""How far two replies' log-probabilities in float32 are apart at most where both are exact, and at least where not."""


def say(memory: Memory, *texts: str, at: Any = MAY, **ids: str) -> list[str]:
    """Add user messages as facts of `ids` (Ada's by default) in one call; their fact ids."""
    messages = [{"role": "user", "content": text} for text in texts]
    added = memory.add(messages, infer=False, timestamp=at, **(ids or ADA))
    return [result["id"] for result in added["results"]]


def texts(reply: Reply) -> list[str]:
    return [memory.text for memory in reply.memories]


def injected(reply: Reply) -> list[str]:
    return [memory.text for memory in reply.memories if memory.injected]


def apart(one: Reply, other: Reply) -> float:
    """Largest difference of the first token's log-probabilities."""
    mine, theirs = ((reply.completion.logprobs or ({},))[0] for reply in (one, other))
    common = mine.keys() & theirs.keys()
    assert len(common) >= 10
    return max(abs(mine[token] - theirs[token]) for token in common)
