"""Answers in the form of a schema: the schema an answer is decoded within, and what reads it. It must never
complete an answer that was cut off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from enum import Enum
from operator import itemgetter
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableGenerator, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from inferscale_memory import SamplingOptions
from inferscale_memory.arguments import refusal
from inferscale_memory.errors import ConfigurationError

_TOOL_KEYS = {"name", "parameters", "function", "input_schema", "toolSpec"}
Method = Literal["json_schema", "function_calling", "json_mode"]
METHODS = ("json_schema", "function_calling", "json_mode")


def checked_method(method: str) -> None:
    """Raises ConfigurationError on a method that does not exist."""
    if method not in METHODS:
        raise ConfigurationError(f"method is {method!r}: pass one of {', '.join(METHODS)}")


def bound_to(schema: Any, method: str) -> dict[str, Any]:
    """Arguments under which a model answers in JSON of `schema`. In JSON mode too: where the schema is known there is
    no reason to promise less.

    Raises:
        ConfigurationError: what is no schema, or says nothing of an answer.
    """
    described = _described(schema)
    SamplingOptions(json_schema=described)  # refused now rather than with the first question
    name = str(described.get("title") or "answer")
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": described}},
        "ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema},
    }


def _described(schema: Any) -> dict[str, Any]:
    """The JSON schema that a class, a function or a dictionary stands for. A dictionary that is one stays as it is:
    LangChain's own conversion keeps of it what makes a function's arguments, and drops an array, an enum or a union."""
    if is_json_schema(schema):
        described = dict(schema)
    else:
        checked_class(schema)
        try:
            described = dict(convert_to_json_schema(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise refusal("schema", schema, "a pydantic class, a TypedDict or a JSON schema") from error
    if not set(described) - {"title", "description"}:
        raise refusal("schema", schema, "a schema that says what an answer is, such as its type")
    return described


def is_json_schema(schema: Any) -> bool:
    """Whether a dictionary is a JSON schema, and not a tool in the form of some chat API."""
    return isinstance(schema, Mapping) and not set(schema) & _TOOL_KEYS


def checked_class(schema: Any) -> None:
    """Raises ConfigurationError for an enum, whose constructor LangChain would take for the schema."""
    if isinstance(schema, type) and issubclass(schema, Enum):
        raise ConfigurationError(
            f"{schema.__name__} is an enum, and the schema of an answer or a tool has fields: pass a pydantic class "
            f"with a field of type {schema.__name__}"
        )


def parser_of(schema: Any) -> Runnable[Any, Any]:
    """What reads JSON: as objects of a pydantic class, as dictionaries for any other schema."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def read_as(
    llm: Runnable[LanguageModelInput, Any], parser: Runnable[Any, Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """`llm`, whose answers are read by `parser`."""
    if not include_raw:
        return llm | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    told: Runnable[Any, Any] = read.with_fallbacks([failed], exception_key="parsing_error")
    return RunnableMap(raw=llm) | told


# LangChain's parsers are made for streams: they complete JSON that was cut off, and pass over a call that was. So an
# answer goes through one of these first, piece by piece, and an error is raised behind its last piece.


def whole_json() -> Runnable[Any, Any]:
    """Passes answers on. Raises OutputParserException on one that is no whole JSON text."""
    return _checked(_check_json)


def whole_calls() -> Runnable[Any, Any]:
    """Passes answers on. Raises OutputParserException on one with a call that cannot be read."""
    return _checked(_check_calls)


def _checked(check: Callable[[BaseMessage], None]) -> Runnable[Any, Any]:
    def whole(pieces: Iterator[Any]) -> Iterator[Any]:
        said: Any = None
        for piece in pieces:
            said = piece if said is None else said + piece
            yield piece
        check(said)

    async def awhole(pieces: AsyncIterator[Any]) -> AsyncIterator[Any]:
        said: Any = None
        async for piece in pieces:
            said = piece if said is None else said + piece
            yield piece
        check(said)

    return RunnableGenerator(whole, awhole)


def _check_json(answer: BaseMessage) -> None:
    text = str(answer.text)
    try:
        json.loads(text)
    except ValueError as error:
        raise _unread(answer, f"the answer is no JSON ({error})", text) from error


def _check_calls(answer: BaseMessage) -> None:
    if isinstance(answer, AIMessage) and answer.invalid_tool_calls:
        call = answer.invalid_tool_calls[0]
        why = call.get("error") or "its arguments are no JSON object"
        raise _unread(answer, f"the call of {call.get('name')!r} cannot be read ({why})", call.get("args"))


def _unread(answer: BaseMessage, why: str, said: str | None) -> OutputParserException:
    cut_off = answer.response_metadata.get("finish_reason") == "length"
    return OutputParserException(f"{why}{': raise max_tokens' if cut_off else ''}", llm_output=said)
