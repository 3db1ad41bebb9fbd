"""Tool calls: forced within a schema, read out of an answer, and never lost in a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferscale_memory.errors import PromptError
from inferscale_memory.prompt.calls import (
    call_schema,
    forced,
    read_calls,
    read_forced,
    words_of_call,
)
from inferscale_memory.prompt.tools import read_tools

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = read_tools([{"name": "weather", "parameters": CITY}, {"name": "now"}])
CALL = '{"name": "weather", "arguments": {"city": "Porto"}}'


def calls(text: str) -> list[tuple[str, dict[str, Any], bool]]:
    return [(call.name, dict(call.arguments), call.error is None) for call in read_calls(text, TOOLS).calls]


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>{CALL}",
        CALL,
        f"[{CALL}]",
        '{"name": "weather", "parameters": {"city": "Porto"}}',
        json.dumps({"name": "weather", "arguments": json.dumps({"city": "Porto"})}),
    ],
)
def test_a_call_is_read(text: str) -> None:
    assert calls(text) == [("weather", {"city": "Porto"}, True)]
    assert read_calls(text, TOOLS).text == ""


def test_several_calls_and_the_words_around_them() -> None:
    text = f'Let me look. <tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call> Done.'
    assert calls(text) == [("weather", {"city": "Porto"}, True), ("now", {}, True)]
    assert read_calls(text, TOOLS).text.split() == ["Let", "me", "look.", "Done."]
    ids = [call.id for call in read_calls(text, TOOLS).calls]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("text", ["Rain.", "", '{"city": "Porto"}', "[1, 2]", "[]", '{"name": "Maya"}', "{"])
def test_what_is_no_call_is_words(text: str) -> None:
    assert read_calls(text, TOOLS).text == text
    assert calls(text) == []


@pytest.mark.parametrize(
    ("body", "name", "why"),
    [
        ('{"name": "weather", "arguments": {"city": "Po', "weather", "cut off"),
        ('{"name": "sing", "arguments": {}}', "sing", "no such tool"),
        ('{"name": "weather", "arguments": "Porto"}', "weather", "no JSON"),
        ('{"name": "weather", "arguments": [1]}', "weather", "no object"),
        ('{"arguments": {}}', "", "names no tool"),
        ("[]", "", "names no tool"),
    ],
)
def test_a_call_that_cannot_be_made_says_why(body: str, name: str, why: str) -> None:
    [call] = read_calls(f"<tool_call>{body}</tool_call>", TOOLS).calls
    assert call.name == name
    assert why in str(call.error)
    assert call.raw


def test_a_tool_that_must_be_called() -> None:
    assert forced(TOOLS, None) == forced(TOOLS, "auto") == forced(TOOLS, "none") == ()
    assert forced(TOOLS, "any") == forced(TOOLS, "required") == ("weather", "now")
    assert forced(TOOLS, "now") == ("now",)
    with pytest.raises(PromptError, match="the tools are: weather, now"):
        forced(TOOLS, "sing")
    with pytest.raises(PromptError, match="the tools are: none"):
        forced([], "any")


def test_the_schema_of_a_call_keeps_references_apart() -> None:
    """Two tools may each have a definition of the same name."""

    def tool(name: str, kind: str) -> dict[str, Any]:
        of = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}}
        return {"name": name, "parameters": {**of, "$defs": {"Place": {"type": kind}}}}

    schema = call_schema(read_tools([tool("one", "string"), tool("two", "integer")]), ["one", "two"])
    for call in schema["anyOf"]:
        name = call["properties"]["name"]["const"]
        ref = call["properties"]["arguments"]["properties"]["at"]["$ref"]
        place = schema["$defs"][ref.removeprefix("#/$defs/")]
        assert place == {"type": {"one": "string", "two": "integer"}[name]}
        assert "$defs" not in call["properties"]["arguments"]


def test_a_tool_without_parameters_takes_none() -> None:
    schema = call_schema(TOOLS, ["now"])
    assert schema["properties"]["arguments"]["additionalProperties"] is False


def test_a_forced_call_that_was_cut_off_says_so() -> None:
    [call] = read_forced(CALL, TOOLS).calls
    assert (call.name, call.arguments, call.error) == ("weather", {"city": "Porto"}, None)
    [call] = read_forced(CALL[:-5], TOOLS).calls
    assert call.name == "weather"
    assert "cut off" in str(call.error)


@pytest.mark.parametrize(
    "text", [f"Let me look. <tool_call>{CALL}</tool_call>", CALL, "A < b, and <tool> is a tag."]
)
def test_what_is_let_out_of_a_stream_stays_words(text: str) -> None:
    """At every length: what is certain never shrinks, never goes past the words, and all of it comes in the end."""
    words, before = read_calls(text, TOOLS).text, 0
    for length in range(len(text) + 1):
        certain = words_of_call(text[:length])
        assert before <= certain <= length
        assert words.startswith(text[:certain].rstrip())
        before = certain


@pytest.mark.parametrize("name", ["weather/today", "weather", "a~b%c"])
def test_every_reference_in_the_schema_of_a_call_leads_somewhere(name: str) -> None:
    """Whatever the tool is called, and where its parameters refer to themselves."""
    parameters = {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/Place"},
            "also": {"$ref": "#/properties/at"},
            "then": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "$defs": {"Place": {"enum": ["Porto"]}},
    }
    schema = call_schema(read_tools([{"name": name, "parameters": parameters}]), [name])

    def led(ref: str) -> Any:
        node: Any = schema
        for part in ref.removeprefix("#/").split("/"):
            node = node[part]
        return led(node["$ref"]) if "$ref" in node else node

    arguments = led(schema["properties"]["arguments"]["$ref"])
    of = arguments["properties"]
    assert led(of["at"]["$ref"]) == led(of["also"]["$ref"]) == {"enum": ["Porto"]}
    assert led(of["then"]["anyOf"][0]["$ref"]) == arguments
