"""Options that cannot work are refused before anything is sent, the same for every engine."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", None),
        ("max_tokens", "9"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", 0),
        ("top_p", 2),
        ("top_p", float("nan")),
        ("stop", ("",)),
        ("stop", ""),
        ("stop", (7,)),
        ("stop", None),
        ("stop", ("x",) * 129),
        ("seed", 2**70),
        ("seed", -(2**64)),
        ("seed", 1.0),
        ("logprobs", -2),
        ("logprobs", "all"),
    ],
)
def test_an_option_that_cannot_work_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        SamplingOptions(**{name: value})


def test_what_apps_pass_is_taken() -> None:
    assert SamplingOptions(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingOptions(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingOptions(temperature=1).temperature == 1.0
    assert SamplingOptions(seed=-5).seed == -5
    assert SamplingOptions(max_tokens=2**70).max_tokens == 2**70
    assert hash(SamplingOptions(stop=["a"])) == hash(SamplingOptions(stop=("a",)))  # type: ignore[arg-type]
