"""`audit` finds a text wherever a file or an engine still has it, and never shows it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from inferscale_memory.memory import Audit, Memory, Place
from inferscale_memory.storage.file_search import find, search_files, spellings
from tests.memory.conftest import OpenMemory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, say

SECRET = 'She said "Quäker" & left'


def test_a_living_text_is_found_in_the_files_that_hold_it(either: Settled, tmp_path: Path) -> None:
    either.add(SECRET, **ADA, infer=False)
    audit = either.audit(SECRET)
    assert not audit.clean
    assert {Path(place.file).name for place in audit.found} >= {"history.db"}
    assert all(str(tmp_path) in place.file and place.offset >= 0 for place in audit.found)


def test_it_does_not_show_the_text(memory: Memory) -> None:
    say(memory, SECRET)
    assert "Quäker" not in repr(memory.audit(SECRET))


def test_json_escapes_are_seen_through(open_memory: OpenMemory) -> None:
    memory = open_memory(vector_store={"provider": "faiss"})
    say(memory, SECRET)
    assert "mem0.json" in {Path(place.file).name for place in memory.audit(SECRET).found}


def test_a_blob_that_the_engine_holds_is_found(memory: Memory) -> None:
    first, _ = say(memory, "one secret", "two")
    memory.flush()
    assert len(memory.audit("one secret").blobs) == 2, "the second has the first in its window"
    memory.delete(first)
    assert memory.audit("one secret") == Audit((), ())
    memory.flush()
    assert memory.audit("one secret").clean


def test_what_was_never_said_is_nowhere(memory: Memory) -> None:
    say(memory, "something")
    assert memory.audit("something else").clean


def test_an_empty_text_is_refused(either: Settled) -> None:
    with pytest.raises(ValueError, match="words in it"):
        either.audit("  ")


@pytest.mark.parametrize("form", [str, str.upper, str.lower, json.dumps])
def test_every_spelling_is_found(form: object) -> None:
    assert callable(form)
    data = b"\x00\x01" + form("Secret 'Words'").encode() + b"\xff"
    assert len(find(data, spellings("Secret 'Words'"))) == 1


@pytest.mark.parametrize("provider", ["inferscale", "faiss"])
def test_letters_beyond_ascii_have_cases_too(open_memory: OpenMemory, provider: str) -> None:
    memory = open_memory(vector_store={"provider": provider})
    say(memory, "Мой Сейф открыт, sagt Übermut in Ägypten")
    memory.flush()
    for asked in ("мой сейф", "МОЙ сейф ОТКРЫТ", "übermut in ÄGYPTEN"):
        audit = memory.audit(asked)
        assert len({Path(place.file).name for place in audit.found}) >= 3, asked
        assert len(audit.blobs) == 1, asked


def test_a_file_is_found_whatever_its_name(open_memory: OpenMemory, tmp_path: Path) -> None:
    history = tmp_path / "history[1].db"
    memory = open_memory(history_db_path=str(history))
    say(memory, SECRET)
    assert str(history) in {place.file for place in memory.audit(SECRET).found}


def test_a_text_that_is_spread_over_pages_is_found(tmp_path: Path) -> None:
    path = tmp_path / "long.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE texts (text TEXT)")
        for before in range(1000, 9000, 7):
            db.execute(
                "INSERT INTO texts VALUES (?)",
                ("x" * before + "a text of forty bytes and some more" + "y" * (12_000 - before),),
            )
    db.close()
    data = path.read_bytes()
    whole = data.count(b"a text of forty bytes and some more")
    rows = len(range(1000, 9000, 7))
    assert whole < rows, "some are spread"
    assert len(find(data, spellings("a text of forty bytes and some more"))) == rows
    assert find(data, spellings("a text of forty bytes and none more")) == []


def test_files_that_vanish_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("words")
    found = search_files([tmp_path / "gone", tmp_path / "there"], spellings("words"))
    assert found == [(str(tmp_path / "there"), 0)]


def test_places_are_values() -> None:
    assert Audit((Place("f", 1),), ()).clean is False
