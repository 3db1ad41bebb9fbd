"""What is remembered in these tests, and what an answer says it stood on."""

from __future__ import annotations

from typing import Any

from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import HumanMessage

from tests.memory.watched import WatchedEngine

FACTS = ("My cat is called Miso", "I moved to Porto", "My sister is a nurse")
SECRET = "My safe opens with 4711"
QUESTION = "What is my cat called?"
ADA = {"configurable": {"user_id": "ada"}}
BEN = {"configurable": {"user_id": "ben"}}


def recalled(message: Any) -> set[str]:
    return {memory["text"] for memory in message.response_metadata["memories"]}


def injected(message: Any) -> set[str]:
    return {memory["text"] for memory in message.response_metadata["memories"] if memory["injected"]}


def asked(engine: WatchedEngine) -> str:
    """The last prompt the engine was given."""
    return str(engine.tokenizer.decode(engine.asked[-1][0].ids))


def forced(tool: str) -> Any:
    """Middleware under which a model must call `tool` once in a turn, and then may not: random models call none."""

    @wrap_model_call
    def force(request: Any, handler: Any) -> Any:
        asked = isinstance(request.messages[-1], HumanMessage)
        return handler(request.override(tool_choice=tool if asked else "none"))

    return force


def aforced(tool: str) -> Any:
    """The same for agents that are awaited."""

    @wrap_model_call
    async def force(request: Any, handler: Any) -> Any:
        asked = isinstance(request.messages[-1], HumanMessage)
        return await handler(request.override(tool_choice=tool if asked else "none"))

    return force
