"""The same over vLLM with a real model: injection, native async, tools and objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from inferscale_memory import AsyncMemory
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool

from llama_index.llms.inferscale import InferScaleLLM
from llama_index.memory.inferscale import InferScaleChatEngine, InferScaleMemory

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

QUESTION = "What is my cat called?"


class Cat(BaseModel):
    """A cat."""

    name: Literal["Miso", "Zorro"]


class Feeding(BaseModel):
    """Arguments of a tool."""

    cat: Literal["Miso", "Zorro"]


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[AsyncMemory]:
    async with AsyncMemory.from_config({"engine": {"provider": "vllm"}, "folder": folder}) as client:
        for user, cat in (("ada", "Miso"), ("ben", "Zorro")):
            facts = [f"My cat is called {cat}.", f"{cat} sleeps on the radiator."]
            said = [{"role": "user", "content": fact} for fact in facts]
            await client.add(said, user_id=user, infer=False)
        await client.flush()
        yield client


def test_a_day(tmp_path: Path) -> None:
    """One engine, started once: everything in one go."""

    async def day() -> None:
        async with opened(tmp_path / "memory") as client:
            llm = InferScaleLLM(memory=client, max_tokens=24)
            await asyncio.to_thread(llm.tokenize, "")  # starts the engine beside the loop
            await _users_apart(llm)
            await _streams(client, llm)
            await _objects_and_tools(client, llm)

    asyncio.run(day())


async def _users_apart(llm: InferScaleLLM) -> None:
    both = await asyncio.gather(*(llm.acomplete(QUESTION, user_id=user) for user in ("ada", "ben") * 2))
    for answer, cat, other in zip(both, ("Miso", "Zorro") * 2, ("Zorro", "Miso") * 2, strict=True):
        assert cat in answer.text
        assert other not in answer.text + str(answer.raw)
        assert all(memory["injected"] for memory in answer.raw["memories"])
        assert answer.raw["usage"]["injected_tokens"] + answer.raw["usage"]["cached_tokens"] > 0


async def _streams(client: AsyncMemory, llm: InferScaleLLM) -> None:
    chat = InferScaleChatEngine.from_defaults(client, llm, user_id="ada", infer=False)
    response = await chat.astream_chat(QUESTION)
    pieces = [piece async for piece in response.async_response_gen()]
    assert len(pieces) > 1
    assert "Miso" in "".join(pieces)
    assert all(node.metadata["injected"] for node in response.source_nodes)
    assert response.metadata is not None
    assert len(chat.chat_history) == 2
    assert QUESTION in str(await client.get_all(filters={"user_id": "ada"}))


async def _objects_and_tools(client: AsyncMemory, llm: InferScaleLLM) -> None:
    cat = await llm.astructured_predict(Cat, PromptTemplate("{q}"), {"user_id": "ben"}, q=QUESTION)
    assert cat.name == "Zorro"
    fed: list[str] = []

    def feed(cat: str) -> str:
        """Feed a cat."""
        fed.append(cat)
        return f"{cat} has eaten"

    tool = FunctionTool.from_defaults(feed, fn_schema=Feeding)
    agent = FunctionAgent(tools=[tool], llm=llm, initial_tool_choice="feed")
    memory = InferScaleMemory(client, {"user_id": "ada"}, infer=False)
    output = await agent.run("Feed my cat", memory=memory)
    assert fed == ["Miso"]
    assert output.tool_calls[0].tool_name == "feed"
    assert [message.role.value for message in memory.get_all()] == ["user", "assistant", "tool", "assistant"]
