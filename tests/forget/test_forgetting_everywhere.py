"""What is deleted, reworded or expired is in no file any more, on either face and on every store."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from uuid import uuid4

import pytest

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.facts.scope import turn_tag
from inferscale_memory.mem0_adapter.rows import rows_of
from tests.memory.conftest import OpenFace
from tests.memory.faces import Settled
from tests.memory.hashing import DIMENSIONS
from tests.memory.raw import files_with
from tests.memory.saying import ADA, BEN
from tests.memory.stores import STORES
from tests.memory.test_faces import Extractor

SECRET = "My safe opens with 4711-Quäker"
OTHER = "I water the ficus on Mondays"
BENS = "Ben keeps bees in the attic"
LISBON = "Ada moved to Lisbon in spring"
ENTITY_IDS = [f"{number:08d}-0000-0000-0000-00000000000e" for number in range(2)]


@pytest.fixture(params=STORES)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_(open_face: OpenFace, provider: str) -> OpenFace:
    def open_on(**options: Any) -> Settled:
        return open_face(vector_store={"provider": provider}, **options)

    return open_on


@pytest.fixture
def memory(open_: OpenFace) -> Settled:
    return open_()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "memory"


def add(memory: Settled, *texts: str, **who: str) -> list[str]:
    messages = [{"role": "user", "content": text} for text in texts]
    return [result["id"] for result in memory.add(messages, **(who or ADA), infer=False)["results"]]


def extract(memory: Settled, said: str, *facts: str, **who: str) -> list[str]:
    """`add` with a model that draws `facts` out of what was said; their ids."""
    memory.itself.llm = Extractor(*facts)
    return [result["id"] for result in memory.add(said, **(who or ADA))["results"]]


def table(folder: Path, file: str, query: str) -> list[Any]:
    db = sqlite3.connect(folder / file)
    rows = db.execute(query).fetchall()
    db.close()
    return rows


def linked(memory: Settled) -> dict[str, list[str]]:
    """Entity -> the memories that name it."""
    return {
        row.payload["data"]: row.payload["linked_memory_ids"]
        for row in rows_of(memory.itself.entity_store.list(filters=ADA, top_k=100))
    }


def link(memory: Settled, entity: str, ids: list[str], number: int = 0) -> None:
    """As mem0 does where spaCy is installed."""
    memory.itself.entity_store.insert(
        vectors=[memory.itself.embedding_model.embed(entity)],
        ids=[ENTITY_IDS[number]],
        payloads=[{"data": entity, "entity_type": "PLACE", "linked_memory_ids": sorted(ids), **ADA}],
    )


class TestDelete:
    def test_the_text_is_in_no_file_when_the_call_returns(self, memory: Settled, folder: Path) -> None:
        secret, _ = add(memory, SECRET, OTHER)
        add(memory, BENS, **BEN)
        assert files_with(folder, "4711-Q") != []
        memory.delete(secret)
        assert files_with(folder, "4711-Q") == []
        assert memory.audit(SECRET).clean
        assert files_with(folder, OTHER) != []
        assert [found["memory"] for found in memory.get_all(filters=BEN)["results"]] == [BENS]

    def test_nor_are_the_turns_and_messages_it_was_drawn_from(self, memory: Settled, folder: Path) -> None:
        secret, _ = extract(memory, "Note 4711-Quaker, and the ficus", "Ada has a safe code", OTHER)
        extract(memory, "Mind the bees", BENS, **BEN)
        memory.delete(secret)
        assert files_with(folder, "4711-Q") == []
        assert files_with(folder, "safe code") == []
        assert [row["memory"] for row in memory.get_all(filters=ADA)["results"]] == [OTHER]
        assert table(folder, "history.db", "SELECT content FROM messages") == [("Mind the bees",)]

    def test_nor_is_what_was_said_again_and_made_no_fact(self, memory: Settled, folder: Path) -> None:
        [secret] = add(memory, SECRET)
        extract(memory, f"As I said: {SECRET.lower()}!")
        memory.delete(secret)
        assert files_with(folder, "4711-Q") == []
        assert memory.audit(SECRET).clean

    def test_a_fact_that_says_the_same_stays(self, memory: Settled, folder: Path) -> None:
        one, other = add(memory, SECRET, SECRET)
        [bens] = add(memory, SECRET, **BEN)
        memory.delete(one)
        assert memory.get(other)["memory"] == memory.get(bens)["memory"] == SECRET
        turns = table(folder, "journal.sqlite", "SELECT text FROM turns ORDER BY number")
        assert turns == [(SECRET,), (SECRET,)]

    def test_its_events_stay_without_the_text(self, memory: Settled) -> None:
        [secret] = add(memory, SECRET)
        memory.update(secret, OTHER)
        before = memory.history(secret)
        memory.delete(secret)
        after = memory.history(secret)
        assert [event["event"] for event in after] == ["ADD", "UPDATE", "DELETE"]
        assert [event["id"] for event in after[:2]] == [event["id"] for event in before]
        assert {event[name] for event in after for name in ("old_memory", "new_memory")} == {None}
        assert all(event["created_at"] for event in after)
        assert after[-1]["is_deleted"]

    def test_entities_are_unlinked_in_a_process_that_never_opened_them(
        self, open_: OpenFace, folder: Path
    ) -> None:
        before = open_()
        secret, other = add(before, LISBON, OTHER)
        link(before, "Lisbon", [secret])
        link(before, "Ada", [secret, other], 1)
        before.close()
        memory = open_()
        assert memory.itself._entity_store is None
        memory.delete(secret)
        assert linked(memory) == {"Ada": [other]}
        assert files_with(folder, "Lisbon") == []

    def test_what_the_journal_never_knew_is_forgotten_too(self, open_: OpenFace, folder: Path) -> None:
        before = open_()
        [secret] = extract(before, f"It is so: {SECRET}", SECRET)
        before.close()
        for file in folder.glob("journal.sqlite*"):
            file.unlink()
        memory = open_()
        memory.delete(secret)
        assert files_with(folder, "4711-Q") == []

    def test_what_mem0_refused_to_add_is_not_kept(self, memory: Settled, folder: Path) -> None:
        with pytest.raises(Exception, match="Invalid"):
            memory.add(SECRET, **ADA, memory_type="nonsense", infer=False)
        assert files_with(folder, "4711-Q") == []

    @pytest.mark.parametrize("method", ["delete", "update", "delete_all"])
    def test_what_the_store_refuses_to_lose_keeps_everything(
        self, memory: Settled, folder: Path, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        [fact] = extract(memory, f"I tell you: {SECRET}", SECRET)
        store = memory.itself.vector_store._inner
        for name in ("delete", "update", "list"):
            monkeypatch.setattr(store, name, MagicMock(side_effect=RuntimeError("disk full")))
        calls = {"delete": ([fact], {}), "update": ([fact, OTHER], {}), "delete_all": ([], ADA)}
        args, options = calls[method]
        with pytest.raises(RuntimeError, match="disk full"):
            getattr(memory, method)(*args, **options)
        assert memory.history(fact)[0]["new_memory"] == SECRET
        assert table(folder, "history.db", "SELECT count(*) FROM messages") == [(1,)]
        assert table(folder, "journal.sqlite", "SELECT text IS NULL FROM turns") == [(0,)]
        assert table(folder, "journal.sqlite", "SELECT count(*) FROM intents") == [(0,)]

    def test_what_the_store_has_lost_before_it_failed_is_forgotten(
        self, memory: Settled, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [fact] = add(memory, SECRET)
        store = memory.itself.vector_store._inner
        delete = store.delete

        def half(vector_id: str) -> None:
            delete(vector_id)
            raise RuntimeError("connection lost")

        monkeypatch.setattr(store, "delete", half)
        with pytest.raises(RuntimeError, match="connection lost"):
            memory.delete(fact)
        assert files_with(folder, "4711-Q") == []


class TestUpdate:
    def test_the_old_words_are_in_no_file_and_the_new_ones_are(self, memory: Settled, folder: Path) -> None:
        [secret] = extract(memory, f"I tell you: {SECRET}", SECRET)
        memory.update(secret, OTHER)
        assert files_with(folder, "4711-Q") == []
        assert memory.get(secret)["memory"] == OTHER
        [added, updated] = memory.history(secret)
        assert (added["new_memory"], updated["old_memory"], updated["new_memory"]) == (None, None, OTHER)

    def test_entities_of_the_old_words_are_unlinked(self, open_: OpenFace) -> None:
        before = open_()
        [fact] = add(before, LISBON)
        link(before, "Lisbon", [fact])
        before.close()
        memory = open_()
        memory.update(fact, OTHER)
        assert "Lisbon" not in linked(memory)

    def test_metadata_alone_forgets_nothing(self, memory: Settled, folder: Path) -> None:
        [fact] = add(memory, OTHER)
        memory.update(fact, metadata={"date": "2024-05-12"})
        assert table(folder, "journal.sqlite", "SELECT text FROM turns") == [(OTHER,)]
        assert {event["new_memory"] for event in memory.history(fact)} == {OTHER}


class TestDeleteAll:
    def test_messages_turns_and_texts_of_the_scope_go_and_others_stay(
        self, memory: Settled, folder: Path
    ) -> None:
        [secret, _] = extract(memory, "Note 4711-Quaker, will you", SECRET, OTHER)
        extract(memory, "Nothing to remember about 4711-Quaker", **ADA, run_id="r1")
        extract(memory, "Mind the bees", BENS, **BEN)
        memory.delete_all(**ADA)
        assert files_with(folder, "4711-Q") == files_with(folder, "ficus") == []
        assert table(folder, "history.db", "SELECT content FROM messages") == [("Mind the bees",)]
        assert [event["event"] for event in memory.history(secret)] == ["ADD", "DELETE"]
        assert [found["memory"] for found in memory.get_all(filters=BEN)["results"]] == [BENS]

    def test_a_scope_that_mem0_refuses_forgets_nothing(self, memory: Settled, folder: Path) -> None:
        add(memory, OTHER)
        for bad in ({}, {"user_id": "two words"}):
            with pytest.raises(ValueError):
                memory.delete_all(**bad)
        assert table(folder, "journal.sqlite", "SELECT text FROM turns") == [(OTHER,)]

    def test_reset_leaves_nothing_of_anybody(self, open_: OpenFace, folder: Path) -> None:
        before = open_()
        [secret] = extract(before, f"I tell you: {SECRET}", SECRET)
        add(before, BENS, **BEN)
        link(before, "Lisbon", [secret])
        before.close()
        memory = open_()
        memory.reset()
        for text in ("4711-Q", BENS, "Lisbon"):
            assert files_with(folder, text) == []
        assert linked(memory) == {}


class TestExpiry:
    def test_an_expired_fact_is_in_no_prompt_and_mem0_still_shows_it_when_asked(
        self, memory: Settled
    ) -> None:
        stale, _ = add(memory, SECRET, OTHER)
        memory.flush()
        memory.update(stale, expiration_date="2001-01-01")
        assert [found.text for found in memory.prepare("?", **ADA).memories] == [OTHER]
        shown = memory.get_all(filters=ADA, show_expired=True)["results"]
        assert {found["memory"] for found in shown} == {SECRET, OTHER}
        assert memory.history(stale)[0]["new_memory"] == SECRET

    def test_it_leaves_windows_and_turns(self, memory: Settled, folder: Path, engine: Any) -> None:
        stale, _ = add(memory, SECRET, OTHER)
        memory.flush()
        memory.update(stale, expiration_date="2001-01-01")
        engine.encoded.clear()
        memory.flush()
        assert engine.encoded_facts
        assert not any("4711" in engine.text(request) for request in engine.encoded_facts)
        assert "journal.sqlite" not in files_with(folder, "4711-Q")

    def test_it_leaves_a_conversation(self, memory: Settled, engine: Any) -> None:
        stale, _ = add(memory, SECRET, OTHER)
        memory.flush()
        talk = Settled(memory.itself.session(**ADA), memory._run)
        short = SamplingOptions(max_tokens=3)
        talk.chat("What do you know?", options=short)
        memory.update(stale, expiration_date="2001-01-01")
        talk.chat("And now?", options=short)
        assert "4711" not in engine.tokenizer.decode(talk._kept.prepared.prompt.ids)

    def test_one_whose_date_is_taken_back_is_remembered_again(self, memory: Settled) -> None:
        [fact] = add(memory, OTHER)
        memory.update(fact, expiration_date="2001-01-01")
        memory.flush()
        memory.update(fact, expiration_date=None)
        memory.flush()
        assert [found.injected for found in memory.prepare("?", **ADA).memories] == [True]

    def test_expire_deletes_them_for_good(self, memory: Settled, folder: Path) -> None:
        stale, fresh = add(memory, SECRET, OTHER)
        memory.update(stale, expiration_date="2001-01-01")
        memory.update(fresh, expiration_date="2999-01-01")
        assert memory.expire() == 1
        assert memory.expire() == 0
        assert files_with(folder, "4711-Q") == []
        assert memory.get(stale) is None
        assert memory.get(fresh)["memory"] == OTHER
        assert memory.history(stale)[-1]["event"] == "DELETE"

    def test_what_expired_while_nobody_looked_is_put_away_at_the_next_start(
        self, open_: OpenFace, folder: Path
    ) -> None:
        before = open_()
        [stale] = add(before, SECRET)
        before.update(stale, expiration_date="2001-01-01")
        before.close()
        open_()
        assert table(folder, "journal.sqlite", "SELECT count(*) FROM facts") == [(0,)]


# -- no more and no less ------------------------------------------------------------------------------------


def turns_of(folder: Path) -> list[str]:
    return [
        text for (text,) in table(folder, "journal.sqlite", "SELECT text FROM turns WHERE text IS NOT NULL")
    ]


def test_an_empty_memory_takes_nothing_along(memory: Settled, folder: Path) -> None:
    """As mem0 and earlier versions of this library have written them."""
    add(memory, OTHER)
    empty, payload = str(uuid4()), {"data": "", "hash": "", **ADA}
    memory.itself.vector_store.insert(vectors=[[0.125] * DIMENSIONS], ids=[empty], payloads=[payload])
    memory.delete(empty)
    assert turns_of(folder) == [OTHER]
    assert memory.get_all(filters=ADA)["results"][0]["memory"] == OTHER


def test_a_message_sent_again_with_every_call_goes_with_its_fact(memory: Settled, folder: Path) -> None:
    """As apps do that send the whole conversation each time."""
    (fact,) = extract(memory, SECRET, "Ada has a safe")
    extract(memory, SECRET)  # nothing new in it
    assert turns_of(folder) == [SECRET, SECRET]
    memory.delete(fact)
    assert turns_of(folder) == []
    assert files_with(folder, SECRET) == []


def test_an_add_that_could_not_be_written_leaves_no_turns(
    memory: Settled, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the embedder is away")

    with monkeypatch.context() as patch:
        for name in ("embed", "embed_batch"):
            patch.setattr(memory.itself.embedding_model, name, broken)
        with pytest.raises(ConnectionError):
            add(memory, SECRET)
    assert turns_of(folder) == []
    assert files_with(folder, SECRET) == []


def test_what_had_expired_when_it_was_written_is_in_no_window(memory: Settled, folder: Path) -> None:
    memory.add(SECRET, **ADA, infer=False, expiration_date="2020-01-01")
    assert turns_of(folder) == []
    assert memory.get_all(filters=ADA, show_expired=True)["results"][0]["memory"] == SECRET


def test_the_case_of_letters_beyond_ascii_hides_nothing(memory: Settled, folder: Path) -> None:
    said = "Zoë trägt grüne Äpfel"
    extract(memory, said.upper())
    (fact,) = extract(memory, "what she wears", said)
    memory.delete(fact)
    assert said.upper() not in turns_of(folder)


def test_a_long_run_of_one_character_is_forgotten_in_no_time(memory: Settled, folder: Path) -> None:
    first, second = add(memory, "=" * 8000, "=" * 8000 + "!")
    memory.delete(first)
    memory.delete(second)
    assert files_with(folder, "=" * 300) == []


def test_a_store_that_loses_a_memory_while_it_updates_it_does_not_take_the_last_copy_along(
    memory: Settled, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mem0's FAISS store deletes before it inserts."""
    (fact,) = add(memory, OTHER)
    inner = memory.itself.vector_store._inner

    def torn(vector_id: str, **_: Any) -> None:
        inner.delete(vector_id)
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "update", torn)
        with pytest.raises(OSError, match="full"):
            memory.update(fact, "I water the ficus on Tuesdays")
    assert OTHER in [event["new_memory"] for event in memory.history(fact)]
    assert turns_of(folder) == [OTHER]


