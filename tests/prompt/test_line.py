from datetime import datetime

import pytest

from inferscale_memory.prompt import fact_line


def test_a_line_carries_date_and_speaker_and_ends_in_a_newline() -> None:
    line = fact_line("I moved to Porto.", when=datetime(2026, 1, 5, 23, 59), speaker="Maya")
    assert line == "- [2026-01-05] Maya: I moved to Porto.\n"


def test_a_line_without_a_date_has_no_brackets() -> None:
    assert fact_line("I moved.", when=None, speaker="Maya") == "- Maya: I moved.\n"


@pytest.mark.parametrize("speaker", [None, "", " \n"])
def test_a_line_without_a_speaker_has_no_name(speaker: str | None) -> None:
    assert fact_line("I moved.", when=datetime(2026, 1, 5), speaker=speaker) == "- [2026-01-05] I moved.\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029"])
def test_no_newline_of_any_kind_splits_a_line(newline: str) -> None:
    line = fact_line(f"one{newline}two", when=None, speaker=f"Ma{newline}ya")
    assert line == "- Ma ya: one two\n"


def test_an_early_year_keeps_the_form_of_the_date() -> None:
    assert fact_line("x", when=datetime(476, 9, 4), speaker=None) == "- [0476-09-04] x\n"


def test_empty_text_is_still_one_line() -> None:
    assert fact_line(" \n ", when=None) == "- \n"
