"""The example agent, as anybody would run it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory import Engine
from integrations.langchain.tests.saying import injected, recalled

EXAMPLE = Path(__file__).parents[3] / "examples" / "langchain_agent.py"


@pytest.fixture
def engine_of_the_demo() -> Iterator[Engine]:
    from inferscale_memory.engine.transformers import TransformersEngine
    from inferscale_memory.fetch import demo_model

    with TransformersEngine(demo_model(), device="cpu") as engine:
        yield engine


@pytest.mark.engine
def test_the_agent_knows_its_users_again_and_keeps_them_apart(engine_of_the_demo: Any, capsys: Any) -> None:
    spec = importlib.util.spec_from_file_location("langchain_agent", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    answers = example.main({"engine": engine_of_the_demo})
    allergy, shop, wedding = answers[3:]
    assert "walnuts" in allergy.text
    assert "Lyon" in shop.text
    assert "I am allergic to walnuts." in injected(allergy)
    assert "My sister Ines gets married on 14 June in Porto." in injected(wedding)
    users = [user for user, _, _ in example.SESSIONS]
    for user, answer in zip(users, answers, strict=True):
        others = {words for whose, _, words in example.SESSIONS if whose != user}
        assert not recalled(answer) & others
    assert "injected" in capsys.readouterr().out
