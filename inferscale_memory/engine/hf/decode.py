"""From logits to tokens, and from tokens to text: the decoding half of the transformers engine.

Knows neither models nor blobs. Never splits a character between two pieces of text, and never lets out text
that may turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferscale_memory.engine.base import SamplingOptions

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""
LEAST_TEMPERATURE = 1e-2
"""Anything lower that is not greedy counts as this, as in vLLM."""


class Sampler:
    """Draws tokens of one answer, greedily or at a temperature from the nucleus, repeatably under a seed."""

    def __init__(self, options: SamplingOptions, device: torch.device) -> None:
        self._options = options
        self._generator = torch.Generator(device)
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def draw(self, logits: torch.Tensor) -> int:
        """A token by raw `logits` [vocab], float32."""
        options = self._options
        if options.temperature < GREEDY_BELOW:
            return int(logits.argmax())
        probabilities, order = (
            (logits / max(options.temperature, LEAST_TEMPERATURE)).softmax(-1).sort(descending=True)
        )
        before = probabilities.cumsum(-1) - probabilities
        nucleus = probabilities.where(before < options.top_p, 0.0)
        return int(order[torch.multinomial(nucleus, 1, generator=self._generator)])

    def logprobs(self, logits: torch.Tensor, token: int) -> dict[int, float]:
        """The top log-probabilities of raw `logits` [vocab], best first, and that of `token`."""
        scores = logits.log_softmax(-1)
        wanted = self._options.logprobs or 0
        best = scores.topk(len(scores) if wanted < 0 else min(wanted, len(scores)))
        found = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        found.setdefault(token, float(scores[token]))
        return found


class Detokenizer:
    """Text of a growing list of token ids, without special tokens unless asked, in pieces that make up the text.

    Attributes:
        text: so far, up to the first stop string.
        stopped: whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = not special
        self._stop = tuple(stop)
        self._hold = max((len(text) for text in stop), default=1) - 1
        self._ids: list[int] = []
        # Ids [context, read) are out already; they are decoded again with what follows, as the text of a
        # token depends on its neighbours.
        self._context = 0
        self._read = 0
        self._sent = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that one more token makes certain; "" while a character or a stop string is incomplete."""
        self._ids.append(token)
        self._read_on(at_end=False)
        return self._let_out(len(self.text) if self.stopped else len(self.text) - self._hold)

    def finish(self) -> str:
        """What was held back: nothing follows."""
        if not self.stopped:
            self._read_on(at_end=True)
        return self._let_out(len(self.text))

    def _read_on(self, *, at_end: bool) -> None:
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        if at_end or (len(text) > len(known) and not text.endswith("\ufffd")):
            self._context, self._read = self._read, len(self._ids)
            self._append(text[len(known) :])

    def _let_out(self, end: int) -> str:
        piece = self.text[self._sent : max(self._sent, end)]
        self._sent += len(piece)
        return piece

    def _append(self, text: str) -> None:
        begin = max(0, len(self.text) - self._hold)
        self.text += text
        found = [at for stop in self._stop if (at := self.text.find(stop, begin)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text
