"""What is refused of a JSON schema, before any engine sees it: by keyword and path."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.errors import ConfigurationError, PromptError
from inferscale_memory.prompt.calls import call_schema
from inferscale_memory.prompt.tools import read_tools

WITHIN = {"type": "object", "properties": {"a": {}}}
ITSELF = {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}}, "$ref": "#/$defs/x"}
ENDLESS = {"$defs": {"x": {"type": "object", "properties": {"y": {"$ref": "#/$defs/x"}}, "required": ["y"]}}}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "nonsense"}, "#/type"),
        ({"type": []}, "#/type"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
        ({"type": "array", "contains": {}}, "#/contains"),
        ({"type": "object", "patternProperties": {"a": {}}}, "#/patternProperties"),
        ({"not": {"type": "string"}}, "#/not"),
        ({"if": {}, "then": {}}, "#/"),
        ({"type": "integer", "multipleOf": 3}, "#/multipleOf"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
        ({"type": "object", "additionalProperties": {"type": "nonsense"}}, "#/additionalProperties/type"),
        ({"type": "array", "items": {"enum": []}}, "#/items/enum"),
        ({"type": "string", "pattern": "(?!a)b"}, "#/pattern"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "#/maxLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "#/minLength"),
        ({"type": "string", "minLength": -1}, "#/minLength"),
        ({"type": "string", "format": "nonsense"}, "#/format"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "#/minimum"),
        ({"type": "integer", "minimum": "3"}, "#/minimum"),
        ({"type": "number", "minimum": 1e-9}, "#/minimum"),
        ({"type": "string", "enum": [1]}, "#/enum"),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "#/allOf"),
        ({"anyOf": [{"type": "string"}], "properties": {}}, "#/properties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
        ({"$ref": "https://example.com/schema"}, "#/$ref"),
        ({"$ref": "#/$defs/missing"}, "#/$ref"),
        ({"$ref": "#"}, "#/$ref"),
        (ITSELF, "#/$defs/x/$ref"),
        ({**ENDLESS, "$ref": "#/$defs/x"}, "#/$defs/x/$ref"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "#/required"),
        ({"type": "object", "minProperties": 1}, "#/minProperties"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "#/minItems"),
        ({"properties": {"a/b": {"type": "nonsense"}}}, "#/properties/a~1b/type"),
        ({"properties": {"a": 7}}, "#/properties/a"),
    ],
)
def test_what_cannot_be_kept_is_named(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        SamplingOptions(json_schema=schema)
    assert f"json_schema: {named}" in str(refused.value)


def test_words_that_say_nothing_about_an_answer_are_left_out() -> None:
    schema = {
        "title": "T",
        "description": "d",
        "default": {},
        "examples": [1],
        "x-mine": {"type": "nonsense"},
        "type": "integer",
        "maxLength": 3,
    }
    assert SamplingOptions(json_schema=schema).schema == '{"type": "integer"}'


def test_a_schema_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ConfigurationError, match="levels deep"):
        SamplingOptions(json_schema=schema)


def test_options_may_be_made_of_options() -> None:
    options = SamplingOptions(json_schema={"type": "string", "pattern": '^"+$'})
    again = SamplingOptions(json_schema=options.json_schema)
    assert again == options
    assert again.schema == options.schema


def test_a_tool_whose_arguments_cannot_be_kept_is_named_where_its_call_is_forced() -> None:
    tools = read_tools([{"name": "tag", "parameters": {"type": "object", "not": {}}}])
    with pytest.raises(ConfigurationError, match="the parameters of tool 'tag': #/not"):
        call_schema(tools, ["tag"])


@pytest.mark.parametrize(
    "parameters",
    [{"enum": ["red"]}, {"type": "array"}, {"type": ["object", "null"]}, {"$ref": "#/x", "x": {"const": 1}}],
)
def test_parameters_that_are_no_object_are_refused_when_the_tool_is_read(parameters: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="no JSON schema of an object"):
        read_tools([{"name": "color", "parameters": parameters}])


def test_the_order_of_properties_is_kept() -> None:
    text = SamplingOptions(json_schema={"properties": {"b": {}, "a": {}}, "required": ["a", "b"]}).schema
    assert text is not None
    assert list(json.loads(text)["properties"]) == ["b", "a"]
