"""LangChain's own suites, with a real engine. What they may be told of a model is told; no test of theirs is changed,
left out or expected to fail.

The unit suite and the retriever's need no model that says anything sensible. The integration suite asks for answers in
forms with free text in them, which a random model never ends: SmolLM2 answers there.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever
from langchain_inferscale import ChatInferScale, InferScaleRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from inferscale_memory import Engine, Memory
from integrations.langchain.tests.saying import FACTS, QUESTION

# The suites expect pytest-asyncio's automatic mode, which this project has not. A mark lies on the function itself.
for _suite in (ChatModelIntegrationTests, RetrieversIntegrationTests):
    for _each in vars(_suite).values():
        if iscoroutinefunction(_each):
            pytest.mark.asyncio(_each)


class TestUnit(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _over(self, model_folder: Path) -> None:
        self.folder = model_folder

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatInferScale

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": {"provider": "transformers", "model": str(self.folder)}}


@pytest.fixture(scope="module")
def smol() -> Iterator[Engine]:
    from inferscale_memory.engine.transformers import TransformersEngine
    from inferscale_memory.fetch import demo_model

    with TransformersEngine(demo_model(), device="cpu") as engine:
        yield engine


@pytest.mark.engine
class TestIntegration(ChatModelIntegrationTests):
    """SmolLM2-135M: it calls tools only where it must (`tests/test_tools.py` has those), reads no pictures."""

    @pytest.fixture(autouse=True)
    def _with(self, smol: Engine, tmp_path: Path, embedder: dict[str, Any]) -> None:
        self.engine = smol
        self.embedder = embedder
        self.folder = tmp_path

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatInferScale

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "max_tokens": 128}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        memory = Memory.from_config({"engine": self.engine, "embedder": self.embedder, "folder": self.folder})
        try:
            memory.add(FACTS[0], user_id="ada", infer=False)
            memory.flush()
            model = ChatInferScale(memory=memory, user_id="ada", max_tokens=8)
            answer: Any = None
            for piece in model.stream(QUESTION) if stream else [model.invoke(QUESTION)]:
                answer = piece if answer is None else answer + piece
            assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
            assert isinstance(answer, AIMessage)
            return answer
        finally:
            memory.close()


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _with(self, filled: Memory) -> None:
        self.memory = filled

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return InferScaleRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"memory": self.memory, "user_id": "ada"}

    @property
    def retriever_query_example(self) -> str:
        return QUESTION
