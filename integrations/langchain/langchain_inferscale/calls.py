"""One call of the chat model, read: what the constructor, `bind` and the config have said, settled.

It must never pass over an argument it does not know: a misspelt `user_id` would be answered without memories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from inferscale_memory import SamplingOptions
from inferscale_memory.arguments import as_count, as_mapping, as_plain, as_text, refusal
from inferscale_memory.deprecation import with_top_k
from inferscale_memory.errors import ConfigurationError
from langchain_inferscale.scope import IDS, Ids
from langchain_inferscale.structured import checked_class, is_json_schema

SAMPLING = ("temperature", "max_tokens", "top_p", "seed")
_OWN = ("scope", "memories", "top_k", "filters", "inject", "tools", "tool_choice", "response_format", *SAMPLING)
# What LangChain hands to every model, and has no meaning here: one process, one model, nothing to try again.
UNUSED = ("stream", "strict", "parallel_tool_calls", "timeout", "max_retries", "api_key", "memory_version")

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Call:
    """What one call asks for.

    Attributes:
        scope: ids of those whose memories are meant.
        memories: search results that are to be used instead of searching; None to search.
        top_k: how many to recall; None for the memory's own number, 0 for none.
        filters: mem0's filters, beyond the ids.
        tools, tool_choice: as chat APIs have them.
        options: how tokens are drawn.
        inject: False prefills the very same prompt as text.
    """

    scope: Ids
    memories: Sequence[Mapping[str, Any]] | None
    top_k: int | None
    filters: Mapping[str, Any] | None
    tools: Sequence[dict[str, Any]] | None
    tool_choice: str | None
    options: SamplingOptions
    inject: bool

    @property
    def recalls(self) -> bool:
        """Whether a search is to be made, where there is a memory."""
        return self.memories is None and self.top_k != 0

    @property
    def prompt(self) -> dict[str, Any]:
        """What preparing the prompt is told of it."""
        return {
            "max_tokens": self.options.max_tokens,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
        }


def read_call(defaults: Mapping[str, Any], given: Mapping[str, Any], stop: Sequence[str] | None) -> Call:
    """`given`, the arguments of a call, over `defaults`, which has all of `_OWN`.

    Raises:
        ConfigurationError: an argument that does not exist, or one that cannot be.
    """
    given = with_top_k(given)
    unknown = sorted(set(given) - {*_OWN, *UNUSED})
    if unknown:
        raise ConfigurationError(
            f"ChatInferScale takes no {', '.join(unknown)}: it knows {', '.join((*IDS, *_OWN[1:]))} and stop. "
            "An engine has one model."
        )
    call = {**defaults, **{name: value for name, value in given.items() if name in _OWN}}
    options = SamplingOptions(
        **{name: call[name] for name in SAMPLING},
        stop=_stop(call["stop"] if stop is None else stop),
    )
    schema = _schema(call["response_format"])
    tools = call["tools"] or None
    if tools is not None and not isinstance(tools, list | tuple):
        raise refusal("tools", tools, "a list of tools, as bind_tools makes it")
    if call["tool_choice"] is not None and not isinstance(call["tool_choice"], str):
        raise refusal("tool_choice", call["tool_choice"], "'auto', 'any', 'none' or the name of a tool")
    if schema is not None:
        if tools and call["tool_choice"] != "none":
            raise ConfigurationError(
                "an answer within response_format can call no tool: leave out the tools, or give an agent "
                "ToolStrategy(schema), which makes the schema one of the tools"
            )
        options = replace(options, json_schema=schema)
    return Call(
        scope=dict(call["scope"]),
        memories=_memories(call["memories"]),
        top_k=None if call["top_k"] is None else as_count(call["top_k"], "top_k"),
        filters=None if call["filters"] is None else as_mapping(call["filters"], "filters"),
        tools=tools,
        tool_choice=call["tool_choice"],
        options=options,
        inject=bool(call["inject"]),
    )


def _stop(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise refusal("stop", given, "a text or a list of texts")
    return tuple(as_text(text, "stop") for text in texts)


def _memories(given: Any) -> Sequence[Mapping[str, Any]] | None:
    if given is None:
        return None
    if (
        isinstance(given, str)
        or not isinstance(given, Sequence)
        or not all(isinstance(one, Mapping) for one in given)
    ):
        raise refusal("memories", given, "a list of results of a search")
    return given


def _schema(form: Any) -> Mapping[str, Any] | None:
    """The JSON schema of a `response_format` as chat APIs have it. None without one."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind == "json_schema":
        schema = form.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, Mapping) else None
        if isinstance(schema, Mapping):
            return schema
    raise ConfigurationError(
        'response_format is none: pass {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}} '
        'or {"type": "json_object"}'
    )


def read_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools, functions, schemas and classes in the form of chat APIs.

    Raises:
        ConfigurationError: what is no tool, or takes anything but named arguments.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Iterable):
        raise refusal("tools", tools, "a list of tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    checked_class(tool)
    tool = as_plain(tool, "a tool") if isinstance(tool, Mapping) else tool
    if is_json_schema(tool) and not _takes_names(tool):
        raise refusal("a tool", tool, "one whose schema is of type 'object', with properties")
    try:
        read = convert_to_openai_tool(tool)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal(
            "a tool", tool, "a function, a tool of LangChain's, a pydantic class or a schema"
        ) from error
    function = read.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refusal("a tool", tool, '{"type": "function", "function": {"name": ..., "parameters": {...}}}')
    if not _takes_names(function.get("parameters") or {}):
        raise refusal(f"the tool {function['name']!r}", tool, "one whose arguments are of type 'object'")
    return read


def _takes_names(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type", "object") == "object" and "enum" not in schema


def read_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """A tool choice of LangChain's or of a chat API as "auto", "none", "any", or the name of a tool.

    Raises:
        ConfigurationError: a tool that is not among `tools`.
    """
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
        choice = "" if choice is None else choice
    if choice is True:
        choice = names[0] if len(names) == 1 else "any"
    if choice is None or choice is False:
        return None
    if choice == "required":
        choice = "any"
    if isinstance(choice, str) and (choice in ("auto", "none", *names) or (choice == "any" and names)):
        return str(choice)
    known = ", ".join(names) or "none"
    raise refusal(
        "tool_choice", choice, f"'auto', 'any', 'none' or one of the tools (the tools are: {known})"
    )
