"""Answers in the form of a schema: the schema an answer is decoded within, and what reads it."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Literal

from langchain_core.language_models import LanguageModelInput
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from inferscale_memory.errors import ConfigurationError

Method = Literal["json_schema", "function_calling", "json_mode"]
METHODS = ("json_schema", "function_calling", "json_mode")


def checked_method(method: str) -> None:
    """Raises ConfigurationError on a method that does not exist."""
    if method not in METHODS:
        raise ConfigurationError(f"method is {method!r}: pass one of {', '.join(METHODS)}")


def bound_to(schema: Any, method: str) -> dict[str, Any]:
    """Arguments under which a model answers in JSON of `schema`. In JSON mode too: where the schema is known there is
    no reason to promise less."""
    described = convert_to_json_schema(schema)
    name = str(described.get("title") or "answer")
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": described}},
        "ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema},
    }


def read_as(
    schema: Any, llm: Runnable[LanguageModelInput, Any], *, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """`llm`, whose answers are read: objects of a pydantic class, dictionaries for any other schema."""
    parser: Any = JsonOutputParser()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = PydanticOutputParser(pydantic_object=schema)
    if not include_raw:
        answer: Runnable[LanguageModelInput, Any] = llm | parser
        return answer
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    told: Runnable[Any, Any] = read.with_fallbacks([failed], exception_key="parsing_error")
    return RunnableMap(raw=llm) | told
