"""The options of `injection`, under their current names and those of one release ago."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from inferscale_memory import ConfigurationError, Injection
from inferscale_memory.recall.injection import OLD_NAMES


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_an_old_option_works_and_warns_with_its_new_name(old: str, new: str) -> None:
    says = rf"injection\.{old} is now injection\.{new}"
    with pytest.warns(DeprecationWarning, match=says):
        assert getattr(Injection(**{old: 7}), new) == 7
    with pytest.warns(DeprecationWarning, match=says):
        injection = Injection.read({old: 7})
    with pytest.warns(DeprecationWarning, match=rf"Injection\.{old} is now Injection\.{new}"):
        assert getattr(injection, old) == 7


def test_an_old_option_is_checked_like_the_new_one() -> None:
    refused = pytest.raises(ConfigurationError, match=r"injection\.top_k must be")
    with pytest.warns(DeprecationWarning, match="is now"), refused:
        Injection.read({"k": -1})


@pytest.mark.parametrize("make", [lambda options: Injection(**options), Injection.read])
def test_two_values_for_one_option_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"pass injection\.top_k alone"):
        make({"k": 3, "top_k": 4})


def test_options_are_copied_and_pickled_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    injection = Injection(top_k=3, context_turns=2)
    assert copy.deepcopy(injection) == pickle.loads(pickle.dumps(injection)) == injection
    assert not recwarn.list
