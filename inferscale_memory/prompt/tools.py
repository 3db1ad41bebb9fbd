"""Tools as a prompt has them: checked once, and spelled out where a chat template knows nothing of tools.

A template that writes tools gets them as they are. For any other the descriptions go into the system text, calls
into the words of the assistant, and results into words of the user, in the form that Hermes, Qwen and many others were
trained on. It must never lose a call or a result: a model that does not see what its tool said asks again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferscale_memory.arguments import as_json, as_mapping
from inferscale_memory.errors import PromptError
from inferscale_memory.prompt.json_schema import is_of_object

CALL_BEGINS, CALL_ENDS = "<tool_call>", "</tool_call>"

_INTRODUCTION = (
    "You may call one or more functions to assist with the user query.\n"
    "The functions, one JSON object a line:\n<tools>\n{tools}\n</tools>\n"
    "To call a function answer with a JSON object with its name and arguments within tool_call tags:\n"
    f'{CALL_BEGINS}\n{{{{"name": <name>, "arguments": <arguments as JSON>}}}}\n{CALL_ENDS}'
)


def read_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Tools in the form of chat APIs: `{"type": "function", "function": {"name", "description", "parameters"}}`; the
    inner dictionary alone does too.

    Raises:
        PromptError: no name, a name twice, or parameters that are no JSON schema of an object.
    """
    read, names = [], set()
    for offered in tools or ():
        tool = as_json(offered, "a tool") if isinstance(offered, Mapping) else {}
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise PromptError(
                'Not a tool: pass each as {"type": "function", "function": {"name": ..., "parameters": ...}}.'
            )
        if name in names:
            raise PromptError(f"Two tools are called {name!r}: give each a name of its own.")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping) or not is_of_object(parameters):
            raise PromptError(f"The parameters of tool {name!r} are no JSON schema of an object: pass one.")
        names.add(name)
        read.append({"type": "function", "function": {**function, "parameters": dict(parameters)}})
    return read


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of tools as `read_tools` gives them."""
    return [tool["function"]["name"] for tool in tools]


def introduction(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system text says about `tools` where the template says nothing."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return _INTRODUCTION.format(tools=lines)


def spelled_out(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls, or whose being a tool's result, are words."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if message["role"] == "assistant":
        calls = [
            f"{CALL_BEGINS}\n{json.dumps(_named(call), ensure_ascii=False)}\n{CALL_ENDS}"
            for call in message.get("tool_calls") or ()
        ]
        return {"role": "assistant", "content": "\n".join([*([content] if content else []), *calls])}
    return dict(message)


def with_read_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with the arguments of its calls as objects, which is how templates want them: chat APIs carry them
    as text. Raises PromptError on calls of another shape."""
    if not message.get("tool_calls"):
        return message
    if not isinstance(message["tool_calls"], list | tuple):
        raise PromptError('Not tool calls: pass a list of {"function": {"name": ..., "arguments": ...}}.')
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise PromptError('Not a tool call: pass each as {"function": {"name": ..., "arguments": ...}}.')
        arguments = function.get("arguments") or {}
        try:
            read = json.loads(arguments) if isinstance(arguments, str) else arguments
            read = as_json(as_mapping(read, "arguments"), "arguments")  # escapes may spell half a character
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(
                f"The arguments of a call of {function['name']!r} are no JSON object ({error}): pass one."
            ) from error
        calls.append({**call, "function": {**function, "arguments": read}})
    return {**message, "tool_calls": calls}


def _named(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"].get("arguments") or {}}
