"""What an answer cost and what it knew, as plain data for `raw` and `additional_kwargs`.

It must never say that a memory was injected when it went as text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferscale_memory import Reply, RetrievedMemory
from llama_index.core.base.llms.types import ChatResponse

from llama_index.llms.inferscale.messages import is_readable, to_answer


def to_response(reply: Reply, ids: Mapping[str, str], delta: str | None = None) -> ChatResponse:
    """The response of one answer; `delta` is its last piece where it was streamed."""
    report = to_report(reply, ids)
    extra: dict[str, Any] = dict(report["usage"])
    extra.update({name: report[name] for name in ("memories", "ttft_s", "finish_reason")})
    if report["invalid_tool_calls"]:
        extra["invalid_tool_calls"] = report["invalid_tool_calls"]
    return ChatResponse(
        message=to_answer(reply.text, reply.tool_calls), raw=report, delta=delta, additional_kwargs=extra
    )


def to_report(reply: Reply, ids: Mapping[str, str]) -> dict[str, Any]:
    """`usage` counts tokens: `prompt_tokens` = `injected_tokens` + `cached_tokens` + `prefilled_tokens`. Times are in
    seconds; `ttft_s` runs from the call to the first token, retrieval included. `dropped` are memories that did not
    fit into the context; `refused` says why less was injected than asked for."""
    done = reply.completion
    written = len(done.token_ids)
    return {
        "usage": {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": done.prompt_tokens + written,
            "injected_tokens": done.injected_tokens,
            "cached_tokens": done.cached_tokens,
            "prefilled_tokens": done.prefilled_tokens,
        },
        "scope": dict(ids),
        "memories": [_memory(memory) for memory in reply.memories],
        "dropped": [_memory(memory) for memory in reply.dropped],
        "ttft_s": reply.timings.ttft_s,
        "search_s": reply.timings.search_s,
        "compose_s": reply.timings.compose_s,
        "finish_reason": done.finish_reason,
        "refused": done.refused,
        "invalid_tool_calls": [
            {"name": call.name, "error": call.error, "raw": call.raw}
            for call in reply.tool_calls
            if not is_readable(call)
        ],
    }


def _memory(memory: RetrievedMemory) -> dict[str, Any]:
    return {"id": memory.id, "text": memory.text, "score": memory.score, "injected": memory.injected}
