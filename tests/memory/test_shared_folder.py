"""Stores that share a folder, a history or nothing but a default: what one of them forgets is its own."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mem0.configs.base import MemoryConfig

from inferscale_memory.journal import Intent
from inferscale_memory.memory import Memory
from inferscale_memory.memory.store_files import StoreFiles, name_of
from tests.memory.conftest import OpenMemory
from tests.memory.hashing import DIMENSIONS
from tests.memory.raw import files_with
from tests.memory.saying import ADA, say
from tests.memory.test_faces import Extractor

MINE, THEIRS = "I keep bees in the attic", "I water the ficus on Mondays"
Opens = Callable[[str], Memory]


def inferscale(collection: str) -> dict[str, Any]:
    return {"provider": "inferscale", "config": {"collection_name": collection}}


def qdrant(name: str) -> dict[str, Any]:
    return {"provider": {"mem0": "inferscale", "other": "qdrant"}[name]}


@pytest.fixture(params=[inferscale, qdrant], ids=["collections", "stores"])
def open_(request: pytest.FixtureRequest, open_memory: OpenMemory) -> Opens:
    """Opens one of two memories, "mem0" or "other", in one folder: two collections of a file, or two stores."""
    return lambda name: open_memory(vector_store=request.param(name))


def turns(memory: Memory) -> list[str]:
    assert memory._core is not None
    return [row[0] for row in memory._core.journal.database.read("SELECT text FROM turns WHERE text IS NOT NULL")]


def events(memory: Memory, fact: str) -> list[str | None]:
    return [event["new_memory"] for event in memory.history(fact)]


def begin(memory: Memory, intent: Intent) -> None:
    assert memory._core is not None
    memory._core.journal.intents.begin(intent)
    memory.close()


@pytest.mark.parametrize("kind", ["delete_all", "reset"])
def test_what_one_finishes_after_a_crash_is_not_the_others(open_: Opens, kind: str) -> None:
    mine, theirs = open_("mem0"), open_("other")
    [fact] = say(mine, MINE)
    [other] = say(theirs, THEIRS)
    begin(mine, Intent(kind, scope="user_id=ada" if kind == "delete_all" else ""))
    mine = open_("mem0")
    assert (mine.get(fact), turns(mine)) == (None, [])
    assert events(theirs, other) == turns(theirs) == [THEIRS]
    theirs.close()
    theirs = open_("other")
    assert events(theirs, other) == turns(theirs) == [THEIRS]
    assert theirs.get(other)["memory"] == THEIRS


def test_what_one_begun_is_finished_by_it_alone(open_: Opens) -> None:
    mine, theirs = open_("mem0"), open_("other")
    [fact] = say(mine, MINE)
    begin(mine, Intent("delete", fact, "user_id=ada", (MINE,)))
    theirs.close()
    open_("other").close()
    mine = open_("mem0")
    assert mine.get(fact) is None


@pytest.mark.parametrize("name", ["mem0", "other"])
def test_a_reset_leaves_turns_messages_and_history_of_the_other(open_: Opens, name: str) -> None:
    reset, kept = open_(name), open_("other" if name == "mem0" else "mem0")
    say(reset, MINE)
    kept.llm = Extractor(THEIRS)
    [fact] = [result["id"] for result in kept.add("The ficus, on Mondays", **ADA)["results"]]
    reset.reset()
    assert turns(reset) == []
    assert turns(kept) == ["The ficus, on Mondays"]
    assert events(kept, fact) == [THEIRS]
    assert [row["content"] for row in kept.db.get_last_messages("user_id=ada")] == ["The ficus, on Mondays"]


def test_deleting_in_one_deletes_in_one(open_: Opens) -> None:
    mine, theirs = open_("mem0"), open_("other")
    [fact], [other] = say(mine, MINE), say(theirs, MINE)
    mine.delete(fact)
    assert turns(theirs) == events(theirs, other) == [MINE]
    mine.delete_all(**ADA)
    assert turns(theirs) == events(theirs, other) == [MINE]


def test_each_finds_its_own_files_again_wherever_the_folder_lies(
    open_memory: OpenMemory, tmp_path: Path
) -> None:
    for name in ("mem0", "other", "third"):
        with open_memory(vector_store=inferscale(name)) as memory:
            say(memory, f"the {name} one")
    folder = tmp_path / "memory"
    assert {path.name for path in folder.iterdir()} >= {"journal.sqlite", "history.db"}
    assert len(list(folder.glob("journal*.sqlite"))) == len(list(folder.glob("history*.db"))) == 3
    shutil.move(folder, tmp_path / "moved")
    for name in ("third", "other", "mem0"):
        with open_memory(folder=tmp_path / "moved", vector_store=inferscale(name)) as memory:
            [fact] = memory.get_all(filters=ADA)["results"]
            assert turns(memory) == events(memory, fact["id"]) == [f"the {name} one"]
    assert len(list((tmp_path / "moved").glob("journal*.sqlite"))) == 3


def test_a_journal_made_before_this_was_known_is_the_first_comers(
    open_memory: OpenMemory, tmp_path: Path
) -> None:
    with open_memory() as memory:
        say(memory, MINE)
    with closing(sqlite3.connect(tmp_path / "memory" / "journal.sqlite")) as db:
        db.execute("DROP TABLE whose")
    assert turns(open_memory()) == [MINE]
    assert turns(open_memory(vector_store=inferscale("other"))) == []


# -- mem0's configuration objects -------------------------------------------------------------------------------


@pytest.fixture
def open_object(
    tmp_path: Path, hashing_embedder: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opens]:
    """Opens a memory of mem0's configuration object: nobody says a folder, and the history is shared."""
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    opened = []

    def open_(name: str) -> Memory:
        store = {"path": str(tmp_path / name), "embedding_model_dims": DIMENSIONS}
        config = MemoryConfig(
            embedder=hashing_embedder,
            vector_store={"provider": "qdrant", "config": store},
            llm={"provider": "openai", "config": {"api_key": "none"}},
            history_db_path=str(tmp_path / "history.db"),
        )
        opened.append(Memory(config))
        assert opened[-1].config.history_db_path == config.history_db_path, "it is taken as it is"
        return opened[-1]

    yield open_
    for memory in opened:
        memory.close()


