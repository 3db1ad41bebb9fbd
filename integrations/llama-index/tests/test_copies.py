"""Copies, pickles and what LlamaIndex writes down: whole or refused, and never over another memory or engine."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inferscale_memory import Memory
from inferscale_memory.errors import ConfigurationError, CopyError, EngineError
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import TransformComponent
from llama_index.core.workflow import JsonPickleSerializer, JsonSerializer
from tests.memory.watched import WatchedEngine

from llama_index.llms.inferscale import InferScaleLLM
from llama_index.llms.inferscale.recollection import HEADING, recollection_in
from llama_index.memory.inferscale import InferScaleChatEngine, InferScaleContext, InferScaleMemory

ADA, BEN = {"user_id": "ada"}, {"user_id": "ben"}
QUESTION = "What is my cat called?"

MAKERS: dict[str, Callable[[Memory], Any]] = {
    "InferScaleLLM": lambda client: InferScaleLLM(memory=client, max_tokens=4, **ADA),
    "InferScaleMemory": lambda client: InferScaleMemory.from_defaults(client, ADA, infer=False),
    "InferScaleChatEngine": lambda client: InferScaleChatEngine(
        InferScaleLLM(memory=client, max_tokens=4), InferScaleMemory.from_defaults(client, ADA, infer=False)
    ),
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "a list of it, deeply": lambda thing: copy.deepcopy([thing])[0],
    "model_copy": lambda thing: thing.model_copy(),
    "model_copy, deeply": lambda thing: thing.model_copy(deep=True),
    "to_dict": lambda thing: type(thing).from_dict(thing.to_dict()),
    "to_json": lambda thing: type(thing).from_json(thing.to_json()),
    "a workflow's context": lambda thing: _through(JsonSerializer(), thing),
    "a workflow's context, pickled": lambda thing: _through(JsonPickleSerializer(), thing),
}
ROUTES = [
    (kind, way)
    for kind in MAKERS
    for way in COPIES
    if kind != "InferScaleChatEngine" or way in ("copy", "deepcopy", "a list of it, deeply")
]


def _through(serializer: Any, thing: Any) -> Any:
    return serializer.deserialize(serializer.serialize({"kept": thing}))["kept"]


def memories_of(thing: Any) -> list[str]:
    """What an object recalls when it is asked."""
    if isinstance(thing, InferScaleMemory):
        found = recollection_in(thing.get(QUESTION))
        return [] if found is None else [memory["memory"] for memory in found.results]
    if isinstance(thing, InferScaleChatEngine):
        return memories_of(thing.memory)
    return [memory["text"] for memory in thing.complete(QUESTION).raw["memories"]]


@pytest.mark.parametrize(("kind", "way"), ROUTES)
def test_a_copy_answers_out_of_the_same_memory_and_leaves_the_first_as_it_was(
    kind: str, way: str, client: Memory
) -> None:
    first = MAKERS[kind](client)
    again = COPIES[way](first)
    assert type(again) is type(first)
    assert again is not first
    assert memories_of(again) == memories_of(first) != []
    if isinstance(again, InferScaleChatEngine):
        assert again.chat(QUESTION).source_nodes


@pytest.mark.parametrize("kind", MAKERS)
def test_an_open_memory_is_not_pickled_and_stays_whole(kind: str, client: Memory) -> None:
    thing = MAKERS[kind](client)
    with pytest.raises(CopyError, match=r"cannot be pickled.*to_dict"):
        pickle.dumps(thing)
    assert memories_of(thing)


def test_an_llm_over_a_running_engine_is_not_pickled(engine: WatchedEngine) -> None:
    with pytest.raises(CopyError, match="cannot be pickled"):
        pickle.dumps(InferScaleLLM(engine))
    with pytest.raises(CopyError, match="cannot be pickled"):
        pickle.dumps(InferScaleLLM().model_copy(update={"engine": engine}))


def test_an_llm_over_a_configuration_is_pickled_with_it(no_weights: Path) -> None:
    config = {"provider": "transformers", "model": str(no_weights)}
    again = pickle.loads(pickle.dumps(InferScaleLLM(config, max_tokens=7)))
    assert again.max_tokens == 7
    with pytest.raises(EngineError, match="no-weights"):
        again.complete("Hello")


def test_a_context_is_pickled_whole() -> None:
    context = InferScaleContext(user_id="ada", run_id="1")
    assert pickle.loads(pickle.dumps(context)) == copy.deepcopy(context) == context


def test_in_another_process_an_llm_asks_for_its_memory_instead_of_starting_another_engine(
    client: Memory,
) -> None:
    data = json.loads(InferScaleLLM(memory=client, **ADA).to_json())
    data["behind"]["name"] = "<InferScale at 0x0>"  # as another process would find it
    again = InferScaleLLM.from_dict(data)
    for call in (again.complete, again.stream_complete, again.tokenize):
        with pytest.raises(ConfigurationError, match="from_dict"):
            call(QUESTION)
    again = InferScaleLLM.from_dict(again.to_dict())
    with pytest.raises(ConfigurationError, match="from_dict"):
        again.complete(QUESTION)
    assert memories_of(InferScaleLLM.from_dict(data, memory=client))


def test_an_llm_that_is_read_again_shares_the_engine_that_runs(engine: WatchedEngine) -> None:
    llm = InferScaleLLM(engine, max_tokens=4)
    assert InferScaleLLM.from_dict(llm.to_dict()).engine is copy.deepcopy(llm).engine is engine


def test_a_cache_of_llama_index_still_knows_a_step_after_a_restart(client: Memory) -> None:
    from llama_index.core.ingestion.pipeline import get_transformation_hash

    class Step(TransformComponent):
        llm: InferScaleLLM

        def __call__(self, nodes: Any, **kwargs: Any) -> Any:
            return nodes

    one, other = (Step(llm=InferScaleLLM(memory=client, **ADA)) for _ in range(2))
    assert get_transformation_hash([], one) == get_transformation_hash([], other)


@pytest.mark.parametrize("buffer", [False, True], ids=["Memory", "ChatMemoryBuffer"])
def test_a_deep_copy_of_a_conversation_goes_on_by_itself(client: Memory, buffer: bool) -> None:
    kept = ChatMemoryBuffer.from_defaults(token_limit=1000) if buffer else None
    first = InferScaleMemory(client, ADA, kept, infer=False)
    first.put(ChatMessage(role="user", content="Hello"))
    again = copy.deepcopy(first)
    again.put(ChatMessage(role="assistant", content="Hello, Ada."))
    assert [message.content for message in again.get_all()] == ["Hello", "Hello, Ada."]
    assert [message.content for message in first.get_all()] == ["Hello"]
    assert "Hello" in {fact["memory"] for fact in client.get_all(filters=ADA)["results"]}


def test_a_memory_that_is_read_again_keeps_the_limit_of_its_history(client: Memory) -> None:
    memory = InferScaleMemory.from_defaults(client, ADA, token_limit=1234)
    assert InferScaleMemory.from_dict(memory.to_dict()).primary_memory.token_limit == 1234


def test_a_copy_for_somebody_else_recalls_their_memories_though_the_question_was_asked_before(
    client: Memory,
) -> None:
    ada = InferScaleMemory.from_defaults(client, ADA, infer=False)
    assert "My cat is called Miso" in memories_of(ada)
    ben = ada.model_copy(update={"context": InferScaleContext(**BEN)})
    assert "My cat is called Miso" not in memories_of(ben)
    assert any("Zorro" in text for text in memories_of(ben))


def test_a_copy_over_another_memory_answers_out_of_that(client: Memory, engine: WatchedEngine) -> None:
    bare = InferScaleLLM(engine, max_tokens=4, **ADA)
    assert not bare.complete(QUESTION).raw["memories"]
    assert memories_of(bare.model_copy(update={"memory": client}))


def test_pickled_messages_keep_their_words_and_leave_the_recollection_behind(client: Memory) -> None:
    messages = InferScaleMemory.from_defaults(client, ADA, infer=False).get(QUESTION)
    again = pickle.loads(pickle.dumps(messages))
    assert recollection_in(again) is None
    assert str(again[0].content).startswith(HEADING)
    assert recollection_in(copy.deepcopy(messages)) is not None
