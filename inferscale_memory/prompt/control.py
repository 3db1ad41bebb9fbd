"""Keeps text that users wrote from being read as control tokens.

Facts, questions and tool results stand between the control tokens of a chat template. Where such a text
spells one (`<|im_end|>`), the tokenizer would parse it, and a stored memory could close the system turn and
open another. `split_special_tokens=True` must not be used against that: it sets a flag on the shared
tokenizer, and calls from other threads are tokenized the wrong way meanwhile (seen, transformers 5.19).
"""

from __future__ import annotations

import re
from typing import Any

_MARKUP = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and the added markup its chat template writes.

    Attributes:
        ids: their ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        template = getattr(tokenizer, "chat_template", None) or ""
        source = template if isinstance(template, str) else "\n".join(template.values())
        spelled: dict[str, int] = {}
        for index, token in tokenizer.added_tokens_decoder.items():
            # Some models' role tokens are not marked special; runs of white space are text whatever they are.
            written = _MARKUP.fullmatch(token.content) and token.content in source
            if token.content.strip() and (token.special or written):
                spelled[token.content] = index
        self.ids = frozenset(spelled.values())
        longest_first = sorted(spelled, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first))) if spelled else None

    def defuse(self, text: str) -> str:
        """`text` with a space inside whatever spells a control token: `< |im_end|>`. The rest is kept."""
        if self._spelled is not None:
            while self._spelled.search(text):  # what overlapped a broken one may still be whole
                text = self._spelled.sub(_broken, text)
        return text


def _broken(match: re.Match[str]) -> str:
    token = match.group()
    return f"{token[0]} {token[1:]}" if len(token) > 1 else " "
