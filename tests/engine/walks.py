"""Answers that a grammar lets through, drawn at random: what a model could say, whatever the model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.hf.grammar import Grammars
from tests.models import VOCAB, tiny_tokenizer

MOST = 400
"""Tokens after which a walk is given up."""
_CLOSING = ('"', "}", "]", ",")


@cache
def _grammars() -> Grammars:
    tokenizer = tiny_tokenizer()
    return Grammars(tokenizer, VOCAB, [tokenizer.eos_token_id])


@cache
def _closing() -> torch.Tensor:
    tokenizer = tiny_tokenizer()
    texts = [tokenizer.decode([token]) for token in range(VOCAB)]
    return torch.tensor([12.0 if any(sign in text for sign in _CLOSING) else 1.0 for text in texts])


def answers(schema: Any, count: int = 20, *, seed: int = 0) -> Iterator[str]:
    """Finished answers within `schema`; walks that do not end are left out."""
    options = SamplingOptions(json_schema=schema)
    assert options.schema is not None
    tokenizer, choose = tiny_tokenizer(), random.Random(seed)
    for _ in range(count):
        constraint = _grammars().constraint(options.schema)
        ids: list[int] = []
        while len(ids) < MOST:
            allowed = constraint.allowed(torch.zeros(VOCAB)) == 0
            weights = torch.where(allowed, _closing() ** min(3.0, len(ids) / 60), 0.0)
            token = choose.choices(range(VOCAB), weights.tolist())[0]
            constraint.accept(token)
            if token == tokenizer.eos_token_id:
                yield tokenizer.decode(ids)
                break
            ids.append(token)


def lets_through(schema: Any, text: str) -> bool:
    """Whether a model could give `text` as a whole answer."""
    options = SamplingOptions(json_schema=schema)
    assert options.schema is not None
    grammar = xgrammar.Grammar.from_json_schema(options.schema, any_whitespace=False, separators=(",", ":"))
    return bool(_is_grammar_accept_string(grammar, text))
