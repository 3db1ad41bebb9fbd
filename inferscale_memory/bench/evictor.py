"""Somebody else's memories, as many as the device tier holds: asking for them pushes everything else to the host.

What is pushed out is what a busy server pushes out: blobs that were used longer ago. It must be shown, not believed:
a completion's `promoted_tokens` says what came back from the host.
"""

from __future__ import annotations

import random
from typing import Any

from inferscale_memory.engine.base import EncodeRequest, SamplingOptions, Span
from inferscale_memory.errors import EngineError
from inferscale_memory.prompt import Prompt, Segment

_OWNER = "user:somebody else"
_FACT = 64


class Evictor:
    """Fills the device tier.

    Args:
        tokens: at least as many as the device tier holds.

    Raises:
        EngineError: its own blobs could not be made.
    """

    def __init__(self, engine: Any, tokens: int) -> None:
        self._engine = engine
        self._serial = 0
        most = max(_FACT, min(2048, (engine.max_model_len - 8) // 2))
        draw = random.Random(0)
        vocabulary = len(engine.tokenizer)
        special = set(engine.tokenizer.all_special_ids)
        usual = [token for token in range(vocabulary) if token not in special]
        self._suffix = Segment(tuple(usual[:4]))
        self._prompts: list[tuple[Segment, ...]] = []
        for start in range(0, tokens, most):
            count = -(-min(most, tokens - start) // _FACT)
            facts = [tuple(draw.choices(usual, k=_FACT)) for _ in range(count)]
            ids = tuple(token for fact in facts for token in fact)
            spans = tuple(Span(at, at + _FACT) for at in range(0, len(ids), _FACT))
            [result] = engine.encode([EncodeRequest(_OWNER, ids, spans)])
            if not result.refs:
                raise EngineError(f"what is to fill the device tier could not be encoded: {result.error}")
            self._prompts.append(
                tuple(Segment(fact, ref.key) for fact, ref in zip(facts, result.refs, strict=True))
            )

    def evict(self) -> None:
        """Ask for all of it. Raises EngineError when it was not injected: then nothing has given way."""
        for facts in self._prompts:
            self._serial += 1
            prompt = Prompt(_OWNER, (*facts, self._suffix), f"evictor {self._serial}")
            done = self._engine.generate(prompt, SamplingOptions(max_tokens=1, ignore_eos=True))
            if done.injected_tokens < _FACT * len(facts):
                raise EngineError(
                    f"what is to fill the device tier was not injected ({done.refused}): give --host-bytes more"
                )
