"""The chat model over vLLM in this process: the way it is served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_inferscale import ChatInferScale, InferScaleMemoryMiddleware, InferScaleStore
from pydantic import BaseModel

from inferscale_memory import Engine, Memory
from integrations.langchain.tests.saying import ADA, BEN, FACTS, QUESTION, SECRET, injected, recalled

pytestmark = pytest.mark.engine


@tool
def weather(city: Literal["Porto", "Oslo"]) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


class Verdict(BaseModel):
    """A verdict."""

    guilty: bool


@pytest.fixture(scope="module")
def vllm(model_folder: Path) -> Iterator[Engine]:
    from inferscale_memory.engine.vllm import VLLMEngine

    with VLLMEngine(model_folder, dtype="float32", enforce_eager=True, max_model_len=2048) as engine:
        yield engine


@pytest.fixture
def remembering(vllm: Engine, tmp_path: Path, embedder: dict[str, Any]) -> Iterator[Memory]:
    memory = Memory.from_config({"engine": vllm, "embedder": embedder, "folder": tmp_path / "memory"})
    for fact in FACTS:
        memory.add(fact, user_id="ada", infer=False)
    memory.add(SECRET, user_id="ben", infer=False)
    memory.flush()
    yield memory
    memory.close()


def test_every_way_of_asking_injects(remembering: Memory) -> None:
    model = ChatInferScale(memory=remembering, max_tokens=6)
    answers: list[Any] = [model.invoke(QUESTION, ADA), *model.batch([QUESTION, QUESTION], ADA)]
    pieces: Any = None
    for piece in model.stream(QUESTION, ADA):
        pieces = piece if pieces is None else pieces + piece
    answers.append(pieces)
    answers += asyncio.run(_awaited(model))
    assert len({answer.text for answer in answers}) == 1
    for answer in answers:
        assert injected(answer) == set(FACTS)
        assert (
            answer.usage_metadata["input_token_details"]["cache_read"]
            + (answer.response_metadata["cached_tokens"])
            > answer.response_metadata["prefilled_tokens"]
        )


async def _awaited(model: ChatInferScale) -> list[Any]:
    whole: Any = None
    async for piece in model.astream(QUESTION, ADA):
        whole = piece if whole is None else whole + piece
    return [whole, await model.ainvoke(QUESTION, ADA), *(await model.abatch([QUESTION] * 4, ADA))]


def test_many_users_at_once_each_have_their_own(remembering: Memory) -> None:
    model = ChatInferScale(memory=remembering, max_tokens=6)

    async def asked() -> list[Any]:
        return await asyncio.gather(*(model.ainvoke(QUESTION, who) for who in (ADA, BEN) * 8))

    for number, answer in enumerate(asyncio.run(asked())):
        assert injected(answer) == recalled(answer) == (set(FACTS) if number % 2 == 0 else {SECRET})


def test_forced_calls_and_forms_are_decoded_within_their_schema(remembering: Memory) -> None:
    model = ChatInferScale(memory=remembering, max_tokens=80, user_id="ada")
    answer = model.bind_tools([weather], tool_choice="weather").invoke("Is it raining where I live?")
    assert answer.tool_calls[0]["args"]["city"] in ("Porto", "Oslo")
    assert injected(answer) == set(FACTS)
    assert isinstance(model.with_structured_output(Verdict).invoke("Well?"), Verdict)
    assert isinstance(asyncio.run(model.with_structured_output(Verdict).ainvoke("Well?")), Verdict)


def test_an_agent_with_a_store_and_the_middleware(remembering: Memory) -> None:
    store = InferScaleStore(remembering, index={"fields": ["text"]}, user_of=lambda namespace: namespace[1])
    store.put(("notes", "ada"), "1", {"text": "I play the oboe"})
    remembering.flush()
    agent = create_agent(
        ChatInferScale(memory=remembering, max_tokens=4),
        middleware=[InferScaleMemoryMiddleware(remembering, infer=False, answers=False)],
        store=store,
    )
    answer = agent.invoke({"messages": [("user", QUESTION)]}, ADA)["messages"][-1]
    assert injected(answer) == {*FACTS, "I play the oboe"}
    remembering.flush()
    answer = asyncio.run(agent.ainvoke({"messages": [("user", "Again?")]}, ADA))["messages"][-1]
    assert QUESTION in injected(answer)
