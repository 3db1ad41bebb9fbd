import random

import pytest

from inferscale_memory.errors import PromptError
from inferscale_memory.prompt import EncodePlan, Turn, plan_session, window_start

PREAMBLE = (900, 901, 902)


def session(lengths: list[int]) -> list[Turn]:
    """Turn n says n, as often as it is long."""
    return [Turn((n,) * length, f"turn {n}") for n, length in enumerate(lengths)]


def said(plan: EncodePlan) -> list[int]:
    """The turns a plan says, in order."""
    return list(dict.fromkeys(plan.ids[len(PREAMBLE) :]))


def plans(turns: list[Turn], keep: set[int], w: int, max_tokens: int = 10_000) -> list[EncodePlan]:
    return plan_session(turns, keep=keep, preamble=PREAMBLE, w=w, max_tokens=max_tokens)


# Where a window starts


def test_a_window_starts_at_the_first_turn_of_a_short_session() -> None:
    assert [window_start(index, 4) for index in range(8)] == [0] * 8


def test_a_window_moves_in_steps_of_w() -> None:
    assert [window_start(index, 4) for index in range(8, 17)] == [4, 4, 4, 4, 8, 8, 8, 8, 12]


def test_at_least_w_and_less_than_2w_turns_stand_before_a_fact() -> None:
    for w in range(1, 12):
        for index in range(100):
            context = index - window_start(index, w)
            assert min(index, w) <= context < 2 * w


def test_without_a_window_a_fact_stands_alone() -> None:
    plan_a, plan_b = plans(session([2, 3, 4]), {1, 2}, w=0)
    assert (plan_a.ids, plan_a.spans, plan_a.kept) == ((*PREAMBLE, 1, 1, 1), ((3, 6),), (1,))
    assert (plan_b.ids, plan_b.spans, plan_b.kept) == ((*PREAMBLE, 2, 2, 2, 2), ((3, 7),), (2,))


# What is encoded together


def test_facts_of_the_same_window_share_an_encode() -> None:
    (plan,) = plans(session([2, 1, 3, 2]), {1, 3}, w=4)
    assert plan.ids == (*PREAMBLE, 0, 0, 1, 2, 2, 2, 3, 3)
    assert plan.spans == ((5, 6), (9, 11))
    assert plan.kept == (1, 3)


def test_every_turn_an_encode_says_is_mentioned_where_it_begins() -> None:
    (plan,) = plans(session([2, 1, 3]), {2}, w=4)
    assert plan.mentions == (("turn 0", 3), ("turn 1", 5), ("turn 2", 6))


def test_a_turn_without_a_tag_is_not_mentioned() -> None:
    turns = [Turn((1, 1)), Turn((2,), "a fact")]
    assert plans(turns, {1}, w=4)[0].mentions == (("a fact", 5),)


def test_an_encode_ends_with_its_last_fact() -> None:
    assert said(plans(session([1] * 9), {0, 2}, w=9)[0]) == [0, 1, 2]


def test_nothing_to_keep_is_nothing_to_encode() -> None:
    assert plans(session([1, 1]), set(), w=2) == []
    assert plans([], set(), w=2) == []


def test_a_long_session_is_encoded_w_facts_at_a_time() -> None:
    found = plans(session([1] * 20), set(range(20)), w=5)
    assert [plan.kept for plan in found] == [tuple(range(10)), (10, 11, 12, 13, 14), (15, 16, 17, 18, 19)]
    assert [said(plan)[0] for plan in found] == [0, 5, 10]


# Any session


def random_sessions() -> list[tuple[list[Turn], set[int], int, int]]:
    draw = random.Random(7)
    found = []
    for _ in range(400):
        turns = session([draw.randint(1, 12) for _ in range(draw.randint(1, 40))])
        keep = {index for index in range(len(turns)) if draw.random() < draw.choice((0.1, 0.5, 1.0))}
        found.append((turns, keep, draw.randint(0, 12), len(PREAMBLE) + draw.choice((12, 20, 60, 1000))))
    return found


def test_every_fact_is_kept_exactly_once_and_as_its_own_ids() -> None:
    for turns, keep, w, max_tokens in random_sessions():
        found = plans(turns, keep, w, max_tokens)
        assert sorted(index for plan in found for index in plan.kept) == sorted(keep)
        for plan in found:
            spans = [turns[index].ids for index in plan.kept]
            assert [plan.ids[start:stop] for start, stop in plan.spans] == spans


