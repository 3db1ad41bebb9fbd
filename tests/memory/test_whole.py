"""A memory that fits a budget is taken whole: all of it stands in the prompt, and injecting it is exact."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.memory import Memory, Reply
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.saying import ADA, BEN, injected, say, texts
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
CLOSE, APART = 1e-4, 1e-3
"""Log-probabilities, float32."""


@pytest.fixture
def memory(open_memory: OpenMemory) -> Memory:
    return open_memory(injection={"whole": 1000})


def asked(memory: Memory, *, inject: bool = True, **options: Any) -> Reply:
    sampling = SamplingOptions(logprobs=20)
    reply: Reply = memory.chat(QUESTION, **ADA, max_tokens=2, inject=inject, options=sampling, **options)
    return reply


def apart(one: Reply, other: Reply) -> float:
    """Largest difference of the first token's log-probabilities."""
    mine, theirs = ((reply.completion.logprobs or ({},))[0] for reply in (one, other))
    common = mine.keys() & theirs.keys()
    assert len(common) >= 10
    return max(abs(mine[token] - theirs[token]) for token in common)


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
    memory = open_memory(injection={"whole": 120, "k": 2})
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
    memory = open_face(injection={"whole": 1000, "k": 1})
    memory.add([{"role": "user", "content": fact} for fact in FACTS], infer=False, **ADA)
    memory.flush()
    assert set(texts(memory.chat(QUESTION, **ADA, max_tokens=2))) == set(FACTS)
    session = memory.session(**ADA)
    assert set(texts(memory.chat(QUESTION, session=session, max_tokens=2))) == set(FACTS)


def test_a_budget_that_is_none_is_refused(open_memory: OpenMemory) -> None:
    with pytest.raises(ConfigurationError, match=r"injection.whole is"):
        open_memory(injection={"whole": -1})
