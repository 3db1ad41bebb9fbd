"""Answers as objects: a class's JSON schema goes into decoding, and the class comes out of the JSON.

LlamaIndex's own way is to force a call of a tool, or to beg for JSON in words. It must never return an object that is
not whole: one that `max_tokens` cut off is an error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

from inferscale_memory.arguments import refusal
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import BaseModel, ValidationError
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.program.utils import process_streaming_objects
from llama_index.core.types import PydanticProgramMode

if TYPE_CHECKING:
    from llama_index.core.prompts import PromptTemplate

dispatcher = get_dispatcher(__name__)
Model = TypeVar("Model", bound=BaseModel)

_FORCED = ("tools", "tool_choice", "tool_required", "allow_parallel_tool_calls", "json_schema")


class SchemaLLM(FunctionCallingLLM):
    """An LLM whose calls take `json_schema`. Any `pydantic_program_mode` but the default one is LlamaIndex's own
    way."""

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """An object of `output_cls`, decoded within its JSON schema.

        Raises:
            ValueError: the answer was cut off by `max_tokens`, or breaks a rule that a schema cannot say.
        """
        if not self._by_schema:
            own: Model = super().structured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return own
        messages, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)
        found = read_object(output_cls, self.chat(messages, **options))
        dispatcher.event(LLMStructuredPredictEndEvent(output=found))
        return found

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """See `structured_predict`."""
        if not self._by_schema:
            own: Model = await super().astructured_predict(output_cls, prompt, llm_kwargs, **prompt_args)
            return own
        messages, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)
        found = read_object(output_cls, await self.achat(messages, **options))
        dispatcher.event(LLMStructuredPredictEndEvent(output=found))
        return found

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        if not self._by_schema:
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        messages, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)
        found: Any = None
        for piece in self.stream_chat(messages, **options):
            found = _partly(output_cls, piece, found)
            yield found

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if not self._by_schema:
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        messages, options = self._structured(output_cls, prompt, llm_kwargs, prompt_args)
        pieces = await self.astream_chat(messages, **options)

        async def objects() -> AsyncGenerator[Any, None]:
            found: Any = None
            async for piece in pieces:
                found = _partly(output_cls, piece, found)
                yield found

        return objects()

    @property
    def _by_schema(self) -> bool:
        return self.pydantic_program_mode is PydanticProgramMode.DEFAULT

    def _structured(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: Mapping[str, Any] | None,
        prompt_args: Mapping[str, Any],
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        dispatcher.event(
            LLMStructuredPredictStartEvent(
                output_cls=output_cls, template=prompt, template_args=dict(prompt_args)
            )
        )
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        options = {name: value for name, value in (llm_kwargs or {}).items() if name not in _FORCED}
        return messages, {**options, "json_schema": schema_of(output_cls)}


def schema_of(output_cls: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a class. Objects have the fields they name and no others: a model may otherwise make up
    fields without end.

    Raises:
        ConfigurationError: anything but a pydantic class.
    """
    if not (isinstance(output_cls, type) and issubclass(output_cls, BaseModel)):
        raise refusal(
            "output_cls", output_cls, "a pydantic class; for an enum or a list, one with a field of it"
        )
    closed: dict[str, Any] = _closed(deepcopy(output_cls.model_json_schema()))
    return closed


def read_object(output_cls: type[Model], response: ChatResponse) -> Model:
    """The object an answer says. Raises ValueError when it says none."""
    text = response.message.content or ""
    try:
        return output_cls.model_validate_json(text)
    except ValidationError as error:
        raw = response.raw if isinstance(response.raw, dict) else {}
        cut = raw.get("finish_reason") == "length"
        why = (
            "it was cut off: raise max_tokens"
            if cut
            else "it breaks a rule of the class: say the rule in words"
        )
        raise ValueError(f"the answer is no {output_cls.__name__}, {why}. It says {text[:200]!r}") from error


def _closed(node: Any) -> Any:
    if isinstance(node, dict):
        node = {key: _closed(value) for key, value in node.items()}
        if node.get("type") == "object" and "properties" in node:
            node.setdefault("additionalProperties", False)
        return node
    return [_closed(value) for value in node] if isinstance(node, list) else node


def _partly(output_cls: type[Model], piece: ChatResponse, before: Any) -> Any:
    """As much of an object as an answer has said so far; the last piece must say all of it."""
    if isinstance(piece.raw, dict):
        return read_object(output_cls, piece)
    return process_streaming_objects(
        piece, output_cls, None if before is None else [before], flexible_mode=True
    )
