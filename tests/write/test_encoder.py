"""Encoding follows writing: what happens when it is slow, fails, or has to start over."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.engine.base import EncodeRequest
from inferscale_memory.errors import EngineError
from inferscale_memory.memory import Memory
from inferscale_memory.write import encoder
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, injected, say, texts
from tests.memory.watched import WatchedEngine


def core(memory: Memory) -> Any:
    assert memory._core is not None
    return memory._core


def test_a_fact_that_cannot_be_encoded_is_served_as_text(memory: Memory, engine: WatchedEngine) -> None:
    def is_bad(request: EncodeRequest) -> bool:
        return any("bad apple" in text for text in engine.texts(request))

    engine.refuse = is_bad
    _, bad, _ = say(memory, "good pear", "bad apple", "good plum")
    memory.flush()
    reply = memory.chat("Which fruit?", **ADA, max_tokens=2)
    assert set(injected(reply)) == {"good pear", "good plum"}
    assert set(texts(reply)) == {"good pear", "bad apple", "good plum"}
    assert core(memory).encoder.failed == {bad: "refused by the test"}


def test_it_is_tried_again_when_recalled_but_not_for_ever(memory: Memory, engine: WatchedEngine) -> None:
    engine.refuse = lambda request: request.owner == "user:ada"
    say(memory, "bad apple")
    for _ in range(6):
        memory.flush()
        memory.chat("Which fruit?", **ADA, max_tokens=1)
    memory.flush()
    assert len(engine.encoded_facts) == 3
    engine.refuse = lambda request: False
    assert injected(memory.chat("Which fruit?", **ADA, max_tokens=1)) == []


def test_a_fact_longer_than_the_context_is_text_and_said(memory: Memory, engine: WatchedEngine) -> None:
    [fact] = say(memory, "word " * engine.max_model_len)
    say(memory, "short")
    memory.flush()
    assert "more tokens" in core(memory).encoder.failed[fact]
    assert injected(memory.chat("short?", **ADA, max_tokens=1)) == ["short"]


def test_flush_says_how_far_it_is(memory: Memory, engine: WatchedEngine) -> None:
    engine.gate.clear()
    say(memory, *(f"fact {number}" for number in range(5)))
    seen: list[tuple[int, int]] = []
    waiter = threading.Thread(target=memory.flush, args=(lambda done, total: seen.append((done, total)),))
    waiter.start()
    while not seen:
        waiter.join(0.01)
    assert seen == [(0, 5)]
    engine.gate.set()
    waiter.join(60)
    assert seen[-1] == (5, 5)


def test_flush_need_not_wait_for_ever(memory: Memory, engine: WatchedEngine) -> None:
    engine.gate.clear()
    say(memory, "slow")
    with pytest.raises(TimeoutError, match="1 facts"):
        memory.flush(timeout=0.05)
    engine.gate.set()
    memory.flush()


def test_flush_with_nothing_to_do_returns(memory: Memory) -> None:
    memory.flush()


def test_adding_waits_while_too_many_facts_wait(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "CAPACITY", 2)
    engine.gate.clear()
    say(memory, "under way")
    adder = threading.Thread(target=say, args=(memory, "one", "two", "three", "four", "five"))
    adder.start()
    adder.join(0.5)
    assert adder.is_alive()
    engine.gate.set()
    adder.join(60)
    assert not adder.is_alive()
    memory.flush()
    assert len(injected(memory.chat("?", **ADA, max_tokens=1))) == 6


def test_the_very_first_call_may_bring_more_facts_than_can_wait(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "CAPACITY", 2)
    say(memory, *(f"fact {number}" for number in range(7)))
    memory.flush(timeout=60)
    assert len(injected(memory.chat("?", **ADA, max_tokens=1))) == 7


def test_a_question_never_waits_for_room(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "CAPACITY", 2)
    engine.gate.clear()
    say(memory, "one", "two")
    assert len(texts(memory.chat("?", **ADA, max_tokens=1))) == 2


def test_blobs_lost_in_a_restart_are_encoded_again_on_first_recall(
    open_memory: OpenMemory, model: Path
) -> None:
    memory = open_memory()
    say(memory, "My cat is Miso", "I live in Porto")
    memory.flush()
    before = memory.chat("My cat?", **ADA, max_tokens=4)
    memory.close()
    with WatchedEngine(model, device="cpu") as engine:
        again = open_memory(engine=engine)
        first = again.chat("My cat?", **ADA, max_tokens=4)
        assert set(texts(first)) == {"My cat is Miso", "I live in Porto"}
        assert injected(first) == []
        again.flush()
        second = again.chat("My cat?", **ADA, max_tokens=4)
        assert set(injected(second)) == set(texts(first))
        assert second.completion.token_ids == before.completion.token_ids
        assert second.completion.injected_tokens == before.completion.injected_tokens
        again.close()


def test_blobs_that_outlive_the_restart_are_used_at_once(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory()
    say(memory, "My cat is Miso")
    memory.flush()
    memory.close()
    encoded = len(engine.encoded_facts)
    again = open_memory()
    assert injected(again.chat("My cat?", **ADA, max_tokens=2)) == ["My cat is Miso"]
    again.flush()
    assert len(engine.encoded_facts) == encoded


def test_what_waits_when_the_memory_is_closed_is_text_and_encoded_later(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory()
    engine.gate.clear()
    say(memory, "under way")
    say(memory, "still waiting")
    closer = threading.Thread(target=memory.close)
    closer.start()
    engine.gate.set()
    closer.join(60)
    again = open_memory()
    assert set(texts(again.chat("?", **ADA, max_tokens=1))) == {"under way", "still waiting"}
    again.flush()
    assert set(injected(again.chat("?", **ADA, max_tokens=1))) == {"under way", "still waiting"}


def test_another_model_makes_its_own_blobs(open_memory: OpenMemory, tmp_path: Path) -> None:
    from tests.models import tiny_model

    memory = open_memory()
    say(memory, "My cat is Miso")
    memory.flush()
    memory.close()
    with WatchedEngine(tiny_model("qwen2", tmp_path / "qwen"), device="cpu") as other:
        again = open_memory(engine=other)
        assert injected(again.chat("My cat?", **ADA, max_tokens=1)) == []
        again.flush()
        assert injected(again.chat("My cat?", **ADA, max_tokens=1)) == ["My cat is Miso"]
        again.close()


def test_a_fact_that_only_the_store_knows_is_found_and_encoded(memory: Memory, engine: WatchedEngine) -> None:
    """Another program wrote it, or the journal was lost."""
    payload = {"data": "I came from elsewhere", "user_id": "ada", "created_at": "2024-05-12"}
    vector = memory.embedding_model.embed(payload["data"])
    name = "11111111-1111-1111-1111-111111111111"
    memory.vector_store._inner.insert(vectors=[vector], payloads=[payload], ids=[name])
    assert texts(memory.chat("From where?", **ADA, max_tokens=1)) == ["I came from elsewhere"]
    memory.flush()
    assert injected(memory.chat("From where?", **ADA, max_tokens=1)) == ["I came from elsewhere"]


def test_words_that_changed_in_the_store_alone_are_never_injected_in_the_old_form(
    memory: Memory, engine: WatchedEngine
) -> None:
    [fact] = say(memory, "I live in Porto")
    memory.flush()
    payload = {**memory.vector_store.get(fact).payload, "data": "I live in Vienna"}
    vector = memory.embedding_model.embed("I live in Vienna")
    memory.vector_store._inner.update(fact, vector=vector, payload=payload)
    reply = memory.chat("Where?", **ADA, max_tokens=1)
    assert (texts(reply), injected(reply)) == (["I live in Vienna"], [])
    memory.flush()
    assert injected(memory.chat("Where?", **ADA, max_tokens=1)) == ["I live in Vienna"]


def test_an_engine_that_cannot_start_loses_no_fact(
    open_memory: OpenMemory, model: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    memory = open_memory(engine={"provider": "transformers", "model": broken})
    [fact] = say(memory, "I am safe")
    with pytest.raises(EngineError, match="broken"):
        memory.flush()
    memory.flush()
    assert memory.get(fact)["memory"] == "I am safe"


def test_an_engine_that_ends_under_way_is_told_by_flush(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(requests: object) -> None:
        raise EngineError("the engine ended")

    monkeypatch.setattr(engine, "encode", dies)
    say(memory, "one")
    with pytest.raises(EngineError, match="the engine ended"):
        memory.flush()
    monkeypatch.undo()
    assert texts(memory.chat("?", **ADA, max_tokens=1)) == ["one"]


def test_a_model_without_blobs_is_served_as_text(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_unsupported", "its attention is of another kind")
    say(memory, "one", "two")
    memory.flush()
    reply = memory.chat("?", **ADA, max_tokens=1)
    assert set(texts(reply)) == {"one", "two"}
    assert injected(reply) == []
    assert engine.encoded == []
    assert reply.completion.refused is None


def test_a_change_waits_for_no_room(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fact,) = say(memory, "I live in Porto")
    memory.flush()
    monkeypatch.setattr(encoder, "CAPACITY", 1)
    engine.gate.clear()
    say(memory, "under way")
    while core(memory).encoder._waiting:
        pass
    say(memory, "waiting")
    changing = threading.Thread(target=memory.update, args=(fact, "I live in Vienna"))
    changing.start()
    changing.join(20)
    waited = changing.is_alive()
    engine.gate.set()
    changing.join(20)
    assert not waited


@pytest.mark.parametrize("change", ["update", "delete", "delete_all", "expire"])
def test_a_change_waits_for_no_forward(memory: Memory, engine: WatchedEngine, change: str) -> None:
    (fact, *_) = say(memory, "I live in Porto", "My cat is Miso")
    memory.flush()
    calls = {
        "update": lambda: memory.update(fact, "I live in Vienna"),
        "delete": lambda: memory.delete(fact),
        "delete_all": lambda: memory.delete_all(**ADA),
        "expire": memory.expire,
    }
    changing = threading.Thread(target=calls[change])
    with engine._lock:  # as a forward holds it
        changing.start()
        changing.join(20)
        waited = changing.is_alive()
    changing.join(20)
    assert not waited


def test_closing_waits_for_one_encode_at_most(open_memory: OpenMemory, engine: WatchedEngine) -> None:
    memory = open_memory()
    say(memory, "first")
    memory.flush()
    before = len(engine.encoded_facts)
    closer = threading.Thread(target=memory.close)

    def close() -> None:
        engine.before_return = lambda: None
        closer.start()
        while not encoder_of._closed:
            pass

        stopped.set()

    encoder_of, stopped = core(memory).encoder, threading.Event()
    engine.before_return = close
    say(memory, *(f"fact {number}" for number in range(9)))
    assert stopped.wait(60)
    closer.join(60)
    assert len(engine.encoded_facts) == before + 1
    again = open_memory()
    assert len(again.get_all(filters=ADA)["results"]) == 10
    again.chat("Which fact?", **ADA, k=10, max_tokens=1)
    again.flush()
    assert len(injected(again.chat("Which fact?", **ADA, k=10, max_tokens=1))) == 10
