"""Tools and objects with a random model: calls and answers are kept within a schema, so that they come at all."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any, Literal

import pytest
from inferscale_memory import Memory, ToolCall
from inferscale_memory.errors import ConfigurationError, PromptError
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from llama_index.core.workflow import Context
from pydantic import RootModel
from tests.memory.watched import WatchedEngine

from llama_index.llms.inferscale import InferScaleLLM
from llama_index.llms.inferscale.messages import is_readable, to_answer
from llama_index.llms.inferscale.structured import schema_of
from llama_index.memory.inferscale import InferScaleMemory

pytest.importorskip("xgrammar", reason="a schema needs xgrammar, which vLLM brings along")

ADA = {"user_id": "ada"}
QUESTION = "What is my cat called?"
FACT = "My cat is called Miso"


class Cat(BaseModel):
    """A cat."""

    name: Literal["Miso", "Zorro"]
    asleep: bool
    place: Literal["sofa", "bed"] = "sofa"


class Feeding(BaseModel):
    """Arguments of a tool."""

    cat: Literal["Miso", "Zorro"]
    twice: bool


@pytest.fixture
def called() -> list[Any]:
    """What the tools were called with."""
    return []


@pytest.fixture
def tools(called: list[Any]) -> list[FunctionTool]:
    def feed(cat: str, twice: bool) -> str:
        """Feed a cat."""
        called.append((cat, twice))
        return f"{cat} has eaten"

    def weather() -> str:
        """Today's weather."""
        called.append("weather")
        return "rain"

    return [FunctionTool.from_defaults(feed, fn_schema=Feeding), FunctionTool.from_defaults(weather)]


@pytest.fixture
def llm(client: Memory) -> InferScaleLLM:
    return InferScaleLLM(memory=client, max_tokens=128, **ADA)


class TestObjects:
    template = PromptTemplate("{question}")

    def test_every_way(self, llm: InferScaleLLM) -> None:
        async def twins() -> list[Any]:
            stream = await llm.astream_structured_predict(Cat, self.template, question=QUESTION)
            pieces = [piece async for piece in stream]
            return [await llm.astructured_predict(Cat, self.template, question=QUESTION), pieces[-1]]

        cat = llm.structured_predict(Cat, self.template, question=QUESTION)
        assert isinstance(cat, Cat)
        pieces = list(llm.stream_structured_predict(Cat, self.template, question=QUESTION))
        assert len(pieces) > 1
        assert [pieces[-1], *asyncio.run(twins())] == [cat, cat, cat]

    def test_an_object_has_the_fields_it_names_and_no_others(self) -> None:
        class Basket(BaseModel):
            cats: list[Cat]

        schema = schema_of(Basket)
        assert schema["additionalProperties"] is schema["$defs"]["Cat"]["additionalProperties"] is False
        assert "additionalProperties" not in Basket.model_json_schema()

    def test_memories_are_injected_into_them_too(self, llm: InferScaleLLM, engine: WatchedEngine) -> None:
        llm.as_structured_llm(Cat).complete(QUESTION)
        assert engine.asked[-1][2].injected_tokens > 0

    def test_options_of_the_llm(self, llm: InferScaleLLM, engine: WatchedEngine) -> None:
        llm.structured_predict(Cat, self.template, {"max_tokens": 50, "tool_choice": "x"}, question=QUESTION)
        assert engine.asked[-1][1].max_tokens == 50

    def test_one_that_is_cut_off_is_an_error(self, llm: InferScaleLLM) -> None:
        with pytest.raises(ValueError, match="raise max_tokens"):
            llm.structured_predict(Cat, self.template, {"max_tokens": 3}, question=QUESTION)
        with pytest.raises(ValueError, match="raise max_tokens"):
            list(llm.stream_structured_predict(Cat, self.template, {"max_tokens": 3}, question=QUESTION))

    def test_the_frameworks_own_way_by_a_tool(self, client: Memory) -> None:
        llm = InferScaleLLM(
            memory=client, max_tokens=128, pydantic_program_mode=PydanticProgramMode.FUNCTION, **ADA
        )
        assert isinstance(llm.structured_predict(Cat, self.template, question=QUESTION), Cat)