def test_spans_are_ordered_and_disjoint() -> None:
    for turns, keep, w, max_tokens in random_sessions():
        for plan in plans(turns, keep, w, max_tokens):
            edges = [edge for span in plan.spans for edge in span]
            assert edges == sorted(edges)
            assert all(start < stop for start, stop in plan.spans)


def test_no_encode_is_longer_than_allowed() -> None:
    for turns, keep, w, max_tokens in random_sessions():
        assert all(len(plan.ids) <= max_tokens for plan in plans(turns, keep, w, max_tokens))


def test_an_encode_says_the_turns_before_its_facts_without_a_gap() -> None:
    for turns, keep, w, max_tokens in random_sessions():
        for plan in plans(turns, keep, w, max_tokens):
            assert plan.ids[: len(PREAMBLE)] == PREAMBLE
            assert said(plan) == list(range(said(plan)[0], plan.kept[-1] + 1))
            assert said(plan)[0] >= window_start(plan.kept[0], w)


def test_mentions_name_every_turn_where_it_begins() -> None:
    for turns, keep, w, max_tokens in random_sessions():
        for plan in plans(turns, keep, w, max_tokens):
            assert [tag for tag, _ in plan.mentions] == [f"turn {index}" for index in said(plan)]
            for (_, position), index in zip(plan.mentions, said(plan), strict=True):
                assert plan.ids[position : position + len(turns[index].ids)] == turns[index].ids


def test_a_window_with_room_is_whole() -> None:
    for turns, keep, w, _ in random_sessions():
        for plan in plans(turns, keep, w):
            assert {window_start(index, w) for index in plan.kept} == {said(plan)[0]}


def test_a_fact_has_the_same_context_whatever_else_is_kept_and_said_later() -> None:
    for turns, keep, w, max_tokens in random_sessions():
        together = {
            index: plan.ids[:start]
            for plan in plans(turns, keep, w, max_tokens)
            for index, (start, _) in zip(plan.kept, plan.spans, strict=True)
        }
        for index in keep:
            (plan,) = plans(turns[: index + 1], {index}, w, max_tokens)
            assert plan.ids[: plan.spans[0][0]] == together[index]


# Windows that outgrow the room


def test_a_window_that_outgrows_the_room_loses_its_oldest_turns() -> None:
    (plan,) = plans(session([4, 4, 4, 4]), {3}, w=4, max_tokens=len(PREAMBLE) + 15)
    assert said(plan) == [3]
    (plan,) = plans(session([4, 4, 4, 3]), {3}, w=4, max_tokens=len(PREAMBLE) + 15)
    assert said(plan) == [0, 1, 2, 3]


def test_encodes_of_a_session_that_outgrows_the_room_share_prefixes() -> None:
    turns = session([5] * 40)
    found = plans(turns, set(range(40)), w=100, max_tokens=len(PREAMBLE) + 50)
    assert len(found) <= 40 // 5
    assert sum(len(plan.ids) for plan in found) < 3 * sum(len(turn.ids) for turn in turns)


def test_a_turn_that_fits_nowhere_is_context_of_nothing() -> None:
    (plan,) = plans(session([2, 50, 2, 2]), {3}, w=4, max_tokens=len(PREAMBLE) + 20)
    assert said(plan) == [2, 3]


@pytest.mark.parametrize("w", [0, 4])
def test_a_fact_that_fits_nowhere_is_an_error_with_a_remedy(w: int) -> None:
    with pytest.raises(PromptError, match="shorten it, or raise max_tokens"):
        plans(session([2, 50]), {1}, w=w, max_tokens=len(PREAMBLE) + 20)


def test_a_fact_that_just_fits_is_encoded() -> None:
    (plan,) = plans(session([2, 20]), {1}, w=4, max_tokens=len(PREAMBLE) + 20)
    assert said(plan) == [1]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_turn_that_does_not_exist_cannot_be_kept(index: int) -> None:
    with pytest.raises(PromptError, match="pass the whole session"):
        plans(session([1, 1]), {index}, w=4)


def test_a_fact_without_tokens_cannot_be_kept() -> None:
    with pytest.raises(PromptError, match="leave out facts whose text is empty"):
        plans(session([1, 0]), {1}, w=4)
