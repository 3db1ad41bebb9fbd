"""Memories that are forgotten or changed while a question is under way, or an encode, or a look at the store."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from inferscale_memory.engine.base import Chunk, SamplingOptions
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.memory import Chat, Memory
from inferscale_memory.prompt import Prompt
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, say, texts
from tests.memory.watched import WatchedEngine

SHORT = SamplingOptions(max_tokens=3)


@pytest.fixture
def prompts(engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine was asked, in words."""
    asked: list[str] = []
    stream = engine.stream

    def watched(prompt: Prompt, options: SamplingOptions = SHORT) -> Iterator[Chunk]:
        asked.append(engine.tokenizer.decode(prompt.ids))
        return stream(prompt, options)

    monkeypatch.setattr(engine, "stream", watched)
    return asked


def test_a_memory_that_is_deleted_before_a_stream_is_read_is_not_in_it(
    open_memory: OpenMemory, prompts: list[str]
) -> None:
    memory = open_memory(injection={"neighbours": 0})  # no blob stands on another
    cat, _ = say(memory, "My cat is called Miso", "I live in Porto")
    memory.flush()
    pieces = memory.chat("What is my cat called?", **ADA, stream=True, max_tokens=3)
    memory.delete(cat)
    *_, last = pieces
    assert "Miso" not in prompts[-1]
    assert "Porto" in prompts[-1]
    assert last.reply is not None
    assert texts(last.reply) == ["I live in Porto"]
    assert last.reply.memories[0].injected
    assert last.reply.completion.injected_tokens > 0


def test_a_memory_that_is_reworded_before_a_stream_is_read_is_not_in_it(
    memory: Memory, prompts: list[str]
) -> None:
    cat, _ = say(memory, "My cat is called Miso", "I live in Porto")
    pieces = memory.chat("What is my cat called?", **ADA, stream=True, max_tokens=3)
    memory.update(cat, "My cat is called Tofu")
    list(pieces)
    assert "Miso" not in prompts[-1]


@pytest.mark.parametrize("change", ["delete", "update"])
def test_what_went_after_it_was_found_is_not_in_the_prompt(
    memory: Memory, prompts: list[str], change: str
) -> None:
    cat, _ = say(memory, "My cat is called Miso", "I live in Porto")
    found = memory.search("What is my cat called?", filters=ADA, threshold=0.0)["results"]
    assert len(found) == 2
    if change == "delete":
        memory.delete(cat)
    else:
        memory.update(cat, "My cat is called Tofu")
    reply = memory.chat("What is my cat called?", **ADA, memories=found, max_tokens=3)
    assert "Miso" not in prompts[-1]
    assert texts(reply) == ["I live in Porto"]


def test_what_another_program_wrote_stands_as_the_store_has_it(
    memory: Memory, engine: WatchedEngine, prompts: list[str]
) -> None:
    """Behind the journal's back, reworded and new."""
    (cat,) = say(memory, "My cat is called Miso")
    memory.flush()
    engine.gate.clear()
    inner = memory.vector_store._inner
    payload = {**inner.get(cat).payload, "data": "My cat is called Tofu"}
    vector = memory.embedding_model.embed("cat", "add")
    inner.update(cat, vector=vector, payload=payload)
    inner.insert(
        vectors=[vector],
        payloads=[{**payload, "data": "My cat is grey"}],
        ids=["0" * 8 + "-" + "-".join(["0" * 4] * 3) + "-" + "0" * 12],
    )
    reply = memory.chat("What is my cat called?", **ADA, max_tokens=3)
    assert sorted(texts(reply)) == ["My cat is called Tofu", "My cat is grey"]
    assert "Tofu" in prompts[-1]
    assert "grey" in prompts[-1]
    engine.gate.set()