# -- what mem0 does not write, and what it keeps beside turns -----------------------------------------------


def test_a_turn_that_says_a_known_fact_in_other_words_goes_with_it(memory: Settled, folder: Path) -> None:
    """mem0 writes nothing then: a fact that it was shown has the digest of what it would write."""
    (secret,) = extract(memory, "You open it with four, seven, one, one", SECRET)
    assert extract(memory, "Seven comes after four, as you know", SECRET) == []
    assert extract(memory, "Ficus", OTHER) != []
    memory.delete(secret)
    assert turns_of(folder) == ["Ficus"]
    assert files_with(folder, "seven") == []
    assert memory.audit("Seven comes after four, as you know").clean


def test_so_does_one_that_says_new_facts_too_and_these_stay(memory: Settled, folder: Path) -> None:
    (secret,) = extract(memory, "You open it with four, seven, one, one", SECRET)
    (other,) = extract(memory, "Seven comes after four, and mind the ficus", SECRET, OTHER)
    memory.delete(secret)
    assert memory.get(other)["memory"] == OTHER
    assert turns_of(folder) == []


def test_so_does_one_that_is_told_to_the_engine_by_its_own_tag(memory: Settled, engine: Any) -> None:
    (secret,) = extract(memory, "You open it with four, seven, one, one", SECRET)
    extract(memory, "Seven comes after four, as you know", SECRET)
    memory.flush()
    turns = memory.itself._core.journal.facts.turns_of([secret])
    engine.forgotten.clear()
    memory.update(secret, OTHER)
    tags = {tag for _, _, tags in engine.forgotten for tag in tags}
    assert turn_tag("user:ada", turns[-1]) in tags


