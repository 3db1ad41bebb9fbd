"""A memory that fits a budget is taken whole: all of it stands in the prompt, and injecting it is exact."""

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
from tests.memory.watched import WatchedEngine

FACTS = [
    "My cat is called Miso",
    "I moved to Porto in March",
    "My sister plays the cello",
    "The bakery below us opens at six",
    "I cannot eat walnuts",
    "Ben lent me his red bicycle",
]
QUESTION = "What should the caterer know?"


@pytest.fixture
def memory(open_memory: OpenMemory) -> Memory:
    return open_memory(injection={"full_memory_tokens": 1000})


def asked(memory: Memory, *, inject: bool = True, **options: Any) -> Reply:
    sampling = SamplingOptions(logprobs=20)
    reply: Reply = memory.chat(QUESTION, **ADA, max_tokens=2, inject=inject, options=sampling, **options)
    return reply


def test_all_of_it_is_injected_in_the_order_written_and_exact(memory: Memory, engine: WatchedEngine) -> None:
    for fact in FACTS[:3]:
        say(memory, fact)
    say(memory, *FACTS[3:])
    memory.flush()
    reply, text = asked(memory), asked(memory, inject=False)
    assert set(injected(reply)) == set(FACTS)
    assert reply.completion.injected_tokens > 0
    assert text.completion.injected_tokens == 0
    prompt = engine.tokenizer.decode(engine.asked[-1][0].ids)
    assert [prompt.index(fact) for fact in FACTS] == sorted(prompt.index(fact) for fact in FACTS)
    assert apart(reply, text) < CLOSE


def test_otherwise_it_is_not_exact(open_memory: OpenMemory) -> None:
    """The control: else the test above proves nothing."""
    memory = open_memory(injection={"neighbours": 0})
    say(memory, *FACTS)
    memory.flush()
    assert set(injected(asked(memory))) == set(FACTS)
    assert apart(asked(memory), asked(memory, inject=False)) > APART


def test_a_new_fact_costs_its_own_tokens(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, *FACTS[:5])
    memory.flush()
    say(memory, FACTS[5])
    memory.flush()
    request = engine.encoded[-1]
    assert len(request.base) == 1 + 5
    assert request.spans[0].start == request.base_tokens


def test_what_is_forgotten_is_encoded_around(memory: Memory, engine: WatchedEngine) -> None:
    ids = [say(memory, fact)[0] for fact in FACTS]
    memory.flush()
    memory.delete(ids[2])
    memory.update(ids[3], "The bakery below us opens at seven")
    memory.flush()
    assert memory.audit(FACTS[2]).clean
    reply = asked(memory)
    assert len(injected(reply)) == 5
    assert apart(reply, asked(memory, inject=False)) < CLOSE


def test_beyond_the_budget_a_question_is_searched(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"full_memory_tokens": 120, "top_k": 2})
    say(memory, *FACTS[:2])
    memory.flush()
    assert len(texts(asked(memory))) == 2
    say(memory, *FACTS[2:], *(f"I have a plant, it is number {number}" for number in range(20)))
    memory.flush()
    assert len(injected(asked(memory))) == 2, "the two nearest"


def test_a_call_that_says_which_or_how_many_is_searched(memory: Memory) -> None:
    say(memory, *FACTS)
    memory.flush()
    assert len(texts(asked(memory, k=2))) == 2
    assert texts(asked(memory, filters={"role": "nobody"})) == []
    assert len(texts(asked(memory))) == 6


def test_nobody_elses_and_nothing_expired(memory: Memory) -> None:
    say(memory, *FACTS[:2])
    say(memory, FACTS[2], **BEN)
    yesterday = (date.today() - timedelta(days=2)).isoformat()
    memory.add([{"role": "user", "content": FACTS[3]}], infer=False, expiration_date=yesterday, **ADA)
    memory.flush()
    assert set(texts(asked(memory))) == set(FACTS[:2])


