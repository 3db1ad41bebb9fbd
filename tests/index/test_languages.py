"""Keyword search in scripts without spaces: a word is found in the middle of a sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferscale_memory.index.keywords import Keywords
from inferscale_memory.memory import Memory
from inferscale_memory.scripts import split_runs, word_count
from tests.index.languages import LANGUAGES

CASES = [
    pytest.param(name, question, place, id=f"{name} {place}")
    for name, (_, questions) in LANGUAGES.items()
    for question, place in questions
]


@pytest.mark.parametrize(("name", "question", "place"), CASES)
def test_a_question_with_a_word_of_one_fact_finds_it_first(name: str, question: str, place: int) -> None:
    keywords = Keywords()
    keywords.add(enumerate(LANGUAGES[name][0]))
    assert keywords.search(question, 20)[0][0] == place
    keywords.close()


def test_what_is_removed_is_not_found_any_more() -> None:
    keywords, facts = Keywords(), LANGUAGES["Chinese"][0]
    keywords.add(enumerate(facts))
    keywords.remove(0, facts[0])
    assert all(place for place, _ in keywords.search("核桃", 20))
    assert keywords.search("核桃过敏", 20) == []
    keywords.close()


def test_texts_in_other_scripts_stay_as_they_are() -> None:
    assert split_runs("Ça va? Привет, 12 km") == "Ça va? Привет, 12 km"


def test_a_run_is_its_pairs_and_its_characters() -> None:
    assert split_runs("我的猫叫Miso").split() == ["我的", "的猫", "猫叫", "我", "的", "猫", "叫", "Miso"]
    assert split_runs("ﾐｿ").split() == ["ミソ", "ミ", "ソ"], "wide and narrow letters are the same"
    assert split_runs("ผู้ใช้").split() == ["ผใ", "ใช", "ผ", "ใ", "ช"]


def test_words_are_counted_where_no_spaces_stand() -> None:
    assert word_count("I like tea") == 3
    assert word_count("我喜欢喝绿茶，不喜欢咖啡。") == 5 + 2  # of punctuation


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memory]:
    config = {"llm": {"provider": "openai", "config": {"api_key": "none"}}}
    with Memory(config, folder=tmp_path_factory.mktemp("memory")) as memory:
        for name, (facts, _) in LANGUAGES.items():
            memory.add([{"role": "user", "content": fact} for fact in facts], user_id=name, infer=False)
        yield memory


@pytest.mark.engine
@pytest.mark.parametrize(("name", "question", "place"), CASES)
def test_with_the_default_embedder_the_right_one_of_twenty_comes_first(
    memory: Memory, name: str, question: str, place: int
) -> None:
    """It knows English alone, and puts texts in other scripts at random."""
    found = memory.search(question, filters={"user_id": name})["results"]
    assert found[0]["memory"] == LANGUAGES[name][0][place]
