"""Whose memories a conversation has. It must never be nobody's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from inferscale_memory.arguments import refusal
from llama_index.core.bridge.pydantic import BaseModel, ConfigDict, model_validator

from llama_index.llms.inferscale.door import id_in


class InferScaleContext(BaseModel):
    """The ids of mem0: at least one of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None

    @model_validator(mode="after")
    def _of_somebody(self) -> Self:
        for name, value in self.model_dump().items():
            if value is not None and not value.strip():  # without it, others' memories would match, too
                raise ValueError(f"{name} is empty: name whose memories are meant, or leave it out")
            id_in(value, name)
        if not self.ids:
            raise ValueError(
                "no scope: give the context at least one of user_id, agent_id and run_id, so that it is clear whose "
                "memories are meant"
            )
        return self

    @classmethod
    def read(cls, context: InferScaleContext | Mapping[str, Any] | None) -> InferScaleContext:
        """A context from what an app passes. Raises ValueError when it names nobody, or ids that do not exist."""
        if isinstance(context, InferScaleContext):
            return context
        if context is not None and not isinstance(context, Mapping):
            raise refusal("context", context, "a dictionary of user_id, agent_id or run_id")
        return cls.model_validate(dict(context or {}))

    @property
    def ids(self) -> dict[str, str]:
        """Those that are set."""
        return {name: value.strip() for name, value in self.model_dump().items() if value is not None}