def test_both_faces_and_sessions_take_it_whole(open_face: OpenFace) -> None:
    memory = open_face(injection={"full_memory_tokens": 1000, "top_k": 1})
    memory.add([{"role": "user", "content": fact} for fact in FACTS], infer=False, **ADA)
    memory.flush()
    assert set(texts(memory.chat(QUESTION, **ADA, max_tokens=2))) == set(FACTS)
    session = memory.session(**ADA)
    assert set(texts(memory.chat(QUESTION, session=session, max_tokens=2))) == set(FACTS)


def test_whatever_the_order_of_dates(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"full_memory_tokens": 1000, "order": "chronological"})
    for fact, year in zip(FACTS, (2024, 2021, 2026, 2020, 2025, 2022), strict=True):
        say(memory, fact, at=f"{year}-01-01")
    memory.flush()
    assert len(injected(asked(memory))) == 6
    assert apart(asked(memory), asked(memory, inject=False)) < CLOSE


def test_expired_ones_hide_nothing(memory: Memory) -> None:
    yesterday = (date.today() - timedelta(days=2)).isoformat()
    for number in range(90):
        memory.add(f"The offer number {number}", infer=False, expiration_date=yesterday, **ADA)
    say(memory, *FACTS[:2])
    assert set(texts(asked(memory))) == set(FACTS[:2])


def test_expired_ones_that_fill_the_listing_leave_it_to_the_search(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"full_memory_tokens": 100})
    say(memory, FACTS[0])
    yesterday = (date.today() - timedelta(days=2)).isoformat()
    for number in range(40):
        memory.add(f"The offer number {number}", infer=False, expiration_date=yesterday, **ADA)
    assert texts(asked(memory)) == [FACTS[0]]


def test_blobs_from_before_are_made_anew(open_memory: OpenMemory, engine: WatchedEngine) -> None:
    """It is turned on over a memory whose blobs the engine has, made behind neighbours."""
    before = open_memory(injection={"neighbours": 2})
    say(before, *FACTS)
    before.flush()
    before.close()
    memory = open_memory(injection={"full_memory_tokens": 1000})
    assert injected(asked(memory)) == [], "none of them is part of a chain"
    memory.flush()
    assert set(injected(asked(memory))) == set(FACTS)
    assert apart(asked(memory), asked(memory, inject=False)) < CLOSE
    many = len(engine.encoded)
    memory.flush()
    asked(memory)
    memory.flush()
    assert len(engine.encoded) == many, "once"


def test_a_memory_that_has_shrunk_is_exact_again(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"full_memory_tokens": 150, "neighbours": 2})
    ids = say(memory, *FACTS, *(f"I have a plant, it is number {number}" for number in range(8)))
    memory.flush()
    for name in ids[6:]:
        memory.delete(name)
    for name in ids[:2]:
        memory.delete(name)
    for _ in range(2):
        asked(memory)
        memory.flush()
    assert len(injected(asked(memory))) == 4
    assert apart(asked(memory), asked(memory, inject=False)) < CLOSE


def test_what_is_forgotten_costs_what_stands_on_it_its_own_tokens(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    """More facts than are encoded in one batch: they are taken in the order in which they were written."""
    memory = open_memory(injection={"full_memory_tokens": 4000})
    ids = say(memory, *(f"I have a plant, number {number}" for number in range(70)))
    memory.flush()
    many = len(engine.encoded)
    memory.delete(ids[0])
    memory.flush()
    again = engine.encoded[many:]
    computed = sum(len(request.ids) - request.base_tokens for request in again)
    own = sum(span.stop - span.start for request in again for span in request.spans)
    assert len(again) == 69
    assert computed < 1.2 * own
    assert apart(asked(memory), asked(memory, inject=False)) < CLOSE


def test_a_k_of_none_is_not_asked(open_memory: OpenMemory) -> None:
    memory = open_memory(injection={"full_memory_tokens": 1000, "top_k": 0})
    say(memory, *FACTS)
    assert len(Chat(memory=memory).recall(QUESTION, ADA)) == 6
    assert Chat(memory=memory).recall(QUESTION, ADA, k=0) == []


def test_a_budget_that_is_none_is_refused(open_memory: OpenMemory) -> None:
    with pytest.raises(ConfigurationError, match=r"injection.full_memory_tokens must be"):
        open_memory(injection={"full_memory_tokens": -1})
