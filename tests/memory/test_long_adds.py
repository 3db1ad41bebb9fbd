"""More messages than the model takes at once are extracted in parts that fit, in order."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

from inferscale_memory.engine.base import Completion, SamplingOptions
from inferscale_memory.errors import ExtractionError
from inferscale_memory.extraction import engine_llm as llm
from inferscale_memory.extraction import instructions as extraction
from inferscale_memory.prompt import Prompt
from tests.memory.conftest import OpenFace
from tests.memory.faces import Settled
from tests.memory.saying import ADA
from tests.memory.watched import WatchedEngine
from tests.write.test_failed_adds import stored, turns

CONTEXT = 2048
SAID = [
    {
        "role": ("user", "assistant")[number % 2],
        "content": f"I keep the number {number} in mind, day and night.",
    }
    for number in range(120)
]


@pytest.fixture(autouse=True)
def tiny_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WatchedEngine, "max_model_len", CONTEXT)
    monkeypatch.setattr(llm, "MIN_PARAMETERS", 0)


class Reader:
    """Answers for the engine: one fact for each new message, unless one of `refused` is among them."""

    def __init__(self, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.refused: set[int] = set()
        self.most = 1000
        self.parts: list[list[int]] = []
        self.prompts: list[Prompt] = []
        monkeypatch.setattr(engine, "generate", self.generate)
        monkeypatch.setattr(engine, "_unsupported", "or it would encode every fact, which takes long")

    def generate(self, prompt: Prompt, options: SamplingOptions) -> Completion:
        text = self.engine.tokenizer.decode(prompt.ids)
        new = text.rpartition("## New Messages\n")[2].partition("## Observation Date")[0]
        numbers = [int(number) for number in re.findall(r"the number (\d+) in", new)]
        self.prompts.append(prompt)
        self.parts.append(numbers)
        facts = [{"text": f"User keeps the number {number} in mind"} for number in numbers]
        answer = "no JSON" if self.refused & set(numbers) else json.dumps({"memory": facts})
        reason = "length" if len(numbers) > self.most else "stop"
        return Completion(answer, (), reason, len(prompt.ids), 0, 0, len(prompt.ids), 0.0)


@pytest.fixture
def reader(engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(engine, monkeypatch)


def facts_of(*numbers: int) -> list[str]:
    return sorted(f"User keeps the number {number} in mind" for number in numbers)


def all_stored(memory: Settled) -> list[str]:
    return sorted(row["memory"] for row in memory.get_all(filters=ADA, top_k=1000)["results"])


def test_all_of_it_is_extracted_in_order_in_parts_that_fit(either: Settled, reader: Reader) -> None:
    added = either.add(SAID, **ADA)["results"]
    assert len(reader.parts) > 2
    assert [number for part in reader.parts for number in part] == list(range(120))
    assert all(len(prompt.ids) + extraction.LEAST_ANSWER <= CONTEXT for prompt in reader.prompts)
    assert len(added) == 120
    assert all_stored(either) == facts_of(*range(120))
    assert turns(either) == [turn["content"] for turn in SAID], "each is in the log once"
    assert either.failed_adds() == []


def test_each_part_has_beside_it_what_mem0_puts_there(
    either: Settled, reader: Reader, engine: WatchedEngine
) -> None:
    either.add(SAID, **ADA)
    text = engine.tokenizer.decode(reader.prompts[-1].ids)
    before = text.partition("## Last k Messages\n")[2].partition("## New Messages")[0]
    assert "I keep the number" in before.partition("## Existing Memories")[0]
    assert "User keeps the number" in before.partition("## Existing Memories")[2]


def test_a_fact_is_of_its_part_alone(either: Settled, reader: Reader) -> None:
    added = either.add(SAID, **ADA)["results"]
    journal = either.itself._core.journal
    [last] = journal.facts.get([added[-1]["id"]]).values()
    told = [turn.text for turn in journal.turns.get(last.turns)]
    assert told == [turn["content"] for turn in SAID[reader.parts[-1][0] :]]


def test_a_part_that_fails_is_kept_alone_and_made_again_alone(either: Settled, reader: Reader) -> None:
    reader.refused = {50}
    with pytest.raises(ExtractionError, match="no JSON"):
        either.add(SAID, **ADA)
    [part] = [part for part in reader.parts if 50 in part]
    assert all_stored(either) == facts_of(*(number for number in range(120) if number not in part))
    [call] = either.failed_adds()
    assert len(call.turns) == len(part)

    reader.refused, reader.parts = set(), []
    done = either.retry_failed()
    assert reader.parts == [part]
    assert len(done["results"]) == len(part)
    assert done["failed"] == []
    assert all_stored(either) == facts_of(*range(120))
    assert len(turns(either)) == 120


def test_an_app_that_adds_all_of_it_again_leaves_no_part_to_be_made_again(
    either: Settled, reader: Reader
) -> None:
    reader.refused = {50}
    with pytest.raises(ExtractionError):
        either.add(SAID, **ADA)
    reader.refused = set()
    either.add(SAID, **ADA)
    assert either.failed_adds() == []
    assert set(all_stored(either)) == set(facts_of(*range(120)))


def test_a_call_that_was_kept_as_too_much_is_made_in_parts(
    either: Settled, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As versions before this one have kept it."""
    with monkeypatch.context() as before:
        before.setattr("inferscale_memory.memory.adding._halved", lambda core, turns: [])
        with pytest.raises(ExtractionError, match="max_model_len"):
            either.add(SAID, **ADA)
    assert len(either.failed_adds()) == 1
    assert len(either.retry_failed()["results"]) == 120
    assert either.failed_adds() == []