def test_a_sessions_stream_is_prepared_anew_where_a_memory_goes_before_it_is_read(
    memory: Memory, prompts: list[str]
) -> None:
    cat, _ = say(memory, "My cat is called Miso", "I live in Porto")
    memory.flush()
    talk = memory.session(**ADA, k=2, sticky=True)
    talk.chat("Who am I?", options=SHORT)
    pieces = talk.stream("And what is my cat called?", options=SHORT)
    memory.delete(cat)
    *_, last = pieces
    assert "Miso" not in prompts[-1]
    assert "Who am I?" in prompts[-1]
    assert last.reply is not None
    assert texts(last.reply) == ["I live in Porto"]


@pytest.mark.parametrize("way", ["whole", "piece by piece"])
def test_an_engine_that_is_asked_while_a_memory_goes_is_told_once_more(
    memory: Memory, engine: WatchedEngine, way: str
) -> None:
    """The first telling may come before the prompt has left anything behind."""
    (cat,) = say(memory, "My cat is called Miso")
    memory.flush()
    stream = engine.stream

    def deleting(prompt: Prompt, options: SamplingOptions = SHORT) -> Iterator[Chunk]:
        memory.delete(cat)
        engine.forgotten.clear()
        return stream(prompt, options)

    engine.stream = deleting  # type: ignore[method-assign]
    prepared = memory.prepare("What is my cat called?", **ADA)
    (tag,) = {segment.tag for segment in prepared.prompt.segments if segment.tag}
    if way == "whole":
        memory.chat("What is my cat called?", **ADA, max_tokens=3)
    else:
        next(iter(pieces := memory.chat("What is my cat called?", **ADA, stream=True, max_tokens=3)))
        pieces.close()  # type: ignore[attr-defined]
    assert [tags for _, _, tags in engine.forgotten] == [(tag,)]


def test_an_engine_is_told_nothing_where_nothing_went(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, "My cat is called Miso")
    memory.flush()
    memory.chat("What is my cat called?", **ADA, max_tokens=3)
    assert engine.forgotten == []


def test_a_stream_may_be_read_when_its_memory_is_closed(memory: Memory) -> None:
    """The engine is the caller's."""
    say(memory, "My cat is called Miso")
    memory.flush()
    pieces = memory.chat("What is my cat called?", **ADA, stream=True, max_tokens=3)
    memory.close()
    *_, last = pieces
    assert last.reply is not None
    assert last.reply.memories[0].injected


def test_a_stream_may_be_left_when_its_memory_is_closed(memory: Memory) -> None:
    say(memory, "My cat is called Miso")
    pieces = memory.chat("What is my cat called?", **ADA, stream=True, max_tokens=3)
    next(iter(pieces))
    memory.close()
    pieces.close()  # type: ignore[attr-defined]


def test_a_memory_that_is_reworded_while_it_is_answered_from_is_not_in_the_next_turn(
    memory: Memory, engine: WatchedEngine, prompts: list[str]
) -> None:
    (cat,) = say(memory, "My cat is called Miso")
    memory.flush()
    talk = memory.session(**ADA, k=1, sticky=True)
    stream = engine.stream

    def rewording(prompt: Prompt, options: SamplingOptions = SHORT) -> Iterator[Chunk]:
        if len(prompts) == 0:
            memory.update(cat, "My cat is called Tofu")
        return stream(prompt, options)

    engine.stream = rewording  # type: ignore[method-assign]
    talk.chat("What is my cat called?", options=SHORT)
    talk.chat("Again: what is it called?", options=SHORT)
    assert "Miso" in prompts[0]
    assert "Miso" not in prompts[1]
    assert "Tofu" in prompts[1]


def test_a_look_at_the_store_does_not_undo_a_change_made_meanwhile(memory: Memory) -> None:
    (cat,) = say(memory, "My cat is called Miso")
    memory.flush()
    store, core = memory.vector_store, memory._core
    assert core is not None
    changing = Thread(target=memory.update, args=(cat, "My cat is called Tofu"))
    held = store._held

    def slow(fact: str) -> Any:
        payload = held(fact)
        if not changing.ident:
            changing.start()
            changing.join(0.5)
        return payload

    store._held = slow
    assert core._check([cat]) == []
    changing.join()
    assert core.journal.facts.get([cat])[cat].text == "My cat is called Tofu"
    assert memory.get(cat)["memory"] == "My cat is called Tofu"


