"""How the reports of several ranks are merged."""

from __future__ import annotations

from inferscale_memory.connector.metadata import Report


def test_a_piece_is_captured_only_when_all_ranks_have_captured_it() -> None:
    one, two = ("r", 0, 4), ("r", 4, 9)
    assert Report(captured={one, two}).merge(Report(captured={two})).captured == {two}
    assert Report(captured={one}).merge(Report(lost={"r": "why"})).captured == set()


def test_loads_and_captures_that_failed_on_any_rank_have_failed() -> None:
    fine = Report(loaded={"a": 0.2, "b": 0.1}, status="")
    broken = Report(loaded={"a": 0.3}, failed_loads={"b"}, lost={"c": "why"}, status="odd")
    for merged in (fine.merge(broken), broken.merge(fine)):
        assert merged.loaded == {"a": 0.3}
        assert (merged.failed_loads, merged.lost, merged.status) == ({"b"}, {"c": "why"}, "odd")


def test_the_start_up_check_has_passed_when_no_rank_reports_a_problem() -> None:
    assert Report(status="").merge(Report(status="")).status == ""
    assert Report(status="").merge(Report()).status == ""
    assert Report().merge(Report()).status is None


def test_an_empty_report_is_not_sent() -> None:
    assert not Report()
    assert Report(status="")
    assert Report(loaded={"a": 0.0})
