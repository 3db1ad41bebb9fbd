"""vLLM's tool parsers: they know the formats in which each family of models writes its tool calls."""

from __future__ import annotations

import json
from typing import Any

from inferscale_memory.errors import ConfigurationError, EngineError
from inferscale_memory.prompt.calls import CallReader, Said, ToolCall, Tools
from inferscale_memory.prompt.tools import tool_names


def check_tool_parser(name: str) -> None:
    """Raises ConfigurationError where vLLM has no tool parser of that name, and EngineError where there is no vLLM."""
    manager = _manager()
    known = sorted({*manager.tool_parsers, *manager.lazy_parsers})
    if name not in known:
        raise ConfigurationError(f"vLLM has no tool parser {name!r}: choose one of {', '.join(known)}")


def call_reader(name: str, tokenizer: Any) -> CallReader:
    """The parser `name` as a `CallReader`: a new one for every answer, since parsers keep state."""
    kind = _manager().get_tool_parser(name)

    def read(text: str, tools: Tools) -> Said:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=list(tools))
        found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            return Said(text)
        calls = tuple(_call(call.function.name, call.function.arguments, tools) for call in found.tool_calls)
        return Said((found.content or "").strip(), calls)

    return read


def _call(name: str, arguments: str, tools: Tools) -> ToolCall:
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        return ToolCall(name, {}, error="its arguments are no JSON", raw=arguments)
    if not isinstance(read, dict):
        return ToolCall(name, {}, error="its arguments are no object", raw=arguments)
    error = None if name in tool_names(tools) else "there is no such tool"
    return ToolCall(name, read, error=error, raw=arguments if error else "")


def _manager() -> Any:
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported ({error}), and its tool parsers come with it: install "
            "`inferscale-memory[vllm]`, or leave `tool_parser` out."
        ) from error
    return ToolParserManager