@pytest.mark.parametrize("kind", ["delete_all", "reset"])
def test_objects_share_the_home_and_the_history_without_harm(open_object: Opens, kind: str) -> None:
    mine, theirs = open_object("one"), open_object("two")
    [fact], [gone] = say(mine, MINE), say(mine, "gone from the store, and not from the rest")
    [other] = say(theirs, THEIRS)
    mine.vector_store._inner.delete(gone)
    scope = "user_id=ada" if kind == "delete_all" else ""
    begin(mine, Intent(kind, scope=scope, facts=(fact, gone)))
    mine = open_object("one")
    assert turns(mine) == []
    assert {text for name in (fact, gone) for text in events(mine, name)} == {None}
    assert turns(theirs) == events(theirs, other) == [THEIRS]
    theirs.close()
    assert turns(open_object("two")) == [THEIRS]


def test_a_reset_of_an_object_leaves_the_turns_of_the_other(open_object: Opens) -> None:
    mine, theirs = open_object("one"), open_object("two")
    say(mine, MINE)
    say(theirs, THEIRS)
    mine.reset()
    assert turns(theirs) == [THEIRS]
    assert [row["memory"] for row in theirs.get_all(filters=ADA)["results"]] == [THEIRS]


# -- names ------------------------------------------------------------------------------------------------------


def named(folder: Path = Path("/f"), provider: str = "pgvector", **options: Any) -> str:
    return name_of(SimpleNamespace(provider=provider, config=SimpleNamespace(**options)), folder)


def test_a_store_is_told_by_provider_place_and_collection() -> None:
    base = {"host": "db", "port": 5432, "dbname": "app", "collection_name": "mem0"}
    names = [
        named(**base),
        named(provider="qdrant", **base),
        *(named(**{**base, name: value}) for name, value in [("host", "x"), ("port", 1), ("dbname", "y")]),
        named(**{**base, "collection_name": "other"}),
    ]
    assert len(set(names)) == len(names)
    assert named(**base, password="one", embedding_model_dims=3) == named(**base, password="two")
    assert name_of(SimpleNamespace(provider="pgvector", config=base), Path("/f")) == names[0]


def test_what_is_secret_in_an_address_is_not_in_the_name() -> None:
    for address in ("postgresql://{}@db/app", "redis://u:{}@db", "host=db password={}", "x://db?pwd={}"):
        assert named(connection_string=address.format("one")) == named(
            connection_string=address.format("two")
        )
    assert named(url="redis://u:p@one/1") != named(url="redis://u:p@two/1")


def test_a_place_in_the_folder_moves_with_it_and_another_does_not() -> None:
    inside = [named(Path(folder), path=f"{folder}/facts.sqlite") for folder in ("/f", "/g/h")]
    outside = [named(Path(folder), path="/else/facts.sqlite") for folder in ("/f", "/g/h")]
    assert inside[0] == inside[1] != outside[0] == outside[1]


def test_a_name_that_is_no_path_is_the_same_wherever_the_process_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app").mkdir()
    names = set()
    for place in (tmp_path, tmp_path / "app"):
        monkeypatch.chdir(place)
        names.add(named(tmp_path, host="db", dbname="app", collection_name="mem0"))
    assert len(names) == 1


def test_a_store_is_the_same_whatever_link_leads_to_it(open_memory: OpenMemory, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for place in ("disk", "link"):
        path = str(tmp_path / place / "facts.sqlite")
        with open_memory(vector_store={"provider": "inferscale", "config": {"path": path}}) as memory:
            if place == "disk":
                [fact] = say(memory, MINE)
            else:
                memory.delete(fact)
    assert files_with(tmp_path, MINE) == []


def test_a_folder_that_cannot_be_used_raises(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_text("this is no database, and long enough to be taken for one")
    with pytest.raises(sqlite3.DatabaseError):
        StoreFiles.claimed(tmp_path, "one")
