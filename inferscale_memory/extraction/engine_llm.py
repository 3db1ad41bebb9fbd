"""The engine as one of mem0's LLM providers, so that extraction needs no key and no second model.

Answers that are to be JSON are decoded within a schema, so they are, unless they are cut off. What is extracted from
stands in the prompt as text: it must never inject anything but mem0's fixed instructions, which hold no word of any
user's and are therefore shared by all owners.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from time import monotonic
from typing import Any

from mem0.configs.llms.base import BaseLlmConfig
from mem0.llms.base import LLMBase
from mem0.utils.factory import LlmFactory

from inferscale_memory.arguments import as_count
from inferscale_memory.bounded import Bounded
from inferscale_memory.engine.base import Engine, SamplingOptions
from inferscale_memory.engine.known_blobs import KnownBlobs, Preambles
from inferscale_memory.engine.lazy import LazyEngine
from inferscale_memory.errors import InferScaleError
from inferscale_memory.extraction import instructions as extraction
from inferscale_memory.extraction.instructions import CopiedError, TooMuchError
from inferscale_memory.facts.scope import said_tag
from inferscale_memory.prompt import PUBLIC_OWNER, Prompt, Segment
from inferscale_memory.sharing import Shared
from inferscale_memory.write.writer import call_under_way, owner_under_way

PROVIDER = "inferscale"

OWN_OPTIONS = ("min_parameters",)
"""What the configuration of this provider takes besides mem0's options."""

MIN_PARAMETERS = 400_000_000
"""A model with fewer parameters copies the example of its instructions instead of extracting, or writes no JSON."""

_RETRY_S = 60.0
"""Seconds after which instructions that could not be encoded are tried again."""
_REFUSED = 8
"""How many instructions are known at most that could not be: an app has one or two."""

_log = logging.getLogger(__name__)


def register() -> None:
    """Make `PROVIDER` known to mem0. Calling it twice is harmless."""
    LlmFactory.register_provider(PROVIDER, f"{__name__}.EngineLLM", EngineLLMConfig)


class EngineLLMConfig(BaseLlmConfig):  # type: ignore[misc]  # mem0 has no types
    """mem0's LLM options, and the engine. Greedy unless told otherwise."""

    def __init__(
        self,
        engine: LazyEngine,
        temperature: float = 0.0,
        top_p: float = 1.0,
        min_parameters: int | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            min_parameters: a model with fewer parameters is not asked for facts: what is added is remembered word for
                word. By default `MIN_PARAMETERS`; 0 where the model was trained to extract, however small it is.

        Raises:
            ConfigurationError: `min_parameters` is no whole number.
        """
        super().__init__(temperature=temperature, top_p=top_p, **options)
        self.engine = engine
        least = MIN_PARAMETERS if min_parameters is None else min_parameters
        self.min_parameters = as_count(least, "llm.config.min_parameters")


class EngineLLM(Shared, LLMBase):  # type: ignore[misc]  # mem0 has no types
    """mem0's `generate_response` on an `Engine`."""

    config: EngineLLMConfig

    def __init__(self, config: EngineLLMConfig) -> None:
        super().__init__(config)
        self._at_hand = KnownBlobs()
        self._instructions = Preambles(self._at_hand)
        self._refused: Bounded[tuple[int, ...], float] = Bounded(_REFUSED)  # instructions -> until when

    @property
    def extracts(self) -> bool:
        """Whether the model is able to draw facts out of messages. Says once in a process that it is not.

        Nothing is started. A model of which nothing is known, as behind a server, counts as able; so does one that
        cannot be opened, which asking it will say.
        """
        try:
            size = self.config.engine.parameters
        except InferScaleError:
            return True
        if size is None or size >= self.config.min_parameters:
            return True
        _say_too_small(self.config.engine.model_name, f"{size / 1e6:.0f} million parameters")
        return False

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
        least = min(extraction.LEAST_ANSWER, self.config.max_tokens) if json else 0
        prompt, shortened = self._prompt(engine, messages, tools)
        call = call_under_way()
        single = call is None or len(call.turns) < 2
        if engine.max_model_len - len(prompt.ids) < least and single and extraction.is_extraction(messages):
            # Several turns would be split. A single one is read without what mem0 puts beside it.
            messages = extraction.alone(messages)
            prompt, shortened = self._prompt(engine, messages, tools)
        tokens = len(prompt.ids)
        room = engine.max_model_len - tokens
        if room < least:
            raise TooMuchError(
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
            raise TooMuchError(
                f"the model's answer was cut off after {most} tokens: add fewer messages at once, or raise the "
                "max_tokens of the llm or the engine's max_model_len. The messages are kept: retry_failed() "
                "tries again"
            )
        if not (json and shortened):
            return completion.text
        try:
            return extraction.without_copies(completion.text, messages)
        except CopiedError:
            _say_too_small(self.config.engine.model_name, "it copied the example of its instructions")
            raise

    def _prompt(
        self, engine: Engine, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[Prompt, bool]:
        """The prompt, and whether our short instructions stand in it for mem0's: they do where mem0's would fill more
        than half of the model's context."""
        template = self.config.engine.template
        owner = owner_under_way() or PROVIDER
        tag = said_tag(owner)
        if tools or not extraction.is_extraction(messages):
            return Prompt(owner, (Segment(template.plain(messages, tools=tools), tag=tag),)), False
        frame = template.behind_system(messages)
        short = len(frame.preamble) > engine.max_model_len // 2
        if short:
            frame = template.behind_system(extraction.shortened(messages))
        key = self._key(engine, frame.preamble)
        return Prompt(owner, (Segment(frame.preamble, key), Segment(frame.suffix, tag=tag))), short

    def _key(self, engine: Engine, instructions: tuple[int, ...]) -> str | None:
        """Blob of the fixed instructions. Where they have none, they are text, and the prefix cache has them.

        Instructions that could not be encoded are not tried again for a while, or every `add` would wait for it.
        """
        if engine.unsupported is not None or monotonic() < self._refused.get(instructions, 0.0):
            return None
        key = self._instructions.key(engine, PUBLIC_OWNER, instructions)
        if key is None:
            self._refused[instructions] = monotonic() + _RETRY_S
        return key


@cache
def _say_too_small(model: str, why: str) -> None:
    """Once in a process for each model."""
    _log.warning(
        "%s is too small to extract facts (%s): what is added is remembered word for word. To have facts extracted, "
        "configure a larger engine model (of %d million parameters or more), or an llm as mem0 takes it: "
        '{"llm": {"provider": "openai", "config": {...}}}. infer=False says that words are to be kept as they are',
        model,
        why,
        MIN_PARAMETERS // 1_000_000,
    )


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
