"""An extraction that fails raises, keeps what was said, and can be made again: with any LLM, on both faces."""

from __future__ import annotations

import json
from threading import Event, Thread
from typing import Any

import pytest
from mem0.exceptions import LLMError

from inferscale_memory.errors import ExtractionError
from inferscale_memory.extraction.recording_llm import heard
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenFace
from tests.memory.faces import Settled
from tests.memory.saying import ADA, BEN, MAY


class Scripted:
    """An LLM that gives one answer after the other, the last one for ever; an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def generate_response(self, messages: Any, **options: Any) -> Any:
        self.asked.append(messages[-1]["content"])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def facts(*texts: str) -> str:
    return json.dumps({"memory": [{"text": text} for text in texts]})


BAD = '{"memory": [{"text": "Ada likes'
TEA = facts("Ada likes tea")


def script(memory: Settled, *answers: Any) -> Scripted:
    memory.itself.llm = llm = Scripted(*answers)
    return llm


def turns(memory: Settled) -> list[str]:
    read = memory.itself._core.journal.database.read("SELECT text FROM turns WHERE text IS NOT NULL ORDER BY number")
    return [text for (text,) in read]


def stored(memory: Settled, **ids: str) -> list[str]:
    return sorted(found["memory"] for found in memory.get_all(filters=ids or ADA)["results"])


@pytest.mark.parametrize("answer", [BAD, "Sorry, no.", "", None, '{"facts": ["tea"]}'])
def test_a_bad_answer_raises_and_the_turn_stays(either: Settled, answer: Any) -> None:
    script(either, answer)
    with pytest.raises(ExtractionError) as raised:
        either.add("I like tea", **ADA)
    assert isinstance(raised.value, LLMError)
    assert turns(either) == ["I like tea"]
    assert stored(either) == []
    [call] = either.failed_adds()
    assert (call.ids, call.error, call.attempts) == (ADA, str(raised.value), 1)


def test_valid_json_with_nothing_in_it_is_a_success_with_nothing(either: Settled) -> None:
    script(either, '{"memory": []}')
    assert either.add("Hello!", **ADA) == {"results": []}
    assert either.failed_adds() == []
    assert turns(either) == ["Hello!"]


def test_trying_again_stores_the_facts_and_clears_the_call(either: Settled) -> None:
    script(either, BAD, TEA)
    with pytest.raises(ExtractionError):
        either.add("I like tea", **ADA)
    done = either.retry_failed()
    assert [result["memory"] for result in done["results"]] == ["Ada likes tea"]
    assert done["failed"] == either.failed_adds() == []
    assert stored(either) == ["Ada likes tea"]
    assert turns(either) == ["I like tea"], "said once"
    assert either.retry_failed() == {"results": [], "failed": []}


def test_the_facts_of_a_second_try_come_from_the_turns_of_the_first(either: Settled) -> None:
    script(either, BAD, TEA)
    with pytest.raises(ExtractionError):
        either.add("I like tea", **ADA, timestamp=MAY)
    [result] = either.retry_failed()["results"]
    [(turn,)] = either.itself._core.journal.database.read("SELECT number FROM turns")
    [fact] = either.itself._core.journal.facts.get([result["id"]]).values()
    assert fact.turns == (turn,)
    assert fact.when is not None
    assert fact.when.isoformat() == MAY


def test_one_that_fails_again_stays_and_the_others_are_made(either: Settled) -> None:
    llm = script(either, BAD)
    for text, ids in (("I like tea", ADA), ("I have a cat", BEN)):
        with pytest.raises(ExtractionError):
            either.add(text, **ids)
    llm.answers = ["no", facts("Ben has a cat")]
    done = either.retry_failed()
    assert [result["memory"] for result in done["results"]] == ["Ben has a cat"]
    [call] = done["failed"]
    assert (call.ids, call.attempts) == (ADA, 2)
    assert stored(either, **BEN) == ["Ben has a cat"]


def test_a_second_try_has_the_options_of_the_first(either: Settled) -> None:
    llm = script(either, BAD, TEA)
    with pytest.raises(ExtractionError):
        either.add(
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "I like tea", "name": "Ada"},
                {"role": "assistant", "content": "Noted."},
            ],
            user_id="ada",
            run_id="r1",
            metadata={"source": "app"},
            expiration_date="2999-01-01",
            prompt="Only drinks.",
        )
    [result] = either.retry_failed()["results"]
    assert "user: I like tea\nassistant: Noted." in llm.asked[1]
    assert "Only drinks." in llm.asked[1]
    found = either.get(result["id"])
    assert (found["user_id"], found["run_id"], found["expiration_date"]) == ("ada", "r1", "2999-01-01")
    assert found["metadata"]["source"] == "app"


def test_an_app_that_adds_the_same_again_has_tried_again(either: Settled) -> None:
    script(either, BAD, BAD, TEA)
    for _ in range(2):
        with pytest.raises(ExtractionError):
            either.add("I like tea", **ADA)
    [call] = either.failed_adds()
    assert call.attempts == 2
    either.add("I like tea", **ADA)
    assert either.failed_adds() == []
    assert turns(either) == ["I like tea"]
    assert stored(either) == ["Ada likes tea"]


def test_another_scope_or_other_words_are_another_call(either: Settled) -> None:
    script(either, BAD, TEA)
    with pytest.raises(ExtractionError):
        either.add("I like tea", **ADA)
    either.add("I like tea", **BEN)
    either.add("I like tea!", **ADA)
    assert len(either.failed_adds()) == 1
    assert turns(either) == ["I like tea", "I like tea", "I like tea!"]


def test_an_llm_that_is_away_is_mem0s_error_and_can_be_tried_again(either: Settled) -> None:
    script(either, RuntimeError("it said: I like tea"), TEA)
    with pytest.raises(LLMError) as raised:
        either.add("I like tea", **ADA)
    assert not isinstance(raised.value, ExtractionError)
    [call] = either.failed_adds()
    assert call.error == "the LLM raised RuntimeError", "what others raise may hold what was said"
    either.retry_failed()
    assert stored(either) == ["Ada likes tea"]


def test_failed_calls_outlive_the_memory(open_face: OpenFace) -> None:
    memory = open_face()
    script(memory, BAD)
    with pytest.raises(ExtractionError):
        memory.add("I like tea", **ADA)
    memory.close()
    memory = open_face()
    script(memory, TEA)
    assert len(memory.failed_adds()) == 1
    assert len(memory.retry_failed()["results"]) == 1


def test_what_was_forgotten_is_not_brought_back(either: Settled) -> None:
    script(either, BAD, TEA)
    with pytest.raises(ExtractionError):
        either.add("I like tea", **ADA)
    either.reset()
    script(either, TEA)
    assert either.failed_adds() == []
    assert either.retry_failed() == {"results": [], "failed": []}


def test_facts_that_are_not_extracted_never_fail_this_way(either: Settled) -> None:
    llm = script(either, BAD)
    either.add("I like tea", **ADA, infer=False)
    assert (stored(either), llm.asked) == (["I like tea"], [])


def test_a_procedure_may_be_any_text_and_can_be_tried_again(either: Settled) -> None:
    script(either, RuntimeError("away"), RuntimeError("still away"), "1. Boil water.")
    cook: dict[str, Any] = {"agent_id": "cook", "memory_type": "procedural_memory"}
    with pytest.raises(RuntimeError, match="away"):
        either.add("How I make tea", **cook)
    assert len(either.retry_failed()["failed"]) == 1
    assert [result["memory"] for result in either.retry_failed()["results"]] == ["1. Boil water."]


def test_the_llm_is_itself_whenever_nothing_is_added(either: Settled) -> None:
    llm = script(either, TEA)
    assert either.itself.llm is llm
    either.add("I like tea", **ADA)
    assert either.itself.llm is llm
    assert heard(either.itself, llm) is llm


def test_two_that_try_again_at_once_make_a_call_once(memory: Memory) -> None:
    began, go_on = Event(), Event()

    class Slow(Scripted):
        def generate_response(self, messages: Any, **options: Any) -> Any:
            answer = super().generate_response(messages, **options)
            if len(self.asked) > 1:
                began.set()
                go_on.wait(30)
            return answer

    memory.llm = llm = Slow(BAD, TEA)
    with pytest.raises(ExtractionError):
        memory.add("I like tea", **ADA)
    thread = Thread(target=memory.retry_failed)
    thread.start()
    assert began.wait(30)
    assert memory.retry_failed()["results"] == []
    go_on.set()
    thread.join()
    assert len(llm.asked) == 2
    assert memory.failed_adds() == []


@pytest.mark.parametrize("late", [False, True], ids=["expired when it was written", "expired later"])
def test_a_memory_that_starts_meanwhile_puts_nothing_away_for_what_expired_before(
    open_face: OpenFace, late: bool
) -> None:
    memory = open_face()
    past = "2020-01-01"
    added = memory.add("old", **ADA, infer=False, **({} if late else {"expiration_date": past}))
    if late:
        memory.update(added["results"][0]["id"], expiration_date=past)
    memory.flush()

    class Slow(Scripted):
        def generate_response(self, messages: Any, **options: Any) -> Any:
            open_face().close()
            return super().generate_response(messages, **options)

    memory.itself.llm = Slow(RuntimeError("down"))
    with pytest.raises(LLMError):
        memory.add("I like tea", **ADA)
    assert turns(memory) == ["I like tea"]
    script(memory, TEA)
    assert [result["memory"] for result in memory.retry_failed()["results"]] == ["Ada likes tea"]
