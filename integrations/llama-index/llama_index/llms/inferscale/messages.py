"""LlamaIndex's messages and tools as chat APIs have them, and the way back.

Only text can be asked. Whatever else a message holds is a clear error, never left out: an answer to half a message
would look like an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from inferscale_memory import ToolCall
from inferscale_memory.arguments import refusal
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


def to_chat(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat APIs take them. Thoughts of earlier answers and cache marks are left out: neither says
    anything to the model.

    Raises:
        ValueError: an image, a sound, a video or a document.
    """
    return [_message(message) for message in messages]


def answerable(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation that ends with somebody's words: a system message at its end, with which agents ask for a last
    answer, is asked as the user's."""
    if chat and chat[-1]["role"] == "system":
        return [*chat[:-1], {**chat[-1], "role": "user"}]
    return chat


def question_in(chat: Sequence[Mapping[str, Any]]) -> str:
    """What to search memories for: the user's last words, or, without any, the last instructions. "" where there are
    neither."""
    for role in ("user", "system"):
        last = next((message for message in reversed(chat) if message["role"] == role), None)
        if last is not None:
            return str(last["content"]).strip()
    return ""


def _message(message: ChatMessage) -> dict[str, Any]:
    role = _ROLES[message.role]
    calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    chat: dict[str, Any] = {"role": role, "content": "\n".join(_texts(message.blocks))}
    if role == "assistant":
        asked = [_call(block) for block in calls] or list(message.additional_kwargs.get("tool_calls") or ())
        if asked:
            chat["tool_calls"] = asked
            chat["content"] = chat["content"] or None
    if role == "tool":
        for name in ("tool_call_id", "name"):
            if message.additional_kwargs.get(name) is not None:
                chat[name] = message.additional_kwargs[name]
    return chat


def _texts(blocks: Sequence[Any]) -> list[str]:
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, CitableBlock):
            texts += _texts(block.content)
        elif isinstance(block, CitationBlock):
            texts += _texts([block.cited_content])
        elif not isinstance(block, ToolCallBlock | ThinkingBlock | CachePoint):
            kind = getattr(block, "block_type", type(block).__name__)
            raise ValueError(
                f"InferScaleLLM reads text, and a message holds a block of type {kind!r}: leave it out, or put what "
                "it says into a TextBlock"
            )
    return texts


def _call(block: ToolCallBlock) -> dict[str, Any]:
    function = {"name": block.tool_name, "arguments": block.tool_kwargs}
    return {"type": "function", "id": block.tool_call_id, "function": function}


def to_answer(text: str, calls: Sequence[ToolCall]) -> ChatMessage:
    """An answer as LlamaIndex has it: calls are blocks, and, for parts that know none, `additional_kwargs`. A call
    whose arguments could not be read is none, for nobody must carry it out; its words stand in the text."""
    readable = [call for call in calls if is_readable(call)]
    words = [text, *(call.raw for call in calls if not is_readable(call))]
    content = "\n".join(part for part in words if part)
    blocks: list[Any] = [TextBlock(text=content)] if content or not readable else []
    blocks += [
        ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=dict(call.arguments))
        for call in readable
    ]
    message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks)
    if readable:
        message.additional_kwargs["tool_calls"] = [_as_chat_apis(call) for call in readable]
    return message


def is_readable(call: ToolCall) -> bool:
    """Whether the arguments of a call are there. A call of a tool that does not exist is: whoever runs the tools says
    so to the model."""
    return bool(call.name) and (call.error is None or bool(call.arguments) or call.raw == "{}")


def _as_chat_apis(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"type": "function", "id": call.id, "function": function}


def to_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """Tools of LlamaIndex as chat APIs take them; those already are stay."""
    if tools is None or tools == [] or tools == ():
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise refusal("tools", tools, "a list of tools")
    return [
        tool.metadata.to_openai_tool(skip_length_check=True) if hasattr(tool, "metadata") else tool
        for tool in tools
    ]


def to_tool_choice(choice: str | Mapping[str, Any] | None, required: bool) -> str | None:
    """A choice in any form that chat APIs take as `Chat` takes it."""
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(choice, str):
            raise refusal(
                "tool_choice", choice, '{"function": {"name": ...}}, a name, "any", "none" or "auto"'
            )
    if choice is not None and not isinstance(choice, str):
        raise refusal("tool_choice", choice, '{"function": {"name": ...}}, a name, "any", "none" or "auto"')
    if required and choice in (None, "auto"):
        return "any"
    return choice
