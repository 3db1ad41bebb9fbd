"""Facts encoded behind the nearest ones that were there before them."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale_memory.engine.base import EncodeRequest
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, BEN, injected, say
from tests.memory.watched import WatchedEngine

CATS = ("My cat is called Miso", "My cat is grey", "My cat sleeps on the radiator")


@pytest.fixture
def memory(open_memory: OpenMemory) -> Memory:
    return open_memory(injection={"neighbours": 2, "w": 0})


def encoded(engine: WatchedEngine, fact: str) -> str:
    """What the encode of `fact` held, as text: the last one that kept it."""
    found = [request for request in requests(engine) if fact in kept(engine, request)]
    return str(engine.tokenizer.decode(found[-1].ids))


def kept(engine: WatchedEngine, request: EncodeRequest) -> str:
    return str(
        engine.tokenizer.decode(
            [token for span in request.spans for token in request.ids[span.start : span.stop]]
        )
    )


def requests(engine: WatchedEngine) -> list[EncodeRequest]:
    return list(engine.encoded)


def test_a_fact_stands_behind_its_nearest_the_nearest_last(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, CATS[0])
    say(memory, "I moved to Porto in March")
    say(memory, CATS[1])
    say(memory, CATS[2])
    memory.flush()
    text = encoded(engine, CATS[2])
    assert text.index(CATS[0]) < text.index(CATS[2])
    assert text.index(CATS[1]) < text.index(CATS[2])
    assert "Porto" not in text
    reply = memory.chat("What about my cat?", **ADA, k=4, max_tokens=2)
    assert len(injected(reply)) == 4


def test_what_comes_later_changes_no_blob(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, CATS[0])
    memory.flush()
    before = len(requests(engine))
    say(memory, CATS[1])
    memory.flush()
    assert [CATS[0] in kept(engine, request) for request in requests(engine)[before:]].count(True) == 0
    assert CATS[1] not in encoded(engine, CATS[0])


def test_what_is_written_together_knows_only_what_stands_before_it(
    memory: Memory, engine: WatchedEngine
) -> None:
    say(memory, *CATS)
    memory.flush()
    for place, fact in enumerate(CATS):
        assert [other for other in CATS if other in encoded(engine, fact)] == list(CATS[: place + 1])


def test_neighbours_are_of_the_same_scope(open_memory: OpenMemory, engine: WatchedEngine) -> None:
    memory = open_memory(injection={"neighbours": 5, "w": 0})
    say(memory, "My cat is called Rex", **BEN)
    say(memory, "My cat is called Leo", user_id="ada", run_id="one")
    say(memory, CATS[0], user_id="ada", run_id="two")
    say(memory, CATS[1], user_id="ada", run_id="two")
    say(memory, CATS[2])
    memory.flush()
    for fact in CATS:
        assert "Rex" not in encoded(engine, fact)
    assert "Leo" not in encoded(engine, CATS[1]), "it does not carry every id of the fact"
    assert CATS[0] in encoded(engine, CATS[1])
    assert "Leo" in encoded(engine, CATS[2]), "it carries every id of that one"


def test_a_forgotten_neighbour_leaves_every_blob_that_held_it(memory: Memory, engine: WatchedEngine) -> None:
    [first] = say(memory, CATS[0])
    say(memory, CATS[1])
    memory.flush()
    assert CATS[0] in encoded(engine, CATS[1])
    memory.delete(first)
    memory.flush()
    assert CATS[0] not in encoded(engine, CATS[1])
    assert memory.audit(CATS[0]).clean
    assert injected(memory.chat("What about my cat?", **ADA, max_tokens=2)) == [CATS[1]]


def test_a_reworded_neighbour_is_read_anew(memory: Memory, engine: WatchedEngine) -> None:
    [first] = say(memory, CATS[0])
    say(memory, CATS[1])
    memory.flush()
    memory.update(first, "My cat is called Leo")
    memory.flush()
    assert "Miso" not in encoded(engine, CATS[1])
    assert "Leo" in encoded(engine, CATS[1])


def test_turns_stand_before_neighbours_and_nothing_twice(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory(injection={"neighbours": 3, "w": 1})
    say(memory, CATS[0], at="2024-01-01")
    say(memory, "I moved to Porto", CATS[1], at="2024-05-01")
    memory.flush()
    text = encoded(engine, CATS[1])
    assert text.index("Porto") < text.index(CATS[0]) < text.index(CATS[1])
    assert text.count("Porto") == 1


def test_what_does_not_fit_is_left_out_from_the_front(open_memory: OpenMemory, engine: WatchedEngine) -> None:
    memory = open_memory(injection={"neighbours": 8, "w": 0})
    long = [f"My cat said {word} " + "meow " * 1200 for word in ("one", "two", "three")]
    for text in long:
        say(memory, text)
    say(memory, CATS[0])
    memory.flush()
    request = next(request for request in requests(engine) if CATS[0] in kept(engine, request))
    assert len(request.ids) <= engine.max_model_len
    assert CATS[0] in injected(memory.chat("What about my cat?", **ADA, k=1, max_tokens=2))[0]


def test_an_embedder_that_is_away_costs_the_neighbours_alone(
    memory: Memory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(text: str, memory_action: Any = None) -> Any:
        if memory_action == "search":
            raise ConnectionError("away")
        return own(text, memory_action)

    own = memory.embedding_model.embed
    monkeypatch.setattr(memory.embedding_model, "embed", away)
    say(memory, CATS[0])
    say(memory, CATS[1])
    memory.flush()
    assert CATS[0] not in encoded(engine, CATS[1])
    monkeypatch.undo()
    assert set(injected(memory.chat("What about my cat?", **ADA, max_tokens=2))) == set(CATS[:2])


def test_a_count_that_is_none_is_refused(open_memory: OpenMemory) -> None:
    for bad in (-1, 2.5, True):
        options: dict[str, Any] = {"neighbours": bad}
        with pytest.raises(ConfigurationError, match=r"injection.neighbours is"):
            open_memory(injection=options)
