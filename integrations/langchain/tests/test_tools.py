"""Tools and forms: a random model calls the right tool with the right arguments where it must, since its answer is
decoded within their schema."""

from __future__ import annotations

import asyncio
import json
from enum import Enum
from typing import Any, Literal, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_inferscale import ChatInferScale
from langchain_inferscale.messages import chunk, generation
from pydantic import BaseModel, RootModel

from inferscale_memory import Reply, ReplyChunk, ToolCall
from inferscale_memory.errors import ConfigurationError
from integrations.langchain.tests.saying import ADA, FACTS, asked, injected
from tests.memory.watched import WatchedEngine


@tool
def weather(city: Literal["Porto", "Oslo"], days: Literal[1, 2]) -> str:
    """The weather of a city."""
    return f"Rain in {city} for {days} days."


@tool
def stop_it() -> str:
    """Stop."""
    return "Stopped."


class Verdict(BaseModel):
    """A verdict."""

    guilty: bool
    crime: Literal["theft", "murder"]


class VerdictDict(TypedDict):
    """A verdict."""

    guilty: bool
    crime: Literal["theft", "murder"]


@pytest.fixture
def bare(engine: WatchedEngine) -> ChatInferScale:
    return ChatInferScale(engine=engine, max_tokens=80)


# -- forced ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice", ["weather", "any", True, {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_call_is_made_with_arguments_of_its_schema(bare: ChatInferScale, choice: Any) -> None:
    answer = bare.bind_tools([weather], tool_choice=choice).invoke("What is the weather?")
    assert answer.text == ""
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    assert call["id"]
    assert weather.invoke(call["args"]).startswith("Rain in ")
    assert answer.response_metadata["finish_reason"] == "tool_calls"


def test_any_means_one_of_them(bare: ChatInferScale) -> None:
    answer = bare.bind_tools([weather, stop_it], tool_choice="any").invoke("Do something")
    assert answer.tool_calls[0]["name"] in ("weather", "stop_it")


def test_a_tool_without_arguments(bare: ChatInferScale) -> None:
    (call,) = bare.bind_tools([stop_it], tool_choice="any").invoke("Stop").tool_calls
    assert (call["name"], call["args"]) == ("stop_it", {})


def test_a_forced_call_is_streamed(bare: ChatInferScale) -> None:
    bound = bare.bind_tools([weather], tool_choice="any")
    whole: Any = None
    for piece in bound.stream("What is the weather?"):
        whole = piece if whole is None else whole + piece
    assert isinstance(whole, AIMessageChunk)
    assert whole.tool_calls[0]["args"] == bound.invoke("What is the weather?").tool_calls[0]["args"]


def test_a_forced_call_stands_on_memories(model: ChatInferScale) -> None:
    bound = model.bind_tools([weather], tool_choice="any")
    answer = bound.invoke("What is the weather where I live?", ADA, max_tokens=80)
    assert answer.tool_calls[0]["name"] == "weather"
    assert injected(answer) == set(FACTS)


def test_a_forced_call_that_is_cut_off_is_invalid_and_never_another_call(bare: ChatInferScale) -> None:
    bound = bare.bind_tools([weather], tool_choice="any")
    answer = bound.invoke("What is the weather?", max_tokens=12)
    assert answer.tool_calls == []
    assert "cut off" in (answer.invalid_tool_calls[0]["error"] or "")
    assert answer.response_metadata["finish_reason"] == "length"
    whole: Any = None
    for piece in bound.stream("What is the weather?", max_tokens=12):
        whole = piece if whole is None else whole + piece
    assert whole.tool_calls == []
    assert len(whole.invalid_tool_calls) == 1
    assert "cut off" in whole.response_metadata["tool_errors"][0]["error"]


@pytest.mark.parametrize("choice", ["sing", {"function": {"name": "sing"}}, {}])
def test_a_choice_that_does_not_exist_is_an_error_at_once(bare: ChatInferScale, choice: Any) -> None:
    with pytest.raises(ConfigurationError, match="the tools are: weather"):
        bare.bind_tools([weather], tool_choice=choice)


