"""The chat model over a vLLM server: this process holds no weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_inferscale import ChatInferScale
from pydantic import BaseModel

from inferscale_memory import AsyncMemory
from integrations.langchain.tests.saying import ADA, BEN, FACTS, QUESTION, SECRET, injected, recalled
from tests.serving import SETTINGS, Server

pytestmark = pytest.mark.engine


class Verdict(BaseModel):
    """A verdict."""

    guilty: bool


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INFERSCALE_SECRET", "a secret of this test")
        with Server(str(model_folder), *SETTINGS, log=tmp_path_factory.mktemp("log") / "server") as server:
            yield server


def test_memories_are_injected_at_the_server(
    server: Server, tmp_path: Path, embedder: dict[str, Any]
) -> None:
    engine = {"provider": "remote", "base_url": server.url}

    async def told() -> list[Any]:
        async with AsyncMemory.from_config(
            {"engine": engine, "embedder": embedder, "folder": tmp_path / "memory"}
        ) as memory:
            for fact in FACTS:
                await memory.add(fact, user_id="ada", infer=False)
            await memory.add(SECRET, user_id="ben", infer=False)
            await memory.flush()
            model = ChatInferScale(memory=memory, max_tokens=40)
            answers = await asyncio.gather(*(model.ainvoke(QUESTION, who) for who in (ADA, BEN) * 3))
            whole: Any = None
            async for piece in model.astream(QUESTION, ADA):
                whole = piece if whole is None else whole + piece
            assert whole.text == answers[0].text
            assert injected(whole) == set(FACTS)
            verdict = await model.with_structured_output(Verdict).ainvoke("Well?", ADA)
            assert isinstance(verdict, Verdict)
            answers.append(await asyncio.to_thread(model.invoke, QUESTION, ADA))
            answers.append(await model.ainvoke(QUESTION, BEN))
            return answers

    for number, answer in enumerate(asyncio.run(told())):
        assert injected(answer) == recalled(answer) == (set(FACTS) if number % 2 == 0 else {SECRET})


def test_without_a_memory(server: Server, model_folder: Path) -> None:
    engine = {"provider": "remote", "base_url": server.url, "tokenizer": str(model_folder)}
    with ChatInferScale(engine=engine, max_tokens=4) as model:
        assert model.model_name == model_folder.name
        answer = model.invoke("Hello")
        assert answer.response_metadata["model_name"] == model_folder.name
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_tokens"] > 0
