"""Memories that an app has pinned stand in every prompt of their scope, in front of what is recalled."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.memory import Memory, Reply
from inferscale_memory.memory.chat import Chat
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.saying import ADA, APART, BEN, CLOSE, apart, injected, say, texts
from tests.memory.stores import STORES
from tests.memory.watched import WatchedEngine

PINNED = ["Ada cannot eat walnuts", "Ada speaks Portuguese", "Ada is a night nurse"]
OTHERS = ["My cat is called Miso", "My cat sleeps on the radiator", "The bakery below us opens at six"]
QUESTION = "What does my cat do?"


@pytest.fixture
def memory(open_memory: OpenMemory) -> Memory:
    return open_memory(injection={"pinned": "pinned"})


def pin(memory: Any, *facts: str, mark: Any = True, **options: Any) -> list[str]:
    """Add facts whose metadata says `pinned`; their ids."""
    ids = {name: options.pop(name) for name in ("user_id", "agent_id", "run_id") if name in options} or ADA
    found = []
    for fact in facts:
        message = [{"role": "user", "content": fact}]
        added = memory.add(message, infer=False, metadata={"pinned": mark}, **ids, **options)
        found += [result["id"] for result in added["results"]]
    return found


def asked(memory: Any, *, inject: bool = True, question: str = QUESTION, **options: Any) -> Reply:
    sampling = SamplingOptions(logprobs=20)
    reply: Reply = memory.chat(question, **{**ADA, **options}, max_tokens=2, inject=inject, options=sampling)
    return reply


def order(engine: WatchedEngine) -> list[str]:
    """The facts of the last prompt as they stand in it."""
    prompt = engine.tokenizer.decode(engine.asked[-1][0].ids)
    return sorted((fact for fact in (*PINNED, *OTHERS) if fact in prompt), key=prompt.index)


def encoded(engine: WatchedEngine, fact: str) -> str:
    """What the last encode that kept `fact` held, as text."""
    found = [
        request
        for request in engine.encoded
        for span in request.spans
        if fact in str(engine.tokenizer.decode(request.ids[span.start : span.stop]))
    ]
    return str(engine.tokenizer.decode(found[-1].ids))


def test_they_stand_in_front_as_they_were_written_and_the_k_behind_them(
    memory: Memory, engine: WatchedEngine
) -> None:
    pin(memory, PINNED[0])
    say(memory, *OTHERS)
    pin(memory, *PINNED[1:])
    memory.flush()
    reply = asked(memory, k=2)
    assert order(engine) == [*PINNED, OTHERS[1], OTHERS[0]]
    assert set(injected(reply)) == {*PINNED, *OTHERS[:2]}
    assert texts(reply) == [*PINNED, OTHERS[0], OTHERS[1]], "the first written, then the most relevant"
    assert len(texts(asked(memory))) == 6, "each stands once"


def test_one_that_is_the_nearest_takes_nobodys_place(memory: Memory, engine: WatchedEngine) -> None:
    pin(memory, *PINNED, *(f"{fact} now" for fact in PINNED))
    say(memory, *OTHERS)
    memory.flush()
    reply = asked(memory, question="What can Ada not eat? Does Ada speak Portuguese?", k=1)
    assert len(texts(reply)) == 7
    assert texts(reply)[6] in OTHERS


def test_near_pinned_ones_leave_room_for_other_neighbours(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory(injection={"pinned": "pinned", "neighbours": 1})
    pin(memory, "My cat sleeps on the radiator too", "My cat sleeps on the bed")
    say(memory, OTHERS[0])
    say(memory, OTHERS[1])
    memory.flush()
    text = str(engine.tokenizer.decode(engine.encoded[-1].ids))
    assert OTHERS[1] in text
    assert OTHERS[0] in text


def test_alone_they_are_exact(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"pinned": "pinned", "top_k": 0})
    say(memory, *OTHERS)
    pin(memory, *PINNED)
    memory.flush()
    reply = asked(memory)
    assert set(injected(reply)) == set(PINNED)
    assert reply.completion.injected_tokens > 0
    assert apart(reply, asked(memory, inject=False)) < CLOSE


def test_they_are_exact_whatever_was_said_before_them(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"pinned": "pinned", "top_k": 0, "context_turns": 2})
    for number, fact in enumerate(PINNED):
        said = [{"role": "user", "content": text} for text in (OTHERS[number], fact)]
        [other, one] = memory.add(said, infer=False, timestamp="2024-05-12T10:00:00", **ADA)["results"]
        memory.update(one["id"], metadata={"pinned": True})
        assert other["memory"] == OTHERS[number]
    memory.flush()
    for number in range(3):
        memory.update(asked(memory).memories[number].id, f"{PINNED[number]}, still")  # encoded anew, pinned
    memory.flush()
    reply = asked(memory)
    assert injected(reply) == [f"{fact}, still" for fact in PINNED]
    assert apart(reply, asked(memory, inject=False)) < CLOSE


def test_otherwise_they_are_not(open_memory: OpenMemory) -> None:
    """The control: else the test above proves nothing."""
    memory = open_memory(injection={"neighbours": 0})
    pin(memory, *PINNED)
    memory.flush()
    assert set(injected(asked(memory))) == set(PINNED)
    assert apart(asked(memory), asked(memory, inject=False)) > APART


def test_what_is_written_later_is_encoded_behind_them(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, OTHERS[0])
    pin(memory, *PINNED)
    memory.flush()
    say(memory, OTHERS[1])
    memory.flush()
    request = engine.encoded[-1]
    text = str(engine.tokenizer.decode(request.ids))
    assert [fact for fact in (*PINNED, *OTHERS) if fact in text] == [*PINNED, *OTHERS[:2]]
    assert max(text.index(fact) for fact in PINNED) < text.index(OTHERS[0]) < text.index(OTHERS[1])
    assert len(request.base) == 1 + 4, "from their blobs"
    assert request.spans[0].start == request.base_tokens
    assert OTHERS[0] not in encoded(engine, PINNED[1]), "before a pinned one stands no other"


def test_one_that_is_forgotten_or_unpinned(memory: Memory, engine: WatchedEngine) -> None:
    ids = pin(memory, *PINNED)
    say(memory, *OTHERS)
    memory.flush()
    memory.delete(ids[0])
    memory.update(ids[1], metadata={"pinned": False})
    memory.flush()
    assert memory.audit(PINNED[0]).clean
    reply = asked(memory, k=1)
    assert [text for text in texts(reply) if text in PINNED] == [PINNED[2]]
    assert set(injected(reply)) == set(texts(reply))
    assert PINNED[0] not in str(engine.tokenizer.decode(engine.encoded[-1].ids))


def test_only_what_is_true_is_pinned(memory: Memory) -> None:
    pin(memory, PINNED[0], mark="no")
    pin(memory, PINNED[1], mark=False)
    pin(memory, PINNED[2])
    say(memory, *OTHERS)
    assert [text for text in texts(asked(memory, k=1)) if text in PINNED] == [PINNED[2]]


def test_nobody_elses_and_nothing_expired(memory: Memory, engine: WatchedEngine) -> None:
    pin(memory, PINNED[0], **BEN)
    yesterday = (date.today() - timedelta(days=2)).isoformat()
    pin(memory, PINNED[1], expiration_date=yesterday)
    pin(memory, PINNED[2])
    say(memory, *OTHERS)
    memory.flush()
    assert [text for text in texts(asked(memory, k=1)) if text in PINNED] == [PINNED[2]]
    for request in engine.encoded:
        if request.owner == "user:ada":
            assert PINNED[0] not in str(engine.tokenizer.decode(request.ids))


def test_a_call_that_wants_nothing_or_says_what_is_marked(memory: Memory) -> None:
    pin(memory, *PINNED)
    say(memory, *OTHERS)
    assert texts(asked(memory, k=0)) == []
    assert set(texts(asked(memory, filters={"pinned": False}))) == set()
    assert set(texts(asked(memory, filters={"role": "nobody"}))) == set(), "they pass the filters too"
    either = {"OR": [{"role": "nobody"}, {"role": "user"}]}
    assert texts(asked(memory, filters=either, k=1))[:3] == PINNED
    assert texts(asked(memory, filters={"role": {"ne": "user"}})) == []
    chat = Chat(memory=memory)
    assert chat.recall(QUESTION, ADA, k=0) == []
    assert [row["memory"] for row in chat.recall(QUESTION, ADA, k=1)][:3] == PINNED


def test_of_more_than_fit_the_first_written_stay(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch, engine: WatchedEngine
) -> None:
    memory = open_memory(injection={"pinned": "pinned", "top_k": 1, "max_memory_tokens": 75, "neighbours": 0})
    pin(memory, *PINNED)
    say(memory, *OTHERS)
    memory.flush()
    reply = asked(memory)
    assert texts(reply) == PINNED[:2]
    assert [memory.text for memory in reply.dropped] == [PINNED[2], OTHERS[0]]
    monkeypatch.setattr("inferscale_memory.facts.pinned.MOST", 1)
    assert texts(asked(memory))[0] == PINNED[0]
    assert PINNED[1] not in texts(asked(memory))
    say(memory, "I like rain")
    memory.flush()
    text = str(engine.tokenizer.decode(engine.encoded[-1].ids))
    assert [fact for fact in PINNED if fact in text] == PINNED[:1]


def test_pinned_for_a_run_they_are_in_front_there_alone(memory: Memory, engine: WatchedEngine) -> None:
    pin(memory, PINNED[0], user_id="ada", run_id="one")
    pin(memory, PINNED[1])
    say(memory, OTHERS[0], user_id="ada", run_id="two")
    say(memory, OTHERS[1], user_id="ada", run_id="one")
    memory.flush()
    assert texts(asked(memory, run_id="two")) == [OTHERS[0]]
    assert texts(asked(memory, run_id="one")) == [PINNED[0], OTHERS[1]]
    assert texts(asked(memory))[:2] == PINNED[:2]
    assert PINNED[0] not in encoded(engine, OTHERS[0])
    assert PINNED[0] in encoded(engine, OTHERS[1])
    assert PINNED[1] not in encoded(engine, OTHERS[1]), "it does not carry the run"


def test_a_session_keeps_to_the_budget(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"max_memory_tokens": 75, "top_k": 20})
    say(memory, *PINNED, *OTHERS)
    memory.flush()
    session = memory.session(**ADA)
    first = memory.chat(QUESTION, session=session, max_tokens=2)
    assert 0 < len(first.memories) < 6
    for question in (QUESTION, "When does the bakery open?", QUESTION):
        reply = memory.chat(question, session=session, max_tokens=2)
        assert texts(reply) == texts(first), "there is no room for more"
        assert {memory.id for memory in reply.dropped}.isdisjoint(memory.id for memory in reply.memories)
        assert len(reply.dropped) == 6 - len(first.memories)
    assert len(texts(memory.chat("When does the bakery open?", **ADA, max_tokens=2))) == len(first.memories)


def test_a_store_that_compares_loosely_pins_nothing_else(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = memory.vector_store.list
    loose = lambda filters=None, top_k=None: own({"user_id": "ada"}, top_k)  # noqa: E731
    monkeypatch.setattr(memory.vector_store, "list", loose)
    pin(memory, PINNED[0])
    say(memory, *OTHERS)
    say(memory, "I like rain", user_id="ada", run_id="one")
    memory.flush()
    assert [text for text in texts(asked(memory, k=1)) if text != OTHERS[0]] == PINNED[:1]
    assert PINNED[0] not in encoded(engine, "I like rain"), "it does not carry the run"


def test_a_chat_that_recalls_nothing_else(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"pinned": "pinned", "top_k": 0})
    pin(memory, *PINNED)
    say(memory, *OTHERS)
    assert [row["memory"] for row in Chat(memory=memory).recall(QUESTION, ADA)] == PINNED


def test_they_are_left_out_last_and_never_moved(open_memory: OpenMemory, engine: WatchedEngine) -> None:
    memory = open_memory(injection={"pinned": "pinned", "max_memory_tokens": 100, "text_last": 2})
    say(memory, *OTHERS)
    pin(memory, *PINNED)
    memory.flush()
    reply = asked(memory)
    assert order(engine)[:3] == PINNED
    assert set(injected(reply)) == set(PINNED)
    assert len(texts(reply)) + len(reply.dropped) == 6
    assert not {memory.text for memory in reply.dropped} & set(PINNED)


@pytest.mark.parametrize("store", STORES)
def test_over_every_store_and_both_faces(open_face: OpenFace, store: str) -> None:
    memory = open_face(injection={"pinned": "core", "top_k": 1}, vector_store={"provider": store, "config": {}})
    message = [{"role": "user", "content": PINNED[0]}]
    memory.add(message, infer=False, metadata={"core": True}, **ADA)
    memory.add([{"role": "user", "content": fact} for fact in OTHERS], infer=False, **ADA)
    memory.flush()
    reply = asked(memory)
    assert [text for text in texts(reply) if text in PINNED] == PINNED[:1]
    assert len(texts(reply)) == 2
    assert set(injected(reply)) == set(texts(reply))
    session = memory.session(**ADA)
    assert PINNED[0] in texts(memory.chat(QUESTION, session=session, max_tokens=2))


def test_a_store_that_cannot_list_them_costs_the_chain_alone(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(memory, PINNED[0])
    memory.flush()

    def away(*args: Any, **options: Any) -> Any:
        raise ConnectionError("away")

    monkeypatch.setattr(memory.vector_store, "list", away)
    say(memory, OTHERS[0])
    memory.flush()
    monkeypatch.undo()
    assert set(injected(asked(memory, k=1))) == {PINNED[0], OTHERS[0]}


@pytest.mark.parametrize("mark", [True, None, "user_id"])
def test_a_mark_is_the_name_of_a_key(open_memory: OpenMemory, mark: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"injection\.pinned"):
        open_memory(injection={"pinned": mark})