def test_a_fact_of_another_owner_that_says_the_same_has_no_part_in_it(memory: Settled, folder: Path) -> None:
    (bens,) = extract(memory, "Ben says it", SECRET, **BEN)
    extract(memory, "Ada says it", SECRET)
    memory.delete(bens)
    assert turns_of(folder) == ["Ada says it"]


SYSTEM = {"role": "system", "content": "The safe of the house opens with 4711-Quaker"}
HELLO = {"role": "user", "content": "Hello, what about it?"}


def messages_of(folder: Path) -> list[str]:
    return [text for (text,) in table(folder, "history.db", "SELECT content FROM messages")]


def converse(memory: Settled, messages: list[dict[str, Any]], *facts: str, **who: str) -> list[str]:
    memory.itself.llm = Extractor(*facts)
    return [result["id"] for result in memory.add(messages, **(who or ADA))["results"]]


def test_instructions_that_a_fact_was_drawn_from_go_with_it(memory: Settled, folder: Path) -> None:
    (secret,) = converse(memory, [SYSTEM, HELLO], SECRET)
    extract(memory, "Mind the ficus, please", OTHER)
    extract(memory, "Mind the bees, please", BENS, **BEN)
    memory.delete(secret)
    assert sorted(messages_of(folder)) == ["Mind the bees, please", "Mind the ficus, please"]
    assert files_with(folder, "4711-Q") == []


