"""Copies, pickles and what LangChain writes down: whole or refused, and never over another memory or engine."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain.agents.middleware import ModelRequest
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, HumanMessage
from langchain_inferscale import (
    ChatInferScale,
    InferScaleMemoryMiddleware,
    InferScaleRetriever,
    InferScaleStore,
)

from inferscale_memory import Memory
from inferscale_memory.errors import CopyError
from integrations.langchain.tests.saying import FACTS
from tests.memory.watched import WatchedEngine

QUESTION = "What is my cat called?"
PLACE = ("notes", "ada")

MAKERS: dict[str, Callable[[Memory], Any]] = {
    "ChatInferScale": lambda memory: ChatInferScale(memory=memory, user_id="ada", max_tokens=4),
    "ChatInferScale.bind": lambda memory: ChatInferScale(memory=memory, max_tokens=4).bind(user_id="ada"),
    "ChatInferScale.with_config": lambda memory: ChatInferScale(memory=memory, max_tokens=4).with_config(
        configurable={"user_id": "ada"}
    ),
    "InferScaleRetriever": lambda memory: InferScaleRetriever(memory=memory, user_id="ada"),
    "InferScaleMemoryMiddleware": lambda memory: InferScaleMemoryMiddleware(memory, user_id="ada"),
    "InferScaleStore": InferScaleStore,
}
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "a list of it, deeply": lambda thing: copy.deepcopy([thing])[0],
    "model_copy": lambda thing: thing.model_copy(),
    "model_copy, deeply": lambda thing: thing.model_copy(deep=True),
}
PLAIN = ("InferScaleMemoryMiddleware", "InferScaleStore")
ROUTES = [
    (kind, way) for kind in MAKERS for way in COPIES if kind not in PLAIN or not way.startswith("model_copy")
]


def memories_of(thing: Any) -> list[str]:
    """What an object recalls when it is asked."""
    if isinstance(thing, InferScaleStore):
        return [str(item.value["text"]) for item in thing.search(PLACE, query=QUESTION)]
    if isinstance(thing, InferScaleRetriever):
        return [document.page_content for document in thing.invoke(QUESTION)]
    if isinstance(thing, InferScaleMemoryMiddleware):
        seen: list[Any] = []
        request: Any = ModelRequest(
            model=ChatInferScale(memory=thing._chat.memory), messages=[HumanMessage(QUESTION)], runtime=None
        )
        thing.wrap_model_call(request, lambda asked: seen.append(asked) or AIMessage(""))  # type: ignore[func-returns-value,arg-type,return-value]
        return [memory["memory"] for memory in seen[0].model_settings["memories"]]
    return [memory["text"] for memory in thing.invoke(QUESTION).response_metadata["memories"]]


@pytest.fixture
def full(filled: Memory) -> Memory:
    InferScaleStore(filled).put(PLACE, "cat", {"text": "A cat called Miso"})
    return filled


@pytest.mark.parametrize(("kind", "way"), ROUTES)
def test_a_copy_answers_out_of_the_same_memory(kind: str, way: str, full: Memory) -> None:
    first = MAKERS[kind](full)
    again = COPIES[way](first)
    assert type(again) is type(first)
    assert again is not first
    assert memories_of(again) == memories_of(first) != []


@pytest.mark.parametrize("kind", MAKERS)
def test_an_open_memory_is_not_pickled(kind: str, full: Memory) -> None:
    thing = MAKERS[kind](full)
    with pytest.raises(CopyError, match=r"cannot be pickled.*configuration"):
        pickle.dumps(thing)
    assert memories_of(thing)


@pytest.mark.parametrize("kind", MAKERS)
def test_langchain_writes_it_down_without_the_memory_and_does_not_read_it_again(
    kind: str, full: Memory
) -> None:
    written = dumpd(MAKERS[kind](full))
    assert "Miso" not in str(written)
    with pytest.raises((NotImplementedError, ValueError)):
        load(written, allowed_objects="all")


def test_a_running_engine_is_not_pickled(engine: WatchedEngine) -> None:
    for model in (ChatInferScale(engine=engine), ChatInferScale(memory={"engine": engine})):
        with pytest.raises(CopyError, match="cannot be pickled"):
            pickle.dumps(model)


def test_a_configuration_is_pickled_and_opens_a_memory_of_its_own(
    tmp_path: Path, model_folder: Path, embedder: dict[str, Any]
) -> None:
    config = {
        "embedder": embedder,
        "folder": tmp_path / "memory",
        "engine": {"provider": "transformers", "model": str(model_folder), "device": "cpu"},
    }
    with ChatInferScale(memory=config, user_id="ada", max_tokens=4) as model:
        model.chat.memory.add(FACTS[0], user_id="ada", infer=False)
        told = memories_of(model)
        written = pickle.dumps(model)
        retriever = pickle.dumps(InferScaleRetriever(memory=config, user_id="ada"))
    with pickle.loads(written) as again:
        assert again.chat is not model.chat
        assert memories_of(again) == told != []
    found = pickle.loads(retriever)
    assert memories_of(found) == told
    found.close()


def test_a_deep_copy_over_a_configuration_shares_the_memory_that_was_opened(
    tmp_path: Path, engine: WatchedEngine, embedder: dict[str, Any]
) -> None:
    config = {"embedder": embedder, "folder": tmp_path / "memory", "engine": engine}
    with ChatInferScale(memory=config, user_id="ada", max_tokens=4) as model:
        assert copy.deepcopy(model).chat is model.model_copy().chat is model.chat


def test_a_copy_or_an_assignment_with_another_memory_answers_out_of_that(
    engine: WatchedEngine, full: Memory
) -> None:
    bare = ChatInferScale(engine=engine, user_id="ada", max_tokens=4)
    assert memories_of(bare) == []
    assert memories_of(bare.model_copy(update={"engine": None, "memory": full}))
    bare.engine, bare.memory = None, full
    assert memories_of(bare)


def test_configurable_fields_stay_over_the_same_memory(full: Memory) -> None:
    from langchain_core.runnables import ConfigurableField

    model = ChatInferScale(memory=full, user_id="ada").configurable_fields(
        max_tokens=ConfigurableField(id="length")
    )
    answer = model.with_config(configurable={"length": 3}).invoke(QUESTION)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 3
    assert answer.response_metadata["memories"]
