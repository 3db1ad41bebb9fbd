"""How many memories are recalled is `top_k`, or `k` for short; options of one release ago warn."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_inferscale import ChatInferScale, InferScaleRetriever
from langchain_inferscale.calls import read_call

from inferscale_memory import ConfigurationError

CALL: dict[str, Any] = {
    **dict.fromkeys(
        ("memories", "top_k", "filters", "tools", "tool_choice", "response_format", "stop", "seed")
    ),
    **{"scope": {}, "inject": True, "temperature": 0.0, "max_tokens": 1, "top_p": 1.0},
}


@pytest.mark.parametrize("name", ["top_k", "k"])
def test_the_model_and_the_retriever_take_both_names(name: str) -> None:
    for made in (ChatInferScale(**{name: 2}), InferScaleRetriever(memory={}, **{name: 2})):
        assert made.top_k == made.k == 2


@pytest.mark.parametrize("make", [ChatInferScale, lambda **many: InferScaleRetriever(memory={}, **many)])
def test_two_numbers_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="pass top_k alone"):  # pydantic's, as with every wrong option
        make(top_k=1, k=2)


def test_a_call_takes_both_names() -> None:
    assert read_call(CALL, {"k": 3}, None).top_k == read_call(CALL, {"top_k": 3}, None).top_k == 3
    with pytest.raises(ConfigurationError, match="pass top_k alone"):
        read_call(CALL, {"top_k": 3, "k": 4}, None)


def test_w_is_the_old_name_of_context_turns() -> None:
    with pytest.warns(DeprecationWarning, match="w is now context_turns"):
        model = ChatInferScale(memory={"folder": "nowhere"}, w=3)
    assert model.context_turns == 3
