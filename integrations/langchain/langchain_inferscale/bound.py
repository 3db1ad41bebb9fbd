"""What `bind` and `with_config` make of the chat model.

LangChain's own binding hands attributes it does not have to the bare model: `llm.bind(user_id="ada").bind_tools(...)`
would answer for whomever the constructor names. It must never lose the ids it was told.
"""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableBinding

from langchain_inferscale.scope import read_ids


class Bound(RunnableBinding[LanguageModelInput, AIMessage]):
    """A `RunnableBinding` whose `bind_tools`, `with_structured_output`, `stream_events` and all else that is the
    model's know its ids."""

    @classmethod
    def lc_id(cls) -> list[str]:
        """It is written down as LangChain's own."""
        return [*cls.get_lc_namespace(), "RunnableBinding"]

    def __getattr__(self, name: str) -> Any:
        model: Any = self.bound
        if hasattr(type(model), "named"):
            configured = read_ids(self.config.get("configurable") or {}, model.scope_keys)
            model = model.named(bound=read_ids(self.kwargs), configured=configured)
        whole: Any = RunnableBinding(bound=model, kwargs=self.kwargs, config=self.config)
        return getattr(whole, name)
