"""LangChain's messages as chat APIs write them, and replies as LangChain's messages.

It must never drop words, calls or results silently: what cannot be sent is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk

from inferscale_memory import Reply, ReplyChunk, RetrievedMemory
from inferscale_memory import ToolCall as Called
from inferscale_memory.arguments import as_plain
from inferscale_memory.errors import PromptError

_SYSTEM = ("system", "developer")
_TEXT = ("text", "input_text", "output_text")
# An assistant's calls stand in `tool_calls`; its reasoning is not repeated to it.
_SAID_ELSEWHERE = ("tool_use", "tool_call", "function_call", "tool_call_chunk", "invalid_tool_call")
_UNSAID = ("reasoning", "thinking", "redacted_thinking")


# -- in ------------------------------------------------------------------------------------------------------


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages in the form of chat APIs. A system message that ends the conversation, or is all of it, is asked as the
    user's: a chain's prompt is often nothing else.

    Raises:
        PromptError: content that is not text, and messages that are no part of a conversation.
        ConfigurationError: arguments of a tool that are nested too deep.
    """
    chat: list[dict[str, Any]] = [as_plain(_message(message), "a message") for message in messages]
    if chat and chat[-1]["role"] in _SYSTEM:
        chat[-1]["role"] = "user"
    return chat


def question_in(chat: Sequence[Mapping[str, Any]]) -> str:
    """What to search memories for: the user's last words, or, without any, the last instructions. "" where there are
    neither."""
    for roles in (("user",), _SYSTEM):
        last = next((message for message in reversed(chat) if message["role"] in roles), None)
        if last is not None:
            return str(last["content"]).strip()
    return ""


def _message(message: BaseMessage) -> dict[str, Any]:
    said: dict[str, Any] = {"role": _role(message), "content": _text(message)}
    if message.name:
        said["name"] = message.name
    if isinstance(message, ToolMessage):
        said["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        calls = [_call(call) for call in message.tool_calls]
        calls += [_broken_call(call) for call in message.invalid_tool_calls]
        if calls:
            said["tool_calls"] = calls
            said["content"] = said["content"] or None
    return said


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in (
        (SystemMessage, str(message.additional_kwargs.get("__openai_role__") or "system")),
        (HumanMessage, "user"),
        (AIMessage, "assistant"),
        (ToolMessage, "tool"),
        (FunctionMessage, "tool"),
    ):
        if isinstance(message, kind):
            return role
    raise PromptError(f"A {type(message).__name__} is no part of a conversation: leave it out.")


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = (_part(block, message) for block in message.content)
    return "\n".join(part for part in parts if part is not None)


def _part(block: Any, message: BaseMessage) -> str | None:
    if isinstance(block, str):
        return block
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    if kind in _TEXT and isinstance(block.get("text"), str):
        return str(block["text"])
    if isinstance(message, AIMessage) and kind in (*_SAID_ELSEWHERE, *_UNSAID):
        return None
    if isinstance(message, ToolMessage) and kind == "json":
        return json.dumps(block.get("json"), ensure_ascii=False)
    raise PromptError(
        f"A message of type {message.type!r} has content of type {kind!r}, and the model reads text only: leave it "
        "out, or describe it in words."
    )


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = as_plain(call["args"], "the arguments of a tool")
    function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call.get("id"), "type": "function", "function": function}


def _broken_call(call: InvalidToolCall) -> dict[str, Any]:
    """A call that could not be read, as it was written: the model is told what was wrong with it by its result."""
    function = {"name": call.get("name") or "unknown", "arguments": json.dumps({"unread": call.get("args")})}
    return {"id": call.get("id"), "type": "function", "function": function}


# -- out -----------------------------------------------------------------------------------------------------


def generation(reply: Reply, model_name: str, *, texts: bool = True) -> ChatGeneration:
    """A reply as LangChain has it."""
    message = AIMessage(
        content=reply.text,
        tool_calls=[
            ToolCall(name=call.name, args=dict(call.arguments), id=call.id, type="tool_call")
            for call in reply.tool_calls
            if call.error is None
        ],
        invalid_tool_calls=[_invalid(call) for call in reply.tool_calls if call.error is not None],
        usage_metadata=usage(reply),
        response_metadata=metadata(reply, model_name, texts=texts),
    )
    return ChatGeneration(message=message, generation_info=None)


def chunk(piece: ReplyChunk, model_name: str, *, texts: bool = True) -> ChatGenerationChunk:
    """A piece of a reply; the last one carries its calls, its usage and its metadata."""
    if piece.reply is None:
        return ChatGenerationChunk(message=AIMessageChunk(content=piece.text))
    reply = piece.reply
    message = AIMessageChunk(
        content=piece.text,
        tool_call_chunks=[
            tool_call_chunk(name=call.name, args=_streamed(call), id=call.id, index=index)
            for index, call in enumerate(reply.tool_calls)
        ],
        usage_metadata=usage(reply),
        response_metadata=metadata(reply, model_name, texts=texts),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message)


def usage(reply: Reply) -> UsageMetadata:
    """Tokens read and written. `cache_read` are those that were injected; hits of the engine's own prefix cache are
    in the response's metadata."""
    completion = reply.completion
    written = len(completion.token_ids)
    return UsageMetadata(
        input_tokens=completion.prompt_tokens,
        output_tokens=written,
        total_tokens=completion.prompt_tokens + written,
        input_token_details={"cache_read": completion.injected_tokens},
    )


def metadata(reply: Reply, model_name: str, *, texts: bool = True) -> dict[str, Any]:
    """What became of the memories, what it cost, and why it ended. Without `texts` memories are told by id."""
    completion, timings = reply.completion, reply.timings
    cut_off = completion.finish_reason == "length"
    return {
        "model_name": model_name,
        "model_provider": "inferscale",
        "finish_reason": "tool_calls" if reply.tool_calls and not cut_off else completion.finish_reason,
        "memories": [_recalled(memory, texts) for memory in reply.memories],
        "dropped": [_recalled(memory, texts) for memory in reply.dropped],
        "injected_tokens": completion.injected_tokens,
        "cached_tokens": completion.cached_tokens,
        "prefilled_tokens": completion.prefilled_tokens,
        "refused": completion.refused,
        "ttft_s": timings.ttft_s,
        "search_s": timings.search_s,
        "compose_s": timings.compose_s,
        "tool_errors": [
            {"id": call.id, "name": call.name, "error": call.error}
            for call in reply.tool_calls
            if call.error is not None
        ],
    }


def _recalled(memory: RetrievedMemory, texts: bool) -> dict[str, Any]:
    told = {"text": memory.text} if texts else {}
    return {"id": memory.id, **told, "score": memory.score, "injected": memory.injected}


def _invalid(call: Called) -> InvalidToolCall:
    return InvalidToolCall(
        name=call.name, args=call.raw, id=call.id, error=call.error, type="invalid_tool_call"
    )


def _streamed(call: Called) -> str:
    """The arguments of a call in a stream, where LangChain reads them again, and completes what was cut off: a call
    that was not understood must not come out as one with other arguments, so it goes as text within JSON."""
    if call.error is None:
        return json.dumps(call.arguments, ensure_ascii=False)
    return json.dumps(call.raw, ensure_ascii=False)
