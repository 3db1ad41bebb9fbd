"""Calls of an engine's `forget` that are still to be made."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from inferscale_memory.journal import Journal, PendingForget

ONE = PendingForget("user:ada", ("key",), ("tag", "other"))


def test_a_pending_call_outlives_the_journal_and_goes_when_it_is_removed(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.pending_forgets.add([ONE, PendingForget("user:ben", (), ("tag",))])
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        first, second = journal.pending_forgets.all()
        assert journal.pending_forgets.all()[first] == ONE
        journal.pending_forgets.remove([first])
        assert (list(journal.pending_forgets.all()), journal.pending_forgets.count()) == ([second], 1)
        journal.pending_forgets.remove([])
        assert journal.pending_forgets.count() == 1


def test_forgetting_everything_keeps_the_pending_calls(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.pending_forgets.add([ONE])
        journal.forget_everything()
        assert journal.pending_forgets.count() == 1
