"""Options and methods under the names they had one release ago."""

from __future__ import annotations

import warnings

import pytest

from inferscale_memory.deprecation import one_top_k, renamed
from inferscale_memory.errors import ConfigurationError

NAMES = {"w": "context_turns"}


def test_an_old_name_sets_the_new_option_and_warns_at_the_callers_line() -> None:
    with pytest.warns(DeprecationWarning, match=r"injection\.w is now injection\.context_turns") as caught:
        assert renamed({"w": 3, "order": "sessions"}, NAMES, "injection.") == {
            "context_turns": 3,
            "order": "sessions",
        }
    assert caught[0].filename == __file__


def test_new_names_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert renamed({"context_turns": 3}, NAMES, "injection.") == {"context_turns": 3}


def test_the_callers_dictionary_is_not_changed() -> None:
    given = {"w": 3}
    with pytest.warns(DeprecationWarning, match="is now"):
        renamed(given, NAMES, "")
    assert given == {"w": 3}


def test_both_names_with_different_values_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"pass injection\.context_turns alone"):
        renamed({"w": 3, "context_turns": 4}, NAMES, "injection.")
    with pytest.warns(DeprecationWarning, match="is now"):
        assert renamed({"w": 3, "context_turns": 3}, NAMES, "injection.") == {"context_turns": 3}


def test_k_is_short_for_top_k() -> None:
    assert one_top_k(None, None) is None
    assert one_top_k(3, None) == one_top_k(None, 3) == one_top_k(3, 3) == 3
    assert one_top_k(0, None) == 0
    with pytest.raises(ConfigurationError, match=r"top_k is 3 and k is 4.* pass top_k alone"):
        one_top_k(3, 4)
