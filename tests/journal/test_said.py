"""Which messages go with a forgotten fact: those that say it, word for word."""

from __future__ import annotations

import pytest

from inferscale_memory.journal.said import says


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("So: I LIKE TEA!", "I like tea"),
        ("a a b, but a a a b", "a a a b"),
        ("你好，我对核桃过敏，怎么办？", "我对核桃过敏"),
        ("昨天我说过我养了一只猫吗", "我养了一只猫"),
        ("ええと、妹はチェロを弾きますよ", "妹はチェロを弾きます"),
        ("제 생일은 오월 십이일이에요.", "오월 십이일"),
        ("แต่ฉันแพ้วอลนัทนะ", "ฉันแพ้วอลนัท"),
        ("我的猫叫Miso吗", "Miso"),
    ],
)
def test_what_was_said_is_found_in_every_script(said: str, text: str) -> None:
    assert says(said, text)


@pytest.mark.parametrize(
    ("said", "text"),
    [("I like teapots", "I like tea"), ("x(hi)", "(hi)"), ("我好了", "好"), ("我养了一只狗", "我养了一只猫")],
)
def test_a_part_of_a_longer_word_is_not(said: str, text: str) -> None:
    assert not says(said, text)
