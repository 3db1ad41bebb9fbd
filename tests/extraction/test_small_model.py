"""A model that is too small to extract facts is not asked: what is added is remembered word for word."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.engine.base import Completion, SamplingOptions
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.extraction import engine_llm as llm
from inferscale_memory.memory import Memory
from inferscale_memory.prompt import Prompt
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, BEN
from tests.memory.watched import WatchedEngine
from tests.write.test_failed_adds import TEA, script, stored

SENTENCES = [
    "I am allergic to walnuts.",
    "My cat is called Miso.",
    "I moved from Lisbon to Porto in March.",
    "I work as a nurse at the children's hospital.",
    "My sister Clara plays the cello.",
    "I run ten kilometres every Sunday.",
    "I prefer green tea over coffee.",
    "My birthday is on 12 May.",
    "I am learning to play the piano.",
    "My brother is a lawyer in Berlin.",
    "I am afraid of flying.",
    "My rent is 800 euros a month.",
    "I studied physics in Vienna.",
    "I broke my phone yesterday.",
    "We are getting married next summer.",
    "My grandfather turned ninety.",
    "I ride a blue bicycle to work.",
    "The dentist expects me on Friday.",
    "My favourite film is Spirited Away.",
    "I cannot eat gluten.",
]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
OWN = {"provider": "inferscale", "config": {"min_parameters": 0}}
LENA = json.dumps({"memory": [{"id": "0", "text": "User's name is Lena", "attributed_to": "user"}]})


@pytest.fixture(autouse=True)
def anew() -> None:
    """No test has warned yet."""
    llm._say_too_small.cache_clear()


def answering(engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch, text: str) -> list[Prompt]:
    """Have the engine answer `text`, whatever it is asked. Returns what it is asked from now on."""
    asked: list[Prompt] = []

    def generate(prompt: Prompt, options: SamplingOptions) -> Completion:
        asked.append(prompt)
        return Completion(text, (), "stop", len(prompt.ids), 0, 0, len(prompt.ids), 0.0)

    monkeypatch.setattr(engine, "generate", generate)
    return asked


def test_words_are_kept_as_they_are_and_whose_they_are(either: Settled, engine: WatchedEngine) -> None:
    added = either.add(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "I like tea", "name": "Ada"},
            {"role": "assistant", "content": "Noted."},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": "42"},
            {"role": "user", "content": "   "},
            {"role": "user", "content": [{"type": "text", "text": "My cat"}, PICTURE]},
        ],
        **ADA,
        metadata={"source": "app"},
    )["results"]
    assert [result["memory"] for result in added] == ["I like tea", "Noted.", "My cat"]
    found = either.get(added[0]["id"])
    assert (found["role"], found["actor_id"], found["metadata"]) == ("user", "Ada", {"source": "app"})
    assert engine.asked == []
    assert either.failed_adds() == []


def test_it_is_said_once_in_a_process(open_face: OpenFace, caplog: pytest.LogCaptureFixture) -> None:
    memory = open_face()
    for who in (ADA, BEN):
        memory.add("I like tea", **who)
    [said] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    for part in ("tiny-llama is too small", "word for word", '"llm"', "400 million", "infer=False"):
        assert part in said.getMessage()


@pytest.mark.parametrize(
    "silent", ["", "  \n", [], [{"role": "user", "content": ""}], [{"role": "user", "content": [PICTURE]}]]
)
@pytest.mark.parametrize("small", [True, False])
def test_where_no_words_were_said_nothing_is_asked(
    open_face: OpenFace, engine: WatchedEngine, silent: Any, small: bool
) -> None:
    memory = open_face(**({} if small else {"llm": OWN}))
    assert memory.add(silent, **ADA) == {"results": []}
    assert engine.asked == []
    assert stored(memory) == []


def test_no_llm_is_asked_about_nothing(either: Settled) -> None:
    llm = script(either, TEA)
    assert either.add("", **ADA) == {"results": []}
    assert llm.asked == []


def test_an_app_may_say_that_its_small_model_extracts(
    open_face: OpenFace, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answering(engine, monkeypatch, TEA)
    memory = open_face(llm=OWN)
    memory.add("I like tea", **ADA)
    assert len(asked) == 1
    assert stored(memory) == ["Ada likes tea"]


@pytest.mark.parametrize("least", [-1, "many", 0.5])
def test_how_small_is_a_whole_number(open_memory: OpenMemory, least: Any) -> None:
    with pytest.raises(ConfigurationError, match="min_parameters must be a whole number"):
        open_memory(llm={"provider": "inferscale", "config": {"min_parameters": least}})


def test_a_model_that_copies_its_instructions_has_the_words_kept(
    open_face: OpenFace,
    engine: WatchedEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = answering(engine, monkeypatch, LENA)
    memory = open_face(llm=OWN)
    for text in ("I like tea", "I have a cat"):
        [result] = memory.add(text, **ADA)["results"]
        assert result["memory"] == text
    assert len(asked) == 2
    assert memory.failed_adds() == []
    [said] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "copied the example" in said.getMessage()


def test_the_example_is_a_fact_where_it_was_said(
    open_face: OpenFace, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(engine, monkeypatch, LENA)
    memory = open_face(llm=OWN)
    memory.add("Hi, I'm Lena!", **ADA)
    assert stored(memory) == ["User's name is Lena"]


def test_an_llm_of_the_apps_own_may_answer_what_it_likes(either: Settled) -> None:
    script(either, LENA)
    either.add("I like tea", **ADA)
    assert stored(either) == ["User's name is Lena"]


def test_a_call_that_failed_before_is_made_word_for_word(
    open_face: OpenFace, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(engine, monkeypatch, "no JSON")
    memory = open_face(llm=OWN)
    with pytest.raises(Exception, match="no JSON"):
        memory.add("I like tea", **ADA)
    memory.itself.llm.config.min_parameters = llm.MIN_PARAMETERS
    assert [result["memory"] for result in memory.retry_failed()["results"]] == ["I like tea"]
    assert memory.failed_adds() == []


@pytest.mark.engine
def test_with_nothing_configured_each_sentence_is_remembered(tmp_path: Path) -> None:
    with Memory(engine={"provider": "transformers"}, folder=tmp_path) as memory:
        for sentence in SENTENCES:
            [result] = memory.add(sentence, user_id="a")["results"]
            assert result["memory"] == sentence
        assert memory.add("", user_id="a") == {"results": []}
        assert memory.add([{"role": "user", "content": [PICTURE]}], user_id="a") == {"results": []}
        found = memory.search("Which nuts must I avoid?", filters={"user_id": "a"})["results"]
        assert found[0]["memory"] == SENTENCES[0]
        assert len(memory.get_all(filters={"user_id": "a"}, top_k=100)["results"]) == len(SENTENCES)