def test_what_mem0_saw_in_a_picture_goes_with_what_was_said_beside_it(
    open_: OpenFace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mem0.memory.utils.get_image_description", lambda *_: "A note that reads 4711-Quaker")
    llm = {"provider": "openai", "config": {"api_key": "none", "enable_vision": True}}
    memory = open_(llm=llm)
    picture = [{"type": "image_url", "image_url": {"url": "https://nowhere/picture.png"}}]
    (secret,) = converse(memory, [HELLO, {"role": "user", "content": picture}], SECRET)
    extract(memory, "Mind the ficus, please", OTHER)
    assert "A note that reads 4711-Quaker" in messages_of(folder)
    memory.delete(secret)
    assert messages_of(folder) == ["Mind the ficus, please"]
    assert files_with(folder, "4711-Q") == []


def test_a_message_of_whatever_role_that_says_a_fact_or_its_turn_goes(memory: Settled, folder: Path) -> None:
    (secret,) = extract(memory, "It is four, seven, one, one", SECRET)
    said = [
        {"role": "system", "content": f"Known so far: {SECRET.upper()}."},
        {"role": "system", "content": "She said: It is four, seven, one, one. Be kind."},
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "Fine."},
    ]
    converse(memory, said)
    memory.delete(secret)
    assert messages_of(folder) == ["Be kind.", "Fine."]