class TestCalls:
    def test_a_call_that_must_be_made(self, llm: InferScaleLLM, tools: list[Any], called: list[Any]) -> None:
        response = llm.chat_with_tools(tools, user_msg=QUESTION, tool_required=True)
        call = llm.get_tool_calls_from_response(response)[0]
        assert call.tool_name in ("feed", "weather")
        assert isinstance(response.message.blocks[-1], ToolCallBlock)
        assert response.message.blocks[-1].tool_call_id == call.tool_id
        assert response.raw["usage"]["injected_tokens"] > 0
        assert called == []

    @pytest.mark.parametrize("choice", ["feed", {"type": "function", "function": {"name": "feed"}}])
    def test_a_tool_by_name(
        self, choice: Any, llm: InferScaleLLM, tools: list[Any], called: list[Any]
    ) -> None:
        answer = llm.predict_and_call(tools, user_msg=QUESTION, tool_choice=choice)
        assert [cat in ("Miso", "Zorro") for cat, _ in called] == [True]
        assert answer.response.endswith("has eaten")

    def test_streamed(self, llm: InferScaleLLM, tools: list[Any]) -> None:
        async def pieces() -> list[Any]:
            stream = await llm.astream_chat_with_tools(tools, user_msg=QUESTION, tool_choice="weather")
            return [piece async for piece in stream]

        for found in (
            list(llm.stream_chat_with_tools(tools, user_msg=QUESTION, tool_choice="weather")),
            asyncio.run(pieces()),
        ):
            assert "".join(piece.delta or "" for piece in found) == ""
            assert [call.tool_name for call in llm.get_tool_calls_from_response(found[-1])] == ["weather"]
            assert llm.get_tool_calls_from_response(found[0], error_on_no_tool_call=False) == []

    def test_a_tool_that_does_not_exist(self, llm: InferScaleLLM, tools: list[Any]) -> None:
        with pytest.raises(PromptError, match="feed, weather"):
            llm.chat_with_tools(tools, user_msg=QUESTION, tool_choice="bake")

    def test_a_call_that_is_cut_off_is_none(self, llm: InferScaleLLM, tools: list[Any]) -> None:
        response = llm.chat_with_tools(tools, user_msg=QUESTION, tool_choice="feed", max_tokens=5)
        assert response.additional_kwargs["invalid_tool_calls"][0]["error"]
        assert response.message.content
        assert "tool_calls" not in response.message.additional_kwargs
        with pytest.raises(ValueError, match="max_tokens"):
            llm.get_tool_calls_from_response(response)

    def test_no_call_where_there_must_be_one(self, llm: InferScaleLLM) -> None:
        with pytest.raises(ValueError, match="tool_required"):
            llm.get_tool_calls_from_response(llm.chat([ChatMessage(content=QUESTION)]))

    def test_one_at_a_time(self, llm: InferScaleLLM) -> None:
        calls = [ToolCall("feed", {"cat": "Miso"}, "1"), ToolCall("weather", {}, "2")]
        response = llm.chat([ChatMessage(content=QUESTION)])
        response.message = to_answer("Well", calls)
        assert len(llm.get_tool_calls_from_response(response)) == 2
        one = llm._validate_chat_with_tools_response(response, [], allow_parallel_tool_calls=False)
        assert [call.tool_id for call in llm.get_tool_calls_from_response(one)] == ["1"]
        assert one.message.content == "Well"
        assert len(one.message.additional_kwargs["tool_calls"]) == 1

    @pytest.mark.parametrize(
        ("call", "readable"),
        [
            (ToolCall("feed", {"cat": "Miso"}), True),
            (ToolCall("bake", {}, error="there is no such tool", raw="{}"), True),
            (ToolCall("bake", {"at": 180}, error="there is no such tool", raw='{"at": 180}'), True),
            (ToolCall("feed", {}, error="cut off", raw='{"name": "feed", "argum'), False),
            (ToolCall("feed", {}, error="cut off"), False),
            (ToolCall("", {}, error="the call names no tool", raw="{}"), False),
        ],
    )
    def test_what_can_be_carried_out(self, call: ToolCall, readable: bool) -> None:
        assert is_readable(call) is readable
        message = to_answer("", [call])
        assert isinstance(message.blocks[0], ToolCallBlock if readable else TextBlock)


