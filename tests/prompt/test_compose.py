import random
from dataclasses import replace

import pytest

from inferscale_memory.errors import PromptError
from inferscale_memory.prompt import Composed, Fact, Frame, Segment, compose

FRAME = Frame(preamble=(1, 2, 3), suffix=(8, 9), system=None)
FIXED = 5


def fact(n: int, *, key: bool = True, score: float = 0.0, length: int = 2) -> Fact:
    return Fact((100 + n,) * length, f"key {n}" if key else None, f"fact {n}", score)


def composed(facts: list[Fact], room: int = 1000, text_last: int = 0) -> Composed:
    return compose(
        FRAME, facts, owner="maya", max_tokens=FIXED + room, preamble_key="preamble", text_last=text_last
    )


def stood(result: Composed) -> list[str | None]:
    return [segment.tag for segment in result.prompt.segments[1:-1]]


# What a prompt is made of


def test_a_prompt_is_preamble_facts_and_suffix() -> None:
    result = composed([fact(1), fact(2)])
    assert result.prompt.owner == "maya"
    assert result.prompt.segments == (
        Segment((1, 2, 3), "preamble"),
        Segment((101, 101), "key 1", "fact 1"),
        Segment((102, 102), "key 2", "fact 2"),
        Segment((8, 9)),
    )
    assert result.dropped == ()


def test_no_facts_give_a_prompt_without_facts() -> None:
    assert composed([]).prompt.ids == [1, 2, 3, 8, 9]


def test_preamble_and_facts_are_asked_to_be_injected() -> None:
    assert len(composed([fact(1), fact(2)]).prompt.composition) == 3


def test_without_a_blob_of_the_preamble_nothing_is_injected_and_the_keys_stay() -> None:
    prompt = compose(FRAME, [fact(1)], owner="maya", max_tokens=100).prompt
    assert prompt.composition == ()
    assert prompt.segments[1].key == "key 1"


def test_the_same_fact_may_stand_twice() -> None:
    assert stood(composed([fact(1), fact(2), fact(1)])) == ["fact 1", "fact 2", "fact 1"]


# Order


def test_facts_stand_in_the_order_given_whatever_their_score() -> None:
    facts = [fact(1, score=0.1), fact(2, score=0.9), fact(3, score=0.5)]
    assert stood(composed(facts)) == ["fact 1", "fact 2", "fact 3"]


def test_facts_without_a_blob_follow_the_injected_ones_as_text() -> None:
    result = composed([fact(1, key=False), fact(2), fact(3, key=False), fact(4)])
    assert stood(result) == ["fact 2", "fact 4", "fact 1", "fact 3"]
    assert [segment.key for segment in result.prompt.segments[1:-1]] == ["key 2", "key 4", None, None]


def test_the_most_relevant_facts_stand_last_as_text() -> None:
    facts = [fact(1, score=0.8), fact(2, score=0.1), fact(3, score=0.9), fact(4, score=0.2)]
    result = composed(facts, text_last=2)
    assert stood(result) == ["fact 2", "fact 4", "fact 1", "fact 3"]
    assert [segment.key for segment in result.prompt.segments[1:-1]] == ["key 2", "key 4", None, None]


def test_facts_without_a_blob_stand_before_the_most_relevant_ones() -> None:
    facts = [fact(1, score=0.9), fact(2, key=False, score=0.1), fact(3, score=0.2)]
    assert stood(composed(facts, text_last=1)) == ["fact 3", "fact 2", "fact 1"]


def test_the_ids_do_not_depend_on_whether_all_facts_or_none_have_blobs() -> None:
    scores = [0.3, 0.9, 0.1, 0.7]
    keyed = composed([fact(n, score=score) for n, score in enumerate(scores)], text_last=2)
    bare = composed([fact(n, key=False, score=score) for n, score in enumerate(scores)], text_last=2)
    assert keyed.prompt.ids == bare.prompt.ids


@pytest.mark.parametrize("text_last", [3, 100])
def test_more_facts_as_text_than_there_are_makes_all_of_them_text(text_last: int) -> None:
    result = composed([fact(1), fact(2), fact(3)], text_last=text_last)
    assert stood(result) == ["fact 1", "fact 2", "fact 3"]
    assert len(result.prompt.composition) == 1


