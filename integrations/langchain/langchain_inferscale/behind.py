"""What stands behind a chat model, a retriever or a middleware: an engine, a memory, or how to make them.

Nothing is opened or started before it is needed: LangChain makes its objects freely, and copies them. It must never
close what somebody else has made.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

from inferscale_memory import Chat, Memory
from inferscale_memory.errors import ConfigurationError


class Behind:
    """A `Chat`, made at once over what is there, and when it is first asked for over a memory that is to be opened."""

    def __init__(self, engine: Any, memory: Any, context_turns: int | None) -> None:
        """Raises ConfigurationError on what cannot stand behind a model."""
        self._lock = Lock()
        self._made_of = (engine, memory, context_turns)
        self._chat: Chat | None = None
        self._config: dict[str, Any] | None = None
        self._opened: Memory | None = None
        if isinstance(memory, Mapping):
            self._config = _configuration(memory, engine, context_turns)
            return
        if context_turns is not None:
            raise ConfigurationError(
                "context_turns says how facts are encoded when they are written, so it belongs to the memory: make it "
                "with Memory.from_config({'injection': {'context_turns': ...}}), or pass such a configuration as "
                "`memory`"
            )
        self._chat = Chat(engine, memory)

    def is_over(self, engine: Any, memory: Any, context_turns: int | None) -> bool:
        """Whether it was made of these very objects."""
        return all(mine is given for mine, given in zip(self._made_of, (engine, memory, context_turns), strict=True))

    @property
    def has_memory(self) -> bool:
        return self._config is not None or (self._chat is not None and self._chat.memory is not None)

    @property
    def chat(self) -> Chat:
        with self._lock:
            if self._chat is None:
                self._opened = Memory.from_config(self._config or {})
                self._chat = Chat(memory=self._opened)
            return self._chat

    @property
    def model_name(self) -> str:
        """The name of the model's folder. Nothing is opened to find out."""
        chat = self._chat
        if chat is None:
            engine = (self._config or {}).get("engine")
            chat = Chat(engine)
        return chat.model_name

    def close(self) -> None:
        """Close the memory and end the engine, where they were made here."""
        with self._lock:
            opened, self._opened = self._opened, None
            if opened is not None:
                self._chat = None
                opened.close()
            elif self._chat is not None:
                self._chat.close()


def _configuration(memory: Mapping[str, Any], engine: Any, context_turns: int | None) -> dict[str, Any]:
    config = dict(memory)
    if engine is not None:
        if config.get("engine") is not None:
            raise ConfigurationError("`engine` and `memory['engine']` both name an engine: leave one out")
        config["engine"] = engine
    if context_turns is not None:
        injection = config.get("injection") or {}
        if not isinstance(injection, Mapping) or {"context_turns", "w"} & set(injection):
            raise ConfigurationError("`context_turns` and `memory['injection']` both set it: leave one out")
        config["injection"] = {**injection, "context_turns": context_turns}
    return config