def test_what_a_crash_leaves_undone_is_among_the_failed_calls(
    open_face: OpenFace, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_face()

    class Killed(BaseException):
        pass

    def killed(prompt: Prompt, options: SamplingOptions) -> Completion:
        if len(reader.parts) == 2:
            raise Killed
        return reader.generate(prompt, options)

    monkeypatch.setattr(reader.engine, "generate", killed)
    with pytest.raises(Killed):
        memory.add(SAID, **ADA)
    monkeypatch.setattr(reader.engine, "generate", reader.generate)
    memory.close()
    memory = open_face()
    memory.retry_failed()
    assert [number for part in reader.parts for number in part] == list(range(120)), "in order, too"
    assert all_stored(memory) == facts_of(*range(120))


def test_answers_that_are_cut_off_are_made_shorter(either: Settled, reader: Reader) -> None:
    reader.most = 4
    either.add(SAID[:10], **ADA)
    assert stored(either) == facts_of(*range(10))


def test_a_message_that_fits_alone_is_read_without_its_company(
    either: Settled, reader: Reader, engine: WatchedEngine
) -> None:
    long = "I keep the number 7 in mind. " + "It was raining in Porto. " * 30
    for _ in range(3):
        either.add([*SAID[:4], {"role": "user", "content": long}], **ADA)
    texts = [engine.tokenizer.decode(prompt.ids) for prompt in reader.prompts]
    assert any("## Last k Messages\n\n\n##" in text and "It was raining" in text for text in texts)
    assert either.failed_adds() == []


def test_a_single_message_that_does_not_fit_is_an_error(either: Settled, reader: Reader) -> None:
    with pytest.raises(ExtractionError, match="larger max_model_len"):
        either.add([*SAID[:2], {"role": "user", "content": "It was raining in Porto. " * 200}], **ADA)
    [call] = either.failed_adds()
    assert len(call.turns) == 1
    assert stored(either) == facts_of(0, 1)


def test_parts_are_no_error_in_a_log(
    either: Settled, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    either.add(SAID, **ADA)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_real_engine_is_asked_part_by_part(
    open_face: OpenFace, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "_CHARACTERS", 20)
    monkeypatch.setattr(extraction, "_MOST_FACTS", 1)
    memory = open_face()
    memory.add(SAID[:40], **ADA)
    asked: list[Any] = [one for one in engine.asked if one[1].schema is not None]
    assert len(asked) > 1
    assert all(prompt.segments[0] == asked[0][0].segments[0] for prompt, _, _ in asked)
    assert memory.failed_adds() == []