def test_pinned_facts_stay_where_they_stand_whatever_their_score() -> None:
    facts = [replace(fact(1, score=0.9), pinned=True), fact(2, score=0.1), fact(3, score=0.2)]
    assert stood(composed(facts, text_last=1)) == ["fact 1", "fact 2", "fact 3"]
    assert composed(facts, text_last=5).prompt.composition[1].tag == "fact 1"


def test_pinned_facts_are_left_out_last() -> None:
    facts = [replace(fact(1, score=0.0), pinned=True), fact(2, score=0.1), fact(3, score=0.2)]
    assert stood(composed(facts, room=4)) == ["fact 1", "fact 3"]
    assert stood(composed(facts, room=2)) == ["fact 1"]


def test_a_budget_of_facts_is_room_too() -> None:
    facts = [fact(1, score=0.1), fact(2, score=0.2), fact(3, length=9)]
    result = compose(FRAME, facts, owner="maya", max_tokens=1000, most_of_facts=2, preamble_key="preamble")
    assert stood(result) == ["fact 2"]
    assert [one.tag for one in result.dropped] == ["fact 1", "fact 3"]
    assert compose(FRAME, facts, owner="maya", max_tokens=FIXED + 4, most_of_facts=100).dropped == (facts[2],)


def test_of_equally_relevant_facts_the_later_ones_stand_last() -> None:
    assert stood(composed([fact(1), fact(2, key=False), fact(3)], text_last=1)) == [
        "fact 1",
        "fact 2",
        "fact 3",
    ]


# What does not fit


def test_the_least_relevant_facts_are_left_out_until_the_rest_fits() -> None:
    facts = [fact(1, score=0.8), fact(2, score=0.1), fact(3, score=0.9), fact(4, score=0.2)]
    result = composed(facts, room=4)
    assert stood(result) == ["fact 1", "fact 3"]
    assert result.dropped == (facts[1], facts[3])


def test_of_equally_relevant_facts_the_earlier_one_is_left_out() -> None:
    assert stood(composed([fact(1), fact(2), fact(3)], room=4)) == ["fact 2", "fact 3"]


def test_a_fact_longer_than_all_the_room_takes_no_other_with_it() -> None:
    facts = [fact(1, score=0.1), fact(2, score=0.9, length=50), fact(3, score=0.2)]
    result = composed(facts, room=4)
    assert stood(result) == ["fact 1", "fact 3"]
    assert result.dropped == (facts[1],)


def test_when_no_fact_fits_the_prompt_has_none() -> None:
    facts = [fact(1), fact(2)]
    result = composed(facts, room=1)
    assert result.prompt.ids == [1, 2, 3, 8, 9]
    assert result.dropped == tuple(facts)


def test_a_conversation_that_just_fits_is_composed() -> None:
    assert composed([], room=0).prompt.ids == [1, 2, 3, 8, 9]


def test_a_conversation_that_does_not_fit_is_an_error_with_a_remedy() -> None:
    with pytest.raises(
        PromptError,
        match=r"has 5 tokens and leaves no room .* in a context of 5: send",
    ):
        composed([fact(1)], room=-1)


def test_any_facts_fit_and_none_is_lost_silently() -> None:
    draw = random.Random(3)
    for _ in range(500):
        facts = [
            fact(n, key=draw.random() < 0.7, score=draw.choice((0.1, 0.5, 0.9)), length=draw.randint(1, 9))
            for n in range(draw.randint(0, 12))
        ]
        room, text_last = draw.randint(0, 40), draw.randint(0, 4)
        result = composed(facts, room, text_last)
        names = {found.tag: found for found in facts}
        kept = [names[tag] for tag in stood(result)]
        assert sorted(kept + list(result.dropped), key=lambda f: f.ids) == sorted(facts, key=lambda f: f.ids)
        assert len(result.prompt.ids) <= FIXED + room
        dropped = [left for left in result.dropped if len(left.ids) <= room]
        assert not dropped or max(left.score for left in dropped) <= min((f.score for f in kept), default=9)
        as_text = [segment.key is None for segment in result.prompt.segments[1:-1]]
        assert as_text == sorted(as_text)
