"""Memories that say the same words are recalled once, and the places of the others go to what is relevant next."""

from __future__ import annotations

from typing import Any

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, BEN, CLOSE, MAY, apart, injected, say, texts
from tests.memory.watched import WatchedEngine

CAT, RADIATOR, TEA = "My cat is called Miso", "My cat sleeps on the radiator", "I prefer tea over coffee"
QUESTION = "What is my cat called?"
JUNE = "2024-06-01T10:00:00"


def keep(memory: Any, text: str, *, at: str = MAY, **ids: str) -> str:
    [added] = memory.add(text, infer=False, timestamp=at, **(ids or ADA))["results"]
    return str(added["id"])


def recalled(memory: Any, **options: Any) -> list[str]:
    prepared = memory.prepare(QUESTION, **{**ADA, "max_tokens": 2, **options})
    return [one.text for one in prepared.memories]


def test_the_places_of_repeats_go_to_the_next(either: Settled) -> None:
    for text in (CAT, RADIATOR, CAT, TEA, CAT):
        keep(either, text)
    assert sorted(recalled(either, k=3)) == sorted([CAT, RADIATOR, TEA])
    reply = either.chat(QUESTION, **ADA, k=2, max_tokens=2)
    assert [memory.text for memory in reply.memories] == [CAT, RADIATOR]


def test_mem0s_own_functions_find_and_count_all_of_them(either: Settled) -> None:
    for _ in range(3):
        keep(either, CAT)
    assert len(either.get_all(filters=ADA)["results"]) == 3
    assert len(either.search(QUESTION, filters=ADA)["results"]) == 3


def test_however_often_it_was_said_the_others_are_found(memory: Memory) -> None:
    say(memory, TEA, RADIATOR, *([CAT] * 90))
    assert sorted(recalled(memory, k=3)) == sorted([CAT, RADIATOR, TEA])
    assert recalled(memory, k=1) == [CAT]


def test_white_space_makes_no_other_text_and_case_does(memory: Memory) -> None:
    say(memory, CAT, f"  {CAT}\n", CAT.replace(" ", "  "), CAT.upper())
    assert len(recalled(memory)) == 2


def test_the_latest_day_stands_and_of_one_day_the_first(memory: Memory) -> None:
    keep(memory, CAT, at=MAY)
    june = keep(memory, CAT, at=JUNE)
    keep(memory, CAT, at="2024-06-01T22:00:00")
    [one] = memory.prepare(QUESTION, **ADA).memories
    assert one.id == june


def test_two_people_who_say_the_same_are_two_facts(memory: Memory) -> None:
    messages = [{"role": "user", "content": TEA, "name": name} for name in ("Ada", "Ben")]
    memory.add(messages, infer=False, run_id="party")
    assert len(memory.prepare(QUESTION, run_id="party").memories) == 2


def test_one_who_says_it_in_two_conversations_has_one(memory: Memory) -> None:
    for run in ("one", "two"):
        memory.add(TEA, infer=False, user_id="ada", run_id=run)
    assert recalled(memory) == [TEA]


def test_another_owner_has_his_own(memory: Memory) -> None:
    for who in (ADA, BEN, ADA):
        keep(memory, CAT, **who)
    assert recalled(memory) == recalled(memory, **BEN) == [CAT]


def test_results_that_an_app_hands_in_stand_once(memory: Memory) -> None:
    for _ in range(3):
        keep(memory, CAT)
    found = memory.search(QUESTION, filters=ADA)["results"]
    assert recalled(memory, memories=found) == [CAT]


def test_a_conversation_shows_it_once(memory: Memory, engine: WatchedEngine) -> None:
    keep(memory, CAT)
    talk = memory.session(**ADA, sticky=True)
    for _ in range(3):
        talk.chat(QUESTION, options=SamplingOptions(max_tokens=2))
        keep(memory, CAT)
    prompt = engine.tokenizer.decode(engine.asked[-1][0].ids)
    assert prompt.count(CAT) == 1


def test_what_is_deleted_leaves_its_repeat(memory: Memory) -> None:
    first, _ = say(memory, CAT, CAT)
    memory.delete(first)
    assert recalled(memory) == [CAT]


class TestTakenWhole:
    """Everything stands in the prompt, and injecting it stays exact."""

    def asked(self, memory: Memory, *, inject: bool = True) -> Any:
        sampling = SamplingOptions(logprobs=20)
        return memory.chat(QUESTION, **ADA, max_tokens=2, inject=inject, options=sampling)

    def check(self, memory: Memory, *expected: str) -> None:
        memory.flush()
        reply, text = self.asked(memory), self.asked(memory, inject=False)
        assert sorted(texts(reply)) == sorted(injected(reply)) == sorted(expected)
        assert apart(reply, text) < CLOSE

    def test_each_line_stands_once(self, open_memory: OpenMemory) -> None:
        memory = open_memory(injection={"full_memory_tokens": 1000})
        for text in (CAT, TEA, CAT, RADIATOR):
            say(memory, text)
        self.check(memory, CAT, TEA, RADIATOR)

    def test_a_repeat_that_gets_other_words_stands_from_then_on(self, open_memory: OpenMemory) -> None:
        memory = open_memory(injection={"full_memory_tokens": 1000})
        ids = [say(memory, text)[0] for text in (CAT, TEA, CAT, RADIATOR)]
        memory.flush()
        memory.update(ids[2], "My dog is called Rex")
        self.check(memory, CAT, TEA, "My dog is called Rex", RADIATOR)

    def test_where_the_first_is_deleted_its_repeat_stands(self, open_memory: OpenMemory) -> None:
        memory = open_memory(injection={"full_memory_tokens": 1000})
        ids = [say(memory, text)[0] for text in (CAT, TEA, CAT, RADIATOR)]
        memory.flush()
        memory.delete(ids[0])
        self.check(memory, TEA, CAT, RADIATOR)

    def test_what_was_said_again_on_another_day_tells_something(self, open_memory: OpenMemory) -> None:
        memory = open_memory(injection={"full_memory_tokens": 1000})
        for text, day in ((CAT, MAY), (TEA, MAY), (CAT, JUNE)):
            say(memory, text, at=day)
        self.check(memory, CAT, TEA, CAT)


def test_pinned_ones_stand_once_and_nothing_repeats_them(open_face: OpenFace) -> None:
    memory = open_face(injection={"pinned": "pinned"})
    for _ in range(2):
        memory.add(CAT, infer=False, timestamp=MAY, metadata={"pinned": True}, **ADA)
    keep(memory, CAT)
    keep(memory, RADIATOR)
    assert sorted(recalled(memory, k=1)) == sorted([CAT, RADIATOR])


def test_a_fact_is_not_encoded_behind_its_repeats(memory: Memory, engine: WatchedEngine) -> None:
    for text in (CAT, RADIATOR, CAT, CAT):
        say(memory, text)
        memory.flush()
    encoded = engine.tokenizer.decode(engine.encoded_facts[-1].ids)
    assert encoded.count(CAT) == 1
    assert RADIATOR in encoded