def test_a_call_of_a_tool_that_does_not_exist_is_invalid(bare: ChatInferScale, engine: WatchedEngine) -> None:
    """What models make up is reported, with what is wrong."""
    reply = bare.chat.answer(bare.chat.prepare("Hi", {}))
    made_up = ToolCall("sing", {"song": "x"}, error="there is no such tool", raw='{"song": "x"}')
    reply = Reply("", (), (), reply.completion, reply.timings, (made_up, ToolCall("stop_it", {})))
    message = generation(reply, "m").message
    assert isinstance(message, AIMessage)
    assert [call["name"] for call in message.tool_calls] == ["stop_it"]
    assert message.invalid_tool_calls[0]["error"] == "there is no such tool"
    streamed = chunk(ReplyChunk("", reply), "m").message
    assert isinstance(streamed, AIMessageChunk)
    assert [call["name"] for call in streamed.tool_calls] == ["stop_it"]
    assert [call["name"] for call in streamed.invalid_tool_calls] == ["sing"]


# -- a choice of its own -----------------------------------------------------------------------------------------


def test_tools_and_their_results_are_in_the_prompt(bare: ChatInferScale, engine: WatchedEngine) -> None:
    call = {"name": "weather", "args": {"city": "Porto", "days": 1}, "id": "1", "type": "tool_call"}
    bare.bind_tools([weather]).invoke(
        [
            HumanMessage("Is it raining?"),
            AIMessage("", tool_calls=[call]),
            ToolMessage("Rain in Porto for 1 days.", tool_call_id="1", status="error"),
        ],
        max_tokens=2,
    )
    for words in ("The weather of a city.", '"city": "Porto"', "Rain in Porto for 1 days."):
        assert words in asked(engine)


def test_none_offers_no_tools(bare: ChatInferScale, engine: WatchedEngine) -> None:
    bare.bind_tools([weather], tool_choice="none").invoke("Hi", max_tokens=2)
    assert "The weather of a city." not in asked(engine)


def test_a_broken_call_of_the_past_can_be_told(bare: ChatInferScale, engine: WatchedEngine) -> None:
    broken = {
        "name": "weather",
        "args": '{"city": "Po',
        "id": "1",
        "error": "cut off",
        "type": "invalid_tool_call",
    }
    bare.bind_tools([weather]).invoke(
        [
            HumanMessage("Is it raining?"),
            AIMessage("", invalid_tool_calls=[broken]),
            ToolMessage("The call was cut off.", tool_call_id="1"),
        ],
        max_tokens=2,
    )
    assert "The call was cut off." in asked(engine)


# -- forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize(
    "schema", [Verdict, VerdictDict, Verdict.model_json_schema()], ids=["class", "dict", "json"]
)
def test_an_answer_in_the_form_of_a_schema(bare: ChatInferScale, method: Any, schema: Any) -> None:
    structured = bare.with_structured_output(schema, method=method)
    found = [
        structured.invoke("Well?"),
        asyncio.run(structured.ainvoke("Well?")),
        list(structured.stream("Well?"))[-1],
    ]
    for verdict in found:
        Verdict.model_validate(verdict if schema is not Verdict else verdict.model_dump())
        assert isinstance(verdict, Verdict if schema is Verdict else dict)


def test_the_raw_answer_comes_with_it_and_errors_do_not_raise(bare: ChatInferScale) -> None:
    structured = bare.with_structured_output(Verdict, include_raw=True)
    good = structured.invoke("Well?")
    assert good["parsed"] == Verdict.model_validate(json.loads(good["raw"].text))
    assert good["parsing_error"] is None
    cut = ChatInferScale(engine=bare.engine, max_tokens=3).with_structured_output(Verdict, include_raw=True)
    bad = cut.invoke("Well?")
    assert bad["parsed"] is None
    assert bad["parsing_error"] is not None


def test_a_form_stands_on_memories(model: ChatInferScale) -> None:
    bound = model.bind(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "verdict", "schema": Verdict.model_json_schema()},
        },
        max_tokens=80,
    )
    answer = bound.invoke("Well?", ADA)
    Verdict.model_validate_json(answer.text)
    assert injected(answer) == set(FACTS)


def test_any_object(bare: ChatInferScale, engine: WatchedEngine) -> None:
    bare.invoke("Well?", response_format={"type": "json_object"}, max_tokens=4)
    assert json.loads(engine.asked[-1][1].schema or "") == {"type": "object"}