def test_a_short_turn_takes_no_message_along_but_its_like(memory: Settled, folder: Path) -> None:
    (secret,) = converse(memory, [HELLO, {"role": "assistant", "content": "Yes"}], SECRET)
    converse(memory, [{"role": "user", "content": "Yes, the ficus"}, {"role": "assistant", "content": "Yes"}])
    memory.delete(secret)
    assert messages_of(folder) == ["Yes, the ficus"]


# -- many at once --------------------------------------------------------------------------------------------


def test_deleting_all_of_many_leaves_what_deleting_each_would(memory: Settled, folder: Path) -> None:
    facts = extract(memory, "A list of them", *(f"{SECRET} number {n}" for n in range(120)))
    runs = extract(memory, "And one more", f"{SECRET} of a run", **ADA, run_id="r1")
    link(memory, "Lisbon", facts[:3])
    link(memory, "Porto", runs, 1)
    (bens,) = extract(memory, "Mind the bees", BENS, **BEN)
    assert memory.delete_all(**ADA) == {"message": "Memories deleted successfully!"}
    assert memory.get_all(filters=ADA)["results"] == []
    for text in ("4711-Q", "Lisbon", "Porto"):
        assert files_with(folder, text) == []
    events = [memory.history(fact) for fact in (facts[0], facts[-1], runs[0])]
    assert [[event["event"] for event in each] for each in events] == [["ADD", "DELETE"]] * 3
    assert all(each[-1]["is_deleted"] and each[-1]["created_at"] for each in events)
    assert memory.get(bens)["memory"] == BENS
    assert turns_of(folder) == ["Mind the bees"]
    assert table(folder, "journal.sqlite", "SELECT count(*) FROM intents") == [(0,)]