def test_a_fact_that_is_being_changed_for_long_is_left_for_later(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever changes it may be waiting for the encoder."""
    monkeypatch.setattr("inferscale_memory.memory.core.CHANGE_S", 0.1)
    engine.gate.clear()
    cat, home = say(memory, "My cat is called Miso", "I live in Porto")
    core = memory._core
    assert core is not None
    with memory.vector_store._order:
        unseen: list[list[str]] = []
        looking = Thread(target=lambda: unseen.append(core._check([cat, home])))
        looking.start()
        looking.join(20)
    assert unseen == [[cat, home]]
    engine.gate.set()


def test_a_blob_that_another_takes_the_place_of_is_forgotten(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    """Taken whole, facts are encoded again, each behind all before it."""
    first = open_memory(injection={"neighbours": 0})
    say(first, "My cat is called Miso", "I live in Porto")
    first.flush()
    first.close()
    entries = [call for call in engine.forgotten if call[1]]
    assert entries == []
    whole = open_memory(injection={"full_memory_tokens": 4000, "neighbours": 0})
    assert whole._core is not None
    ids = [fact["id"] for fact in whole.get_all(filters=ADA)["results"]]
    before = {entry.key for entry in whole._core.journal.ledger.get(ids, engine.fingerprint).values()}
    whole.chat("Where do I live?", **ADA, max_tokens=3)
    whole.flush()
    after = {entry.key for entry in whole._core.journal.ledger.get(ids, engine.fingerprint).values()}
    told = {key for _, keys, _ in engine.forgotten for key in keys}
    assert len(before) == 2
    assert told == before - after
    assert told
    assert engine.at_hand("user:ada", sorted(before | after)) == after


def test_what_expired_meanwhile_stands_no_more(memory: Memory) -> None:
    (cat,) = say(memory, "My cat is called Miso")
    chat = Chat(memory=memory)
    found = chat.recall("What is my cat called?", ADA)
    assert chat.is_current(found)
    memory.update(cat, expiration_date="2020-01-01")
    assert not chat.is_current(found)


def test_an_encode_that_fails_leaves_no_words_of_what_went_meanwhile(
    memory: Memory, engine: WatchedEngine
) -> None:
    cat, _ = say(memory, "My cat is called Miso", "My cat Miso lives in Porto")
    memory.flush()
    assert memory._core is not None
    tag = memory._core.journal.facts.get([cat])[cat].tag
    engine.refuse = lambda request: request.owner == "user:ada"
    engine.before_return = lambda: _once(engine, lambda: memory.delete(cat))
    engine.forgotten.clear()
    say(memory, "My cat Miso sleeps all day")
    memory.flush()
    assert len([tags for _, _, tags in engine.forgotten if tag in tags]) >= 2  # deleted, and told once more


def _once(engine: WatchedEngine, do: Any) -> None:
    engine.before_return = lambda: None
    do()


def test_a_journal_that_fails_once_does_not_end_the_encoder(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory._core is not None
    journal, failures = memory._core.journal, [OSError("no room on the disk")]
    places = journal.facts.places

    def failing(ids: Any) -> dict[str, int]:
        if failures:
            raise failures.pop()
        return places(ids)

    monkeypatch.setattr(journal.facts, "places", failing)
    say(memory, "My cat is called Miso")
    memory.flush(timeout=60)
    assert failures == []
    assert len(engine.encoded_facts) == 1


def test_a_question_of_a_session_takes_no_ids(memory: Memory) -> None:
    talk = memory.session(**ADA)
    with pytest.raises(ConfigurationError, match="takes no user_id"):
        memory.chat("What is my cat called?", session=talk, user_id="ben")
