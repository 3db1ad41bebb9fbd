"""A cache of answers, global to the process, never answers one user with another's memories, nor with old ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_inferscale import ChatInferScale

from inferscale_memory import Memory
from integrations.langchain.tests.saying import ADA, BEN, FACTS, QUESTION, SECRET, recalled
from tests.memory.watched import WatchedEngine


@pytest.fixture(autouse=True)
def cache() -> Iterator[InMemoryCache]:
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Any:
    import asyncio

    def ask(model: Any, question: str, config: Any = None, **options: Any) -> Any:
        if request.param == "sync":
            return model.invoke(question, config, **options)
        return asyncio.run(model.ainvoke(question, config, **options))

    return ask


def answers(engine: WatchedEngine) -> int:
    """How many the engine gave; the async twin of the tests' engine is its sync one in a thread."""
    return len(engine.asked)


def test_two_users_never_share_an_answer(model: ChatInferScale, ask: Any) -> None:
    mine, theirs = ask(model, "What do you know?", ADA), ask(model, "What do you know?", BEN)
    assert recalled(mine) == set(FACTS)
    assert recalled(theirs) == {SECRET}


def test_nor_do_they_however_the_scope_is_said(filled: Memory, ask: Any) -> None:
    ada = ChatInferScale(memory=filled, max_tokens=2, user_id="ada")
    assert recalled(ask(ada, "What do you know?")) == set(FACTS)
    for other in (
        ChatInferScale(memory=filled, max_tokens=2, user_id="ben"),
        ChatInferScale(memory=filled, max_tokens=2, agent_id="ada"),
        ada.bind(user_id="ben"),
        ada.with_config(BEN),
    ):
        assert not recalled(ask(other, "What do you know?")) & set(FACTS)


def test_the_same_question_of_the_same_user_is_answered_once(
    model: ChatInferScale, engine: WatchedEngine, ask: Any
) -> None:
    first = ask(model, QUESTION, ADA)
    asked = answers(engine)
    again = ask(model, QUESTION, ADA)
    assert answers(engine) == asked
    assert again.text == first.text
    assert recalled(again) == set(FACTS)


def test_what_changes_in_the_scope_makes_a_new_answer(
    model: ChatInferScale, filled: Memory, engine: WatchedEngine, ask: Any
) -> None:
    ask(model, QUESTION, ADA)
    added = filled.add("My cat is ill", user_id="ada", infer=False)["results"][0]["id"]
    assert "My cat is ill" in recalled(ask(model, QUESTION, ADA))
    filled.update(added, "My cat is well")
    assert "My cat is well" in recalled(ask(model, QUESTION, ADA))
    filled.delete(added)
    assert recalled(ask(model, QUESTION, ADA)) == set(FACTS)


def test_what_changes_for_somebody_else_does_not(
    model: ChatInferScale, filled: Memory, engine: WatchedEngine, ask: Any
) -> None:
    ask(model, QUESTION, ADA)
    filled.add("My safe is empty", user_id="ben", infer=False)
    asked = answers(engine)
    ask(model, QUESTION, ADA)
    assert answers(engine) == asked


def test_other_options_and_other_memories_make_another_answer(
    model: ChatInferScale, engine: WatchedEngine, ask: Any
) -> None:
    for options in ({}, {"k": 1}, {"memories": []}, {"temperature": 0.5}, {"stop": ["x"]}, {"inject": False}):
        asked = answers(engine)
        ask(model, QUESTION, ADA, **options)
        assert answers(engine) == asked + 1, options


def test_two_memories_do_not_share_answers(open_memory: Any, filled: Memory, tmp_path: Any, ask: Any) -> None:
    other = open_memory(folder=tmp_path / "other")
    other.add("My cat is called Rex", user_id="ada", infer=False)
    for memory, text in ((filled, FACTS[0]), (other, "My cat is called Rex")):
        model = ChatInferScale(memory=memory, k=1, max_tokens=2)
        assert recalled(ask(model, QUESTION, ADA)) == {text}
