"""Whatever a model says within a schema is JSON, and valid: answers drawn at random from the grammar itself."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from inferscale_memory.extraction.instructions import schema_for
from inferscale_memory.prompt.calls import call_schema
from inferscale_memory.prompt.json_pattern import UnsupportedPatternError, spelled
from inferscale_memory.prompt.tools import read_tools
from tests.engine.walks import answers, lets_through

LAST = "\U0010ffff"
AWKWARD = ['"', "\\", "\n", "\t", "\x00", "\x1f", "\x7f", 'He said "hello" to me.', "a\\nb", "é", "日🙂"]


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    named = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": named, "additionalProperties": False}


INTEGER, NULL, TEXT = {"type": "integer"}, {"type": "null"}, {"type": "string", "maxLength": 3}
NODE = {
    "$defs": {
        "Node": {
            "properties": {
                "value": INTEGER,
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, NULL], "default": None},
            },
            "required": ["value"],
            "type": "object",
        }
    },
    "$ref": "#/$defs/Node",
}
"""As pydantic describes `class Node: value: int; next: Node | None = None`."""
PAIR = [INTEGER, {"type": "boolean"}]

SCHEMAS: dict[str, Any] = {
    "an optional recursive reference": NODE,
    "a reference to the whole": closed(n=INTEGER, kids={"type": "array", "items": {"$ref": "#"}}),
    "an enum alone": {"enum": ["red", 'a"b', 1, None, [1, 2], {"a": [1]}]},
    "an enum of one type": {"enum": ["red", 1], "type": "string"},
    "an array alone": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    "a tuple": {"type": "array", "prefixItems": PAIR, "minItems": 2, "maxItems": 2},
    "a tuple with a rest": {"type": "array", "prefixItems": PAIR, "items": NULL, "maxItems": 4},
    "less than a tuple": {"type": "array", "prefixItems": PAIR, "maxItems": 1},
    "no items": {"type": "array", "items": False},
    "several types": {"type": ["string", "null", "integer"], "minLength": 2, "minimum": 3},
    "a length": {"type": "string", "minLength": 2, "maxLength": 4},
    "a range over quotes": {"type": "string", "pattern": f"^[!-{LAST}]+$"},
    "white space, quotes, backslashes": {"type": "string", "pattern": r'^(?:\s|\\|")*$'},
    "all but words": {"type": "string", "pattern": r"^\W+\D\S$"},
    "a pattern without anchors": {"type": "string", "pattern": "a|b"},
    "a number between": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 1.25},
    "an integer between": {"type": "integer", "exclusiveMinimum": -5.5, "exclusiveMaximum": 100.5},
    "optional properties": closed([], a=INTEGER, b=TEXT, c=NULL),
    "more properties": {"properties": {"a": INTEGER}, "required": ["a", "z"], "additionalProperties": TEXT},
    "a property that may not be": {"type": "object", "properties": {"x": False, "y": INTEGER}},
    "a number of properties": {
        **closed(["b"], a=INTEGER, b=NULL, c=NULL),
        "minProperties": 2,
        "maxProperties": 2,
    },
    "names of properties": {
        "type": "object",
        "propertyNames": {"enum": ["x"]},
        "additionalProperties": INTEGER,
    },
    "anything": {},
    "one of two that a const tells apart": {
        "oneOf": [closed(k={"const": "a"}, v=INTEGER), closed(k={"const": "b"}, v=TEXT)]
    },
    "all of one": {"allOf": [{"type": "integer", "minimum": 3}], "title": "At least three"},
    "a reference with an escape": {
        "$defs": {"a/b~c d": INTEGER},
        **closed(x={"$ref": "#/$defs/a~1b~0c%20d"}, y={"$ref": "#/properties/x"}),
    },
    **{
        f"the format {name}": {"type": "string", "format": name}
        for name in ("date", "date-time", "email", "ipv4", "ipv6", "json-pointer", "uuid", "hostname")
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_finished_answer_is_valid(name: str) -> None:
    found = list(answers(SCHEMAS[name], 12))
    assert found
    validator = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for answer in found:
        validator.validate(json.loads(answer))


@pytest.mark.parametrize("text", AWKWARD)
def test_a_pattern_takes_the_value_that_json_spells(text: str) -> None:
    for pattern in ("^[^#]+$", f"^[\\x00-{LAST}]+$", f"^{re.escape(text)}$"):
        if re.fullmatch(pattern, text):
            assert lets_through({"type": "string", "pattern": pattern}, json.dumps(text, ensure_ascii=False))


def test_a_quote_as_it_is_does_not_end_a_string() -> None:
    schema = {"type": "string", "pattern": f"^[!-{LAST}]+$"}
    assert not lets_through(schema, '"a"b"')
    assert not lets_through(schema, '"a\\b"')
    assert lets_through(schema, '"a\\"b"')


def test_an_extraction_can_say_what_somebody_said() -> None:
    messages = [
        {"role": "user", "content": '## New Messages\nuser: He said "hello" to me.\n\n## Observation Date\n'}
    ]
    fact = {"id": "0", "text": 'He said "hello" to User.', "attributed_to": "user"}
    schema = schema_for(messages, 500)
    assert lets_through(schema, json.dumps({"memory": [fact]}, separators=(",", ":")))
    for answer in answers(schema, 6):
        json.loads(answer)


def test_arguments_of_a_forced_call_are_valid_for_the_tool_they_are_made_for() -> None:
    tools = read_tools([{"name": "walk", "parameters": NODE}, {"name": "stop", "parameters": {}}])
    calls = [json.loads(answer) for answer in answers(call_schema(tools, ["walk"]), 12)]
    assert calls
    for call in calls:
        assert call["name"] == "walk"
        jsonschema.validate(call["arguments"], NODE)
    assert any(isinstance(call["arguments"].get("next"), dict) for call in calls)


@pytest.mark.parametrize(
    "pattern", ["(?=a)a", r"(a)\1", r"\bword", r"\p{L}", "a^b", "[", "(", "*", "a{3,2}", "(?i)a", "\\"]
)
def test_a_pattern_that_no_grammar_can_hold_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPatternError):
        spelled(pattern)
