"""The engine as one of mem0's LLM providers, so that extraction needs no key and no second model.

Answers that are to be JSON are decoded within a schema, so they are, unless they are cut off. What is extracted from
stands in the prompt as text: it must never inject anything but mem0's fixed instructions, which hold no word of any
user's and are therefore shared by all owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mem0.configs.llms.base import BaseLlmConfig
from mem0.llms.base import LLMBase
from mem0.utils.factory import LlmFactory

from inferscale_memory.engine.base import Engine, SamplingOptions
from inferscale_memory.memory import extraction
from inferscale_memory.memory.at_hand import AtHand, Preambles
from inferscale_memory.memory.engines import LazyEngine
from inferscale_memory.memory.extraction import ExtractionLLMError
from inferscale_memory.memory.scope import said_tag
from inferscale_memory.memory.writing import owner_under_way
from inferscale_memory.prompt import PUBLIC_OWNER, Prompt, Segment

PROVIDER = "inferscale"


def register() -> None:
    """Make `PROVIDER` known to mem0. Calling it twice is harmless."""
    LlmFactory.register_provider(PROVIDER, f"{__name__}.EngineLLM", EngineLLMConfig)


class EngineLLMConfig(BaseLlmConfig):  # type: ignore[misc]  # mem0 has no types
    """mem0's LLM options, and the engine. Greedy unless told otherwise."""

    def __init__(
        self, engine: LazyEngine, temperature: float = 0.0, top_p: float = 1.0, **options: Any
    ) -> None:
        super().__init__(temperature=temperature, top_p=top_p, **options)
        self.engine = engine


class EngineLLM(LLMBase):  # type: ignore[misc]  # mem0 has no types
    """mem0's `generate_response` on an `Engine`."""

    config: EngineLLMConfig

    def __init__(self, config: EngineLLMConfig) -> None:
        super().__init__(config)
        self._at_hand = AtHand()
        self._instructions = Preambles(self._at_hand)
        self._text_only: set[tuple[int, ...]] = set()

    def generate_response(
        self,
        messages: Sequence[Mapping[str, Any]],
        response_format: Mapping[str, Any] | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: str = "auto",
        **options: Any,
    ) -> str:
        """The engine's answer to `messages`; `tool_choice` is left to the model.

        Args:
            response_format: as OpenAI has it. `json_object` is the schema mem0's extraction expects where these are
                its messages, and any object elsewhere.

        Raises:
            ExtractionError: JSON that does not fit: neither the messages nor the answer may be cut off.
        """
        engine = self.config.engine.get()
        json = (response_format or {}).get("type", "text") != "text"
        prompt = self._prompt(engine, messages, tools)
        tokens = len(prompt.ids)
        room = engine.max_model_len - tokens
        if json and room < min(extraction.LEAST_ANSWER, self.config.max_tokens):
            raise ExtractionLLMError(
                f"the messages and what mem0 puts beside them take {tokens} tokens of the {engine.max_model_len} "
                "the model takes with its answer: add fewer or shorter messages at once, or start the engine "
                "with a larger max_model_len"
            )
        most = min(self.config.max_tokens, max(1, room))
        sampling = SamplingOptions(
            max_tokens=most,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            json_schema=_schema(response_format, messages, most) if response_format and json else None,
        )
        completion = engine.generate(prompt, sampling)
        if completion.refused is not None:  # the engine may have lost them: ask about them again
            self._at_hand.drop(segment.key for segment in prompt.composition if segment.key)
        if json and completion.finish_reason == "length":
            raise ExtractionLLMError(
                f"the model's answer was cut off after {most} tokens: add fewer messages at once, or raise the "
                "max_tokens of the llm or the engine's max_model_len. The messages are kept: retry_failed() "
                "tries again"
            )
        return completion.text

    def _prompt(
        self, engine: Engine, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> Prompt:
        """Where mem0's instructions would fill more than half of the model's context, ours stand in for them."""
        template = self.config.engine.template
        owner = owner_under_way() or PROVIDER
        tag = said_tag(owner)
        if tools or not extraction.is_extraction(messages):
            return Prompt(owner, (Segment(template.plain(messages, tools=tools), tag=tag),))
        frame = template.behind_system(messages)
        if len(frame.preamble) > engine.max_model_len // 2:
            frame = template.behind_system(extraction.shortened(messages))
        key = self._key(engine, frame.preamble)
        return Prompt(owner, (Segment(frame.preamble, key), Segment(frame.suffix, tag=tag)))

    def _key(self, engine: Engine, instructions: tuple[int, ...]) -> str | None:
        """Blob of the fixed instructions. Where they have none, they are text, and the prefix cache has them."""
        if engine.unsupported is not None or instructions in self._text_only:
            return None
        key = self._instructions.key(engine, PUBLIC_OWNER, instructions)
        if key is None:
            self._text_only.add(instructions)
        return key


def _schema(
    response_format: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], max_tokens: int
) -> Mapping[str, Any]:
    if response_format.get("type") == "json_schema":
        named = response_format.get("json_schema") or {}
        schema: Mapping[str, Any] = named.get("schema", named)
        return schema
    return (
        extraction.schema_for(messages, max_tokens)
        if extraction.is_extraction(messages)
        else {"type": "object"}
    )