@pytest.mark.parametrize("provider", ["inferscale"], indirect=True)
def test_our_store_deletes_them_in_one_go(
    memory: Settled, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(memory, "A list of them", *(f"number {n}" for n in range(50)))
    calls: list[list[str]] = []
    inner = memory.itself.vector_store._inner
    many = inner.delete_many
    monkeypatch.setattr(inner, "delete", lambda vector_id: pytest.fail("one by one"))
    monkeypatch.setattr(inner, "delete_many", lambda ids: (calls.append(ids), many(ids))[1])
    scrubs = MagicMock(side_effect=memory.itself._core.journal.scrub)
    monkeypatch.setattr(memory.itself._core.journal, "scrub", scrubs)
    memory.delete_all(**ADA)
    assert ([len(ids) for ids in calls], scrubs.call_count) == ([50], 1)


def test_an_app_that_deletes_in_its_own_way_is_asked_for_each(
    memory: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = add(memory, SECRET, OTHER)
    asked: list[str] = []
    own = memory.itself._delete_memory

    def watched(memory_id: str, *args: Any, **options: Any) -> Any:
        asked.append(memory_id)
        return own(memory_id, *args, **options)

    monkeypatch.setattr(memory.itself, "_delete_memory", watched)
    memory.delete_all(**ADA)
    assert sorted(asked) == sorted(facts)