def test_forms_that_cannot_be(bare: ChatInferScale) -> None:
    with pytest.raises(ConfigurationError, match="json_schema, function_calling, json_mode"):
        bare.with_structured_output(Verdict, method="guess")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="response_format is none"):
        bare.invoke("Well?", response_format={"type": "poem"})
    with pytest.raises(ConfigurationError, match="ToolStrategy"):
        bare.bind_tools([weather]).invoke("Well?", response_format={"type": "json_object"})


class Note(BaseModel):
    """A note."""

    words: str = ""


@pytest.mark.parametrize("schema", [Note, Note.model_json_schema()], ids=["class", "json"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_an_answer_that_is_cut_off_is_an_error_and_no_half_object(
    engine: WatchedEngine, method: Any, schema: Any
) -> None:
    """LangChain's own parsers complete JSON that ends too early, and pass over a call that does."""
    short = ChatInferScale(engine=engine, max_tokens=12)
    structured = short.with_structured_output(schema, method=method)
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        structured.invoke("Well?")
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        asyncio.run(structured.ainvoke("Well?"))
    with pytest.raises(OutputParserException, match="raise max_tokens"):
        list(structured.stream("Well?"))
    raw = short.with_structured_output(schema, method=method, include_raw=True).invoke("Well?")
    assert raw["parsed"] is None
    assert "raise max_tokens" in str(raw["parsing_error"])


def test_a_tool_with_an_odd_name_and_definitions_can_be_forced(bare: ChatInferScale) -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}, "also": {"$ref": "#/properties/at"}},
        "required": ["at", "also"],
        "$defs": {"Place": {"enum": ["Porto", "Oslo"]}},
    }
    odd = {"name": "maps/find", "description": "Braces: {x} }{", "parameters": parameters}
    answer = bare.bind_tools([{"type": "function", "function": odd}], tool_choice="any").invoke("Where?")
    [call] = answer.tool_calls
    assert call["name"] == "maps/find"
    assert set(call["args"].values()) <= {"Porto", "Oslo"}


# -- schemas that are no object ----------------------------------------------------------------------------------


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Grades(RootModel[list[Literal[1, 2]]]):
    """Grades."""


COLORS = {"title": "color", "enum": ["red", "blue"]}
PAIRS = {
    "title": "pair",
    "type": "array",
    "items": {"type": "boolean"},
    "minItems": 2,
    "maxItems": 2,
}
EITHER = {"title": "either", "anyOf": [{"const": 4}, {"type": "object", "properties": {"a": {"const": 1}},
          "required": ["a"], "additionalProperties": False}]}  # fmt: skip


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_a_schema_that_is_no_object_is_kept(bare: ChatInferScale, method: Any) -> None:
    def said(schema: Any) -> Any:
        return bare.with_structured_output(schema, method=method).invoke("Well?")

    with pytest.raises(ConfigurationError, match="its type"):
        said({"title": "nothing"})
    assert said(COLORS) in ("red", "blue")
    assert said({"enum": ["red"]}) == "red"
    assert [type(one) for one in said(PAIRS)] == [bool, bool]
    assert said(EITHER) in (4, {"a": 1})
    assert set(said(Grades).root) <= {1, 2}


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("schema", [Color, None, {}, "Color", 5, int, list[int], Literal["a"]], ids=str)
def test_what_is_no_schema_is_refused_when_it_is_made(bare: ChatInferScale, method: Any, schema: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"schema|enum|tool"):
        bare.with_structured_output(schema, method=method)


@pytest.mark.parametrize("schema", [COLORS, PAIRS, Grades, Color], ids=str)
def test_a_tool_has_named_arguments(bare: ChatInferScale, schema: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"object|enum"):
        bare.bind_tools([schema])
    with pytest.raises(ConfigurationError, match=r"object|enum"):
        bare.with_structured_output(schema, method="function_calling")


@pytest.mark.parametrize(
    "tools", [None, 5, "weather", [None], [5], [{"type": "function"}], [{}], [{"a": 1}]], ids=str
)
def test_what_is_no_tool_is_refused(bare: ChatInferScale, tools: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"tool"):
        bare.bind_tools(tools)
