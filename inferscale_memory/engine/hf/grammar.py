"""Keeps the answers of the transformers engine within a JSON schema, by masks of tokens that xgrammar makes.

Knows neither models nor blobs. Nothing is imported before a schema is asked for: xgrammar comes with vLLM, and an
installation without it must do everything else. It must never let a token through that the schema forbids.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from inferscale_memory.errors import ConfigurationError, first_line

_WORD = 32
"""Tokens per integer of a mask."""


class Grammars:
    """Compiles schemas for one model. Many threads may call it.

    Args:
        tokenizer: the model's `transformers` tokenizer.
        vocabulary: how many tokens the model has logits for.
        end: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end = sorted(end)
        self._lock = threading.Lock()
        self._compiler: Any = None

    def constraint(self, schema: str) -> Constraint:
        """What one answer of `schema` is kept within. Raises ConfigurationError where that is not possible."""
        xgrammar = _xgrammar()
        try:
            with self._lock:
                if self._compiler is None:
                    info = xgrammar.TokenizerInfo.from_huggingface(
                        self._tokenizer, vocab_size=self._vocabulary, stop_token_ids=self._end
                    )
                    self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
                # No free white space: a small model may write it for ever. One space follows a comma and a colon, as in
                # most text that models have read; without it (vLLM's grammar has none) SmolLM2 ends no string.
                grammar = self._compiler.compile_json_schema(schema, any_whitespace=False)
        except (RuntimeError, ValueError) as error:
            raise ConfigurationError(
                f"no answer can be kept within this JSON schema ({first_line(error)}): pass another one"
            ) from error
        return Constraint(xgrammar, grammar, self._vocabulary)


class Constraint:
    """The state of one answer: which tokens may come next."""

    def __init__(self, xgrammar: Any, grammar: Any, vocabulary: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = xgrammar.allocate_token_bitmask(1, vocabulary)
        self._vocabulary = vocabulary

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_terminated())

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [vocabulary] with everything forbidden at minus infinity."""
        self._matcher.fill_next_token_bitmask(self._mask)
        bits = (self._mask[0, :, None] >> torch.arange(_WORD, dtype=torch.int32)) & 1
        forbidden = bits.flatten()[: self._vocabulary] == 0
        return logits.masked_fill(forbidden.to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        """`token` was drawn from what `allowed` left."""
        self._matcher.accept_token(token)


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ConfigurationError(
            f"answers in JSON need xgrammar, which cannot be imported ({error}): install "
            "`inferscale-memory[json]`, or vLLM, which brings it"
        ) from error
    return xgrammar
