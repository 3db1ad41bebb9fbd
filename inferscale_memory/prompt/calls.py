"""Tool calls in what a model answered: how they are forced, read, and kept out of a stream of words.

What is read here is JSON, in tool_call tags (Hermes, Qwen, SmolLM3, and where a template says nothing of tools: see
`tools`) or bare (Llama 3). Other models' formats are read by vLLM's tool parsers, which its engine brings along.
A call of a tool that was not offered, or one that is cut off, is reported, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from inferscale_memory.arguments import as_plain, repaired
from inferscale_memory.errors import PromptError
from inferscale_memory.prompt.json_schema import read_schema
from inferscale_memory.prompt.tools import CALL_BEGINS, CALL_ENDS, tool_names

Tools = Sequence[Mapping[str, Any]]

_ANY = ("any", "required")
_ELSEWHERE = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
"""Keywords with which a schema says in another one what arguments are."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model asks for.

    Attributes:
        name: of the tool.
        arguments: as an object; empty where `error` says that they could not be read.
        id: unique, for the result to refer to.
        error: what is wrong with it; None when nothing is.
        raw: the arguments as the model wrote them, where they could not be read.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")
    error: str | None = None
    raw: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, taken apart into words and calls."""

    text: str
    calls: tuple[ToolCall, ...] = ()


CallReader = Callable[[str, Tools], Said]
"""Takes an answer apart, given the tools that were offered."""


def forced(tools: Tools, choice: str | None) -> tuple[str, ...]:
    """Names of the tools one of which must be called: none where the model may choose.

    Args:
        choice: "auto", "none", "any" (or "required"), the name of a tool, or None for "auto".

    Raises:
        PromptError: a tool that does not exist, or a call forced without tools.
    """
    names = tool_names(tools)
    if choice is None or choice in ("auto", "none"):
        return ()
    if choice in _ANY and names:
        return tuple(names)
    if choice in names:
        return (choice,)
    known = ", ".join(names) or "none"
    raise PromptError(
        f"tool_choice is {choice!r}, and the tools are: {known}. Choose one of them, or 'auto'."
    )


def call_schema(tools: Tools, names: Sequence[str]) -> dict[str, Any]:
    """A JSON schema of one call of one of `names`.

    Raises:
        ConfigurationError: arguments of one of them cannot be kept within its parameters.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] in names:
            read_schema(function["parameters"], f"the parameters of tool {function['name']!r}")
            arguments = _hoisted(f"tool{number}", function["parameters"], definitions)
            properties = {"name": {"const": function["name"]}, "arguments": arguments}
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def _hoisted(name: str, parameters: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """`parameters` as a part of a larger schema: its definitions move there, under names of their own that begin with
    `name`, and so does all of it where it refers to itself."""
    schema = deepcopy(dict(parameters))
    own = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    to_itself = False

    def target(ref: str) -> str:
        nonlocal to_itself
        for key in own:
            if ref.startswith(f"#/{key}/"):
                return f"#/$defs/{name}.{ref.removeprefix(f'#/{key}/')}"
        if ref == "#" or ref.startswith("#/"):
            to_itself = True
            return f"#/$defs/{name}{ref.removeprefix('#')}"
        return ref

    def moved(node: Any) -> Any:
        if isinstance(node, dict):
            return {
                key: target(value) if key == "$ref" and isinstance(value, str) else moved(value)
                for key, value in node.items()
            }
        return [moved(value) for value in node] if isinstance(node, list) else node

    for found in own.values():
        definitions.update({f"{name}.{key}": moved(value) for key, value in found.items()})
    schema = moved(schema)
    if not schema.keys() & _ELSEWHERE:
        schema = {"type": "object", **schema}
        if not schema.get("properties"):  # otherwise a model may make up arguments without end
            schema.setdefault("additionalProperties", False)
    if not to_itself:
        return schema
    definitions[name] = schema
    return {"$ref": f"#/$defs/{name}"}


def read_forced(text: str, tools: Tools) -> Said:
    """The one call that a schema of `call_schema` let the model make; cut off by `max_tokens` it has an
    error."""
    return Said("", (_call(text, tools),))


def read_calls(text: str, tools: Tools) -> Said:
    """A `CallReader` for calls in JSON: within tags, or, bare, as the whole answer."""
    if CALL_BEGINS in text:
        words, *marked = text.split(CALL_BEGINS)
        parts = [part.partition(CALL_ENDS) for part in marked]
        words += "".join(rest for _, _, rest in parts)
        return Said(words.strip(), tuple(_call(body, tools) for body, _, _ in parts))
    try:
        found = json.loads(text)
    except ValueError:
        return Said(text)
    items = found if isinstance(found, list) else [found]
    names = tool_names(tools)
    if items and all(isinstance(item, dict) and item.get("name") in names for item in items):
        return Said("", tuple(_called(item, tools) for item in items))
    return Said(text)


def words_of_call(text: str) -> int:
    """How many characters of a growing answer are words for certain: what follows may be a call."""
    stripped = text.lstrip()
    if not stripped or stripped[0] in "{[":
        return 0
    begins = text.find(CALL_BEGINS)
    if begins >= 0:
        return begins
    for length in range(min(len(CALL_BEGINS) - 1, len(text)), 0, -1):
        if CALL_BEGINS.startswith(text[-length:]):
            return len(text) - length
    return len(text)


def _call(body: str, tools: Tools) -> ToolCall:
    try:
        found = json.loads(body)
    except ValueError as error:
        name = _name_in(body, tools)
        return ToolCall(name, {}, error=f"the call is no JSON, or was cut off ({error})", raw=body.strip())
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, error="the call names no tool", raw=body.strip())
    return _called(found, tools)


def _called(found: Mapping[str, Any], tools: Tools) -> ToolCall:
    name = repaired(str(found["name"]))
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return ToolCall(name, {}, error="its arguments are no JSON", raw=arguments)
    arguments = as_plain(arguments, "arguments")  # escapes may spell half a character
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, error="its arguments are no object", raw=json.dumps(arguments))
    if name not in tool_names(tools):
        return ToolCall(name, arguments, error="there is no such tool", raw=json.dumps(arguments))
    return ToolCall(name, arguments)


def _name_in(body: str, tools: Tools) -> str:
    """The tool whose name a broken call spells; "" when it spells none."""
    return next((name for name in tool_names(tools) if f'"{name}"' in body), "")
