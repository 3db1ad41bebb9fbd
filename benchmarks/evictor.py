"""Other people's memories, as many as the device tier holds: asking for them pushes everything else to the host.

What is pushed out is what a busy server pushes out. Owners share the tier, and whoever holds most gives way first: so
the others are many, and each has less than anybody who is measured. It must be shown, not believed: a completion's
`promoted_tokens` says what came back from the host.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inferscale_memory.engine.base import Completion, EncodeRequest, SamplingOptions, Span
from inferscale_memory.errors import EngineError
from inferscale_memory.prompt import Prompt, Segment

_FACT = 16
"""Tokens of each owner's only fact."""
_AT_ONCE = 64


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
        draw = random.Random(0)
        special = set(engine.tokenizer.all_special_ids)
        usual = [token for token in range(len(engine.tokenizer)) if token not in special]
        self._suffix = Segment(tuple(usual[:4]))
        requests = [
            EncodeRequest(
                f"user:somebody else {number}", tuple(draw.choices(usual, k=_FACT)), (Span(0, _FACT),)
            )
            for number in range(-(-tokens // _FACT))
        ]
        self._prompts: list[Prompt] = []
        for request, result in zip(requests, engine.encode(requests), strict=True):
            if not result.refs:
                raise EngineError(f"what is to fill the device tier could not be encoded: {result.error}")
            fact = Segment(request.ids, result.refs[0].key)
            self._prompts.append(Prompt(request.owner, (fact, self._suffix)))

    def evict(self) -> None:
        """Ask for all of it. Raises EngineError when it was not injected: then nothing has given way."""
        self._serial += 1
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for done in threads.map(self._ask, self._prompts):
                if done.injected_tokens < _FACT:
                    raise EngineError(
                        f"what is to fill the device tier was not injected ({done.refused}): give --host-bytes more"
                    )

    def _ask(self, prompt: Prompt) -> Completion:
        done: Completion = self._engine.generate(
            prompt.salted(f"evictor {self._serial}"), SamplingOptions(max_tokens=1, ignore_eos=True)
        )
        return done
