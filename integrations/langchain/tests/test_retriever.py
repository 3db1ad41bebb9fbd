"""The retriever: documents with scores, for one scope and no other."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_inferscale import InferScaleRetriever

from inferscale_memory import Memory
from inferscale_memory.errors import ConfigurationError
from integrations.langchain.tests.saying import ADA, BEN, FACTS, QUESTION, SECRET
from tests.memory.watched import WatchedEngine


def test_the_nearest_memories_with_their_scores(filled: Memory, engine: WatchedEngine) -> None:
    documents = InferScaleRetriever(memory=filled, user_id="ada", k=2).invoke(QUESTION)
    assert documents[0].page_content == FACTS[0]
    assert documents[0].metadata["score"] > documents[1].metadata["score"]
    assert documents[0].metadata["user_id"] == "ada"
    assert filled.get(documents[0].id)["memory"] == FACTS[0]


@pytest.mark.asyncio
async def test_both_ways_over_either_face(either: Any) -> None:
    for fact in FACTS:
        added = either.add(fact, user_id="ada", infer=False, metadata={"topic": "home"})
        if not isinstance(added, dict):
            await added
    retriever = InferScaleRetriever(memory=either, k=3)
    found = [document.page_content for document in await retriever.ainvoke(QUESTION, ADA)]
    assert sorted(found) == sorted(FACTS)
    assert [document.page_content for document in retriever.invoke(QUESTION, ADA)] == found
    assert retriever.invoke(QUESTION, ADA, k=1)[0].metadata["topic"] == "home"


def test_whose_memories_is_said_as_the_model_takes_it(filled: Memory) -> None:
    retriever = InferScaleRetriever(memory=filled, user_id="ben")
    assert {found.page_content for found in retriever.invoke(QUESTION)} == {SECRET}
    assert {found.page_content for found in retriever.invoke(QUESTION, ADA)} == set(FACTS)
    assert {found.page_content for found in retriever.invoke(QUESTION, BEN, user_id="ada")} == set(FACTS)


def test_filters(memory: Memory) -> None:
    memory.add("tea is hot", user_id="ada", infer=False, metadata={"kind": "drink"})
    memory.add("toast is hot", user_id="ada", infer=False, metadata={"kind": "food"})
    retriever = InferScaleRetriever(memory=memory, user_id="ada", filters={"kind": "food"})
    assert [found.page_content for found in retriever.invoke("hot")] == ["toast is hot"]
    assert [found.page_content for found in retriever.invoke("hot", filters={"kind": "drink"})] == [
        "tea is hot"
    ]


def test_what_cannot_be(filled: Memory) -> None:
    with pytest.raises(ConfigurationError, match="nothing says whose"):
        InferScaleRetriever(memory=filled).invoke(QUESTION)
    with pytest.raises(ConfigurationError, match="user_id is empty"):
        InferScaleRetriever(memory=filled, user_id="ada").invoke(QUESTION, {"configurable": {"user_id": ""}})
    with pytest.raises(ConfigurationError, match="takes no top"):
        InferScaleRetriever(memory=filled, user_id="ada").invoke(QUESTION, top=3)
    with pytest.raises(ValueError, match="has no memory"):
        InferScaleRetriever(memory=None)
