"""How an answer is judged: against the gold answer, against the text path, and with what certainty."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

_ARTICLES = re.compile(r"\b(a|an|the|and)\b")


def words(text: str) -> list[str]:
    """Words as SQuAD and LoCoMo compare them: lower case, without punctuation and articles."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the gold answer's words, in [0, 1]."""
    said, wanted = words(answer), words(gold)
    common = sum((Counter(said) & Counter(wanted)).values())
    if not said or not wanted:
        return float(said == wanted)
    return 2 * common / (len(said) + len(wanted))


def exact_match(answer: str, gold: str) -> float:
    """1.0 where the words are the same, else 0.0."""
    return float(words(answer) == words(gold))


def nll(logprobs: torch.Tensor, answer: Sequence[int]) -> float:
    """Mean negative log-likelihood per token, nats. `logprobs`: [len(answer), vocab]."""
    return -float(logprobs.gather(1, torch.tensor(answer)[:, None]).mean())


def divergence(reference: torch.Tensor, logprobs: torch.Tensor) -> float:
    """KL(reference || logprobs), nats, mean over the places of the answer. Both: [places, vocab]."""
    return float((reference.exp() * (reference - logprobs)).sum(-1).mean())


def mean_interval(values: Sequence[float], *, seed: int = 0, draws: int = 2000) -> tuple[float, float]:
    """95% bootstrap interval of the mean of paired differences, or of anything else."""
    array = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(array), (draws, len(array)))
    low, high = np.quantile(array[picks].mean(1), (0.025, 0.975))
    return float(low), float(high)


def recovered(
    none: Sequence[float], text: Sequence[float], path: Sequence[float], *, seed: int = 0, draws: int = 2000
) -> tuple[float, tuple[float, float]]:
    """Share of what text gains over no memory that `path` gains, by mean NLL over the same questions, and its 95%
    bootstrap interval over questions."""
    table = np.array([none, text, path], dtype=np.float64)  # [3, questions]
    picks = np.random.default_rng(seed).integers(0, table.shape[1], (draws, table.shape[1]))
    none_, text_, path_ = table[:, picks].mean(-1)  # [draws] each
    gain = none_ - text_
    shares = (none_ - path_)[gain > 0] / gain[gain > 0]
    low, high = np.quantile(shares, (0.025, 0.975)) if len(shares) else (float("nan"), float("nan"))
    whole = table.mean(1)
    gained = whole[0] - whole[1]
    share = float((whole[0] - whole[2]) / gained) if gained > 0 else float("nan")
    return share, (float(low), float(high))
