"""Progress of long work, with a terminal and without."""

from __future__ import annotations

import time

import pytest

from inferscale_memory import progress
from inferscale_memory.progress import Lines, bar, steps


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_how_much_is_done_and_how_long_the_rest_takes() -> None:
    clock = Clock()
    lines = Lines("Asking", 120, clock)
    assert lines.line() == "Asking: 0 of 120 (0%), 0:00 so far"
    clock.now += 20
    lines.advance(30)
    assert lines.line() == "Asking: 30 of 120 (25%), 0:20 so far, about 1:00 left"
    clock.now += 100
    lines.advance(90)
    assert lines.line() == "Asking: 120 of 120 (100%), 2:00 so far"


def test_work_of_no_pieces_is_done_at_once() -> None:
    assert Lines("Asking", 0, Clock()).line() == "Asking: 0 of 0, 0:00 so far"


def waited_for(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """What was printed on stderr until `words` came, which takes no longer than 10 seconds."""
    printed = ""
    end = time.monotonic() + 10
    while words not in printed and time.monotonic() < end:
        time.sleep(0.01)
        out, err = capsys.readouterr()
        assert out == "", "a result alone goes to stdout"
        printed += err
    return printed


def test_without_a_terminal_a_bar_prints_lines_while_work_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.02)
    with bar("Asking", 4) as advance:
        advance()
        advance(2)
        assert "Asking: 3 of 4 (75%)" in waited_for(capsys, "3 of 4")
        advance()
    assert "Asking: 4 of 4 (100%)" in waited_for(capsys, "4 of 4")


def test_without_a_terminal_every_step_is_a_line_and_a_long_one_is_said_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.02)
    with steps("model") as step:
        step("downloading [1/2]")
        printed = waited_for(capsys, "so far")
    assert "model: downloading [1/2]\n" in printed
    assert "model: downloading [1/2], 0:00 so far" in printed


def test_the_silence_is_ten_seconds_at_most() -> None:
    assert progress.INTERVAL_S <= 10


def test_work_that_fails_ends_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="broken"), bar("Asking", 4):
        raise RuntimeError("broken")
