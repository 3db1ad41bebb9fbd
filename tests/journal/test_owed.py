"""What an engine could not be told: kept until it is."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from inferscale_memory.journal import Journal, Owed

ONE = Owed("user:ada", ("key",), ("tag", "other"))


def test_what_is_owed_outlives_the_journal_and_goes_when_it_is_settled(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.owed.owe([ONE, Owed("user:ben", (), ("tag",))])
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        first, second = journal.owed.all()
        assert journal.owed.all()[first] == ONE
        journal.owed.settle([first])
        assert (list(journal.owed.all()), journal.owed.count()) == ([second], 1)
        journal.owed.settle([])
        assert journal.owed.count() == 1


def test_forgetting_everything_does_not_forget_what_is_owed(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.owed.owe([ONE])
        journal.forget_everything()
        assert journal.owed.count() == 1
