"""Facts encoded behind the nearest ones that were there before them."""

from __future__ import annotations

from typing import Any

import pytest

from inferscale_memory.engine.base import EncodeRequest
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.kv.key import blob_key
from inferscale_memory.memory import Memory
from inferscale_memory.write.plan import NEIGHBOUR_TOKENS
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, BEN, injected, say
from tests.memory.watched import WatchedEngine

CATS = ("My cat is called Miso", "My cat is grey", "My cat sleeps on the radiator")


@pytest.fixture
def memory(open_memory: OpenMemory) -> Memory:
    return open_memory(injection={"neighbours": 2, "context_turns": 0})


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
    memory = open_memory(injection={"neighbours": 5, "context_turns": 0})
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


def test_turns_stand_behind_neighbours_and_nothing_twice(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory(injection={"neighbours": 3, "context_turns": 1})
    say(memory, CATS[0], at="2024-01-01")
    say(memory, "I moved to Porto", CATS[1], at="2024-05-01")
    memory.flush()
    text = encoded(engine, CATS[1])
    assert text.index(CATS[0]) < text.index("Porto") < text.index(CATS[1])
    assert text.count("Porto") == 1


def test_what_does_not_fit_is_left_out_from_the_front(open_memory: OpenMemory, engine: WatchedEngine) -> None:
    memory = open_memory(injection={"neighbours": 8, "context_turns": 0})
    long = [f"My cat said {word} " + "meow " * 1200 for word in ("one", "two", "three")]
    for text in long:
        say(memory, text)
    say(memory, CATS[0])
    memory.flush()
    request = next(request for request in requests(engine) if CATS[0] in kept(engine, request))
    assert len(request.ids) <= engine.max_model_len
    assert CATS[0] in injected(memory.chat("What about my cat?", **ADA, k=1, max_tokens=2))[0]


def test_long_facts_have_few_neighbours(open_memory: OpenMemory, engine: WatchedEngine) -> None:
    """Or their encodes would take several times what their prefill takes."""
    memory = open_memory(injection={"neighbours": 8})
    long = [f"On day {number}" + " we walked along the river and" * 6 for number in range(6)]
    say(memory, *long)
    memory.flush()
    requested = {
        fact: next(request for request in requests(engine) if fact in kept(engine, request)) for fact in long
    }
    sizes = [sum(span.stop - span.start for span in requested[fact].spans) for fact in long]
    assert sum(sizes[:-1]) > NEIGHBOUR_TOKENS > max(sizes), "all before the last are too many, one is not"
    held = len(requested[long[-1]].ids) - sizes[-1] - (len(requested[long[0]].ids) - sizes[0])
    assert max(sizes) / 2 < held <= NEIGHBOUR_TOKENS


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


# -- standing on blobs ---


def test_neighbours_that_have_blobs_are_injected_and_only_the_fact_is_computed(
    memory: Memory, engine: WatchedEngine
) -> None:
    say(memory, CATS[0])
    say(memory, CATS[1])
    memory.flush()
    request = of(engine, CATS[1])
    preamble, below = request.base
    assert below.key == key(memory, CATS[0])
    assert request.spans[0].start == request.base_tokens == preamble.tokens + below.tokens
    assert key(memory, CATS[1]) == blob_key(
        b"",
        engine.fingerprint,
        "user:ada",
        request.ids[: request.base_tokens],
        request.ids[request.base_tokens :],
        [(ref.key, ref.tokens) for ref in request.base],
    )


def test_of_facts_written_together_those_go_first_that_others_stand_on(
    memory: Memory, engine: WatchedEngine
) -> None:
    say(memory, *CATS)
    memory.flush()
    assert [len(of(engine, fact).base) for fact in CATS] == [0, 2, 3]
    assert {ref.key for ref in of(engine, CATS[2]).base[1:]} == {key(memory, CATS[0]), key(memory, CATS[1])}


def test_a_neighbour_whose_blob_is_gone_is_prefilled(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, CATS[0])
    memory.flush()
    TransformersEngine.forget(engine, "user:ada", [key(memory, CATS[0])])  # as eviction would: nobody is told
    say(memory, CATS[1])
    memory.flush()
    assert of(engine, CATS[1]).base == ()
    assert CATS[0] in encoded(engine, CATS[1])
    assert CATS[1] in injected(memory.chat("What about my cat?", **ADA, k=1, max_tokens=2))[0]


def test_what_goes_into_a_fact_through_others_is_forgotten_too(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    """With one neighbour each, the facts are a pile: the first is in all of them, and in the prompt of one."""
    memory = open_memory(injection={"neighbours": 1, "context_turns": 0})
    facts = [*CATS, "My cat is called Miso and sleeps"]
    [first, *_] = [say(memory, fact)[0] for fact in facts]
    memory.flush()
    under = {key(memory, facts[0])}
    tainted = {}
    for fact in facts[1:]:
        if under & {ref.key for ref in of(engine, fact).base}:
            under.add(key(memory, fact))
            tainted[fact] = key(memory, fact)
    assert len(tainted) == 3, "every one stands on the first, be it through others"
    assert any(facts[0] not in encoded(engine, fact) for fact in tainted), (
        "one of them does so through others"
    )
    memory.delete(first)
    memory.flush()
    assert engine.at_hand("user:ada", [*under]) == set()
    assert {fact: key(memory, fact) for fact in tainted}.keys() == set(facts[1:])
    assert not set(tainted.values()) & {key(memory, fact) for fact in tainted}
    assert len(injected(memory.chat("What about my cat?", **ADA, max_tokens=2))) == 3


def test_a_fact_is_encoded_again_on_what_is_there_then(memory: Memory, engine: WatchedEngine) -> None:
    """All blobs are lost, as after a restart: what is recalled is encoded behind its neighbours, read again."""
    say(memory, *CATS)
    memory.flush()
    TransformersEngine.forget(engine, "user:ada", [key(memory, fact) for fact in CATS])
    for _ in range(2):  # the first finds out that they are gone, the second asks for them
        assert injected(memory.chat("What about my cat?", **ADA, max_tokens=2)) == []
    memory.flush()
    reply = memory.chat("What about my cat?", **ADA, max_tokens=2)
    assert set(injected(reply)) == set(CATS)


def of(engine: WatchedEngine, fact: str) -> EncodeRequest:
    """The last encode that kept `fact`."""
    return [request for request in requests(engine) if fact in kept(engine, request)][-1]


def key(memory: Memory, fact: str) -> str:
    """The blob key of the fact that says this."""
    core = memory._core
    names = core.journal.facts.in_scopes(lambda scope: True)
    [name] = [name for name, known in core.journal.facts.get(names).items() if known.text == fact]
    return core.journal.ledger.get([name], core.engine.get().fingerprint)[name].key


def test_a_count_that_is_none_is_refused(open_memory: OpenMemory) -> None:
    for bad in (-1, 2.5, True):
        options: dict[str, Any] = {"neighbours": bad}
        with pytest.raises(ConfigurationError, match=r"injection.neighbours must be"):
            open_memory(injection=options)
