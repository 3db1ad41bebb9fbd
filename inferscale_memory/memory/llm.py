"""The engine as one of mem0's LLM providers, so that extraction needs no key and no second model.

It must never inject anything: what is extracted from stands in the prompt as text.

Not yet here (the drop-in issue adds it): schema-constrained decoding, an error where the JSON is cut off, and
tags for the memories mem0 puts into its prompts, so that forgetting them evicts these prompts' cached blocks
too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mem0.configs.llms.base import BaseLlmConfig
from mem0.llms.base import LLMBase
from mem0.utils.factory import LlmFactory

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.memory.engines import LazyEngine
from inferscale_memory.memory.writing import owner_under_way
from inferscale_memory.prompt import Prompt, Segment

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

    def generate_response(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        tool_choice: str = "auto",
        **options: Any,
    ) -> str:
        """The engine's answer to `messages`. `tool_choice` and response formats are left to the model."""
        lazy = self.config.engine
        ids = lazy.template.plain(messages, tools=tools)
        room = max(1, lazy.get().max_model_len - len(ids))
        sampling = SamplingOptions(
            max_tokens=min(self.config.max_tokens, room),
            temperature=self.config.temperature,
            top_p=self.config.top_p,
        )
        owner = owner_under_way() or PROVIDER
        return lazy.get().generate(Prompt(owner, (Segment(ids),)), sampling).text
