"""Drawing tokens and turning them into text, with no model."""

from __future__ import annotations

import pytest
import torch

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.hf.decode import Detokenizer, Sampler
from tests.models import tiny_tokenizer

CPU = torch.device("cpu")


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    """What comes out as the tokens of `text` go in one by one."""
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer, stop)
    out = []
    for token in tokenizer(text)["input_ids"]:
        out.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    return [*out, detokenizer.finish()], detokenizer


def test_pieces_make_up_the_text() -> None:
    out, detokenizer = pieces("Alice moved to Porto, and the cat sleeps.")
    assert "".join(out) == detokenizer.text == "Alice moved to Porto, and the cat sleeps."
    assert len([piece for piece in out if piece]) > 3


def test_a_character_is_never_split() -> None:
    text = "naïve 日本語 🙂 end"
    out, detokenizer = pieces(text)
    assert "".join(out) == detokenizer.text == text
    assert not any("\ufffd" in piece for piece in out)


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    first = tokenizer("日")["input_ids"][0]
    assert (detokenizer.push(first), detokenizer.finish()) == ("", "\ufffd")


def test_special_tokens_are_no_text() -> None:
    out, _ = pieces("a<|im_end|>b<|im_start|>c")
    assert "".join(out) == "abc"


@pytest.mark.parametrize("stop", ["cat", " the cat", "t", "A"])
def test_text_before_a_stop_string_comes_out_and_nothing_else(stop: str) -> None:
    text = "Alice and the cat sleeps"
    out, detokenizer = pieces(text, ("nowhere", stop))
    assert detokenizer.stopped
    assert "".join(out) == detokenizer.text == text[: text.index(stop)]


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    out, detokenizer = pieces("the ca the cats", ("cats!",))
    assert not detokenizer.stopped
    assert "".join(out) == "the ca the cats"
    assert out[-1].endswith("cats")


def test_greedy_takes_the_best() -> None:
    assert Sampler(SamplingOptions(), CPU).draw(torch.tensor([0.0, 3.0, 1.0])) == 1


def test_sampling_follows_the_probabilities_of_the_nucleus() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    sampler = Sampler(SamplingOptions(temperature=1.0, top_p=0.75, seed=0), CPU)
    counts = torch.bincount(torch.tensor([sampler.draw(logits) for _ in range(4000)]), minlength=4)
    assert counts[2:].tolist() == [0, 0]
    assert abs(counts[0] / 4000 - 0.5 / 0.8) < 0.03


def test_the_smallest_nucleus_is_the_best_token() -> None:
    sampler = Sampler(SamplingOptions(temperature=2.0, top_p=1e-9, seed=0), CPU)
    assert {sampler.draw(torch.tensor([0.0, 0.1, 0.05])) for _ in range(50)} == {1}


def test_without_a_seed_answers_differ() -> None:
    logits = torch.zeros(1000)
    drawn = {Sampler(SamplingOptions(temperature=1.0), CPU).draw(logits) for _ in range(20)}
    assert len(drawn) > 1


@pytest.mark.parametrize(("count", "tokens"), [(0, {2}), (1, {0, 2}), (9, {0, 1, 2})])
def test_logprobs_are_the_top_ones_and_the_drawn_one(count: int, tokens: set[int]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    found = Sampler(SamplingOptions(logprobs=count), CPU).logprobs(logits, 2)
    assert set(found) == tokens
    assert found[2] == pytest.approx(float(logits.log_softmax(-1)[2]))