class TestAnAgent:
    """LlamaIndex's FunctionAgent; its first step is made to call a tool, as `initial_tool_choice` does."""

    def agent(self, llm: InferScaleLLM, tools: list[Any], **options: Any) -> FunctionAgent:
        return FunctionAgent(
            tools=tools, llm=llm, system_prompt="Feed cats.", initial_tool_choice="feed", **options
        )

    @pytest.mark.parametrize("streaming", [True, False])
    def test_it_calls_and_answers_and_remembers(
        self,
        streaming: bool,
        client: Memory,
        tools: list[Any],
        called: list[Any],
        engine: WatchedEngine,
        recwarn: Any,
    ) -> None:
        llm = InferScaleLLM(memory=client, max_tokens=128)
        memory = InferScaleMemory(client, ADA, infer=False)
        agent = self.agent(llm, tools, streaming=streaming)
        output = asyncio.run(_run(agent, "Feed my cat, whose name I like", memory))
        assert [cat in ("Miso", "Zorro") for cat, _ in called] == [True]
        assert output.tool_calls[0].tool_name == "feed"
        assert output.raw["scope"] == ADA
        assert [message.role.value for message in memory.get_all()] == [
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        found = {fact["memory"] for fact in client.get_all(filters=ADA)["results"]}
        assert "Feed my cat, whose name I like" in found
        texts = [str(engine.tokenizer.decode(prompt.ids)) for prompt, _, _ in engine.asked]
        assert all(text.count(FACT) == 1 for text in texts)
        assert "has eaten" in texts[-1]
        assert all(done.injected_tokens + done.cached_tokens > 0 for _, _, done in engine.asked)
        assert not [seen for seen in recwarn if "sent as text" in str(seen.message)]

    def test_a_second_run_recalls_anew_and_not_what_the_history_says(
        self, client: Memory, tools: list[Any]
    ) -> None:
        memory = InferScaleMemory(client, ADA, infer=False)
        agent = self.agent(InferScaleLLM(memory=client, max_tokens=128), tools)

        async def two() -> list[Any]:
            context = Context(agent)
            first = await agent.run("I like tea", memory=memory, ctx=context)
            client.add("My tea is green", infer=False, **ADA)
            second = await agent.run("What do I like? tea?", ctx=context)
            return [first, second, await context.store.get("memory")]

        first, second, kept = asyncio.run(two())
        assert "I like tea" not in str(first.raw["memories"])
        assert "My tea is green" in str(second.raw["memories"])
        assert "I like tea" not in str(second.raw["memories"])
        assert len(kept.get_all()) == 8

    def test_without_a_memory_of_ours_the_llm_recalls(self, llm: InferScaleLLM, tools: list[Any]) -> None:
        output = asyncio.run(_run(self.agent(llm, tools), "Feed my cat", None))
        assert FACT in str(output.raw["memories"])


async def _run(agent: FunctionAgent, message: str, memory: Any) -> Any:
    return await agent.run(message, memory=memory)


def test_what_is_no_pydantic_class_is_refused_by_name(llm: InferScaleLLM) -> None:
    class Color(Enum):
        RED = "red"

    prompt = PromptTemplate("{question}")
    for schema in (Color, list[int], None, {"type": "array"}):
        with pytest.raises(ConfigurationError, match="pydantic class"):
            llm.structured_predict(schema, prompt, question=QUESTION)  # type: ignore[type-var]
        with pytest.raises(ConfigurationError, match="pydantic class"):
            list(llm.stream_structured_predict(schema, prompt, question=QUESTION))  # type: ignore[type-var]


def test_a_root_model_is_kept(llm: InferScaleLLM) -> None:
    class Grades(RootModel[list[Literal[1, 2]]]):
        """Grades."""

    found = llm.structured_predict(
        Grades, PromptTemplate("{question}"), {"max_tokens": 80}, question=QUESTION
    )
    assert set(found.root) <= {1, 2}
