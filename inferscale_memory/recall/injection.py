"""How memories are encoded and placed: the options of it, and their defaults, which were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from inferscale_memory.arguments import (
    as_count,
    as_mapping,
    as_number,
    as_text,
    as_words,
    check_keys,
    refusal,
)
from inferscale_memory.facts.scope import IDS
from inferscale_memory.prompt.template import DEFAULT_HEADING, DEFAULT_SYSTEM
from inferscale_memory.recall.order import ORDERS

_LONGEST_GAP = 1e9
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Injection:
    """How memories are encoded and placed.

    Attributes:
        k: how many memories a question brings up, unless the call says.
        neighbours: behind how many of the nearest facts that were there before it a fact is encoded. Those that have
            blobs are injected, so that hardly more than the fact's own tokens is computed.
        w: turns of context a fact is encoded behind, directly before it: with neighbours the last w; without, from w
            to 2w - 1 of them, or the whole session if shorter, and a session's facts share encodes.
        whole: while all that the ids of a question remember fits so many tokens, all of it stands in the prompt, in the
            order in which it was written, instead of the k nearest. Each fact is then encoded behind all before it
            that carry its ids, and injecting them is exact where the conversation has no system text of its own. 0 for
            never.
        pinned: name of a metadata key. Memories of which it is true stand in every prompt of their ids, besides the k
            and in front, in the order in which they were written; others are encoded behind them. "" for none.
        tokens: most tokens of memories in a prompt, pinned ones included; the least relevant are left out. 0 for as
            many as there is room for.
        session_gap: seconds between two turns that end a session. A conversation with a run_id is one session.
        text_last: how many of the most relevant memories are prefilled as text behind the injected ones; they
            then attend to all others.
        order: in which the memories stand: "best_last", the most relevant nearest to the question, "chronological", as
            they were said, or "sessions", each session together and as it was said, that of the most relevant last.
        heading: stands above the memories.
        system: system text of conversations that bring none.
    """

    k: int = 20
    neighbours: int = 8
    w: int = 0
    whole: int = 0
    pinned: str = ""
    tokens: int = 0
    session_gap: float = 3600.0
    text_last: int = 0
    order: str = "best_last"
    heading: str = DEFAULT_HEADING
    system: str = DEFAULT_SYSTEM

    def __post_init__(self) -> None:
        for name in ("k", "neighbours", "w", "whole", "tokens", "text_last"):
            self._settle(name, as_count(getattr(self, name), f"injection.{name}"))
        for name in ("pinned", "heading", "system", "order"):
            self._settle(name, as_text(getattr(self, name), f"injection.{name}"))
        if self.pinned in IDS:
            raise refusal("injection.pinned", self.pinned, "the name of a metadata key")
        if self.order not in ORDERS:
            raise refusal("injection.order", self.order, f"one of {', '.join(ORDERS)}")
        as_words(self.heading, "injection.heading")
        gap = as_number(self.session_gap, "injection.session_gap", least=0, most=_LONGEST_GAP)
        if not gap:
            raise refusal("injection.session_gap", self.session_gap, "more than 0 seconds")
        self._settle("session_gap", gap)

    def _settle(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def in_company(self) -> bool:
        """Whether facts are encoded behind others than the turns before them."""
        return bool(self.neighbours or self.whole or self.pinned)

    @classmethod
    def read(cls, options: Injection | Mapping[str, Any] | None) -> Injection:
        """Raises ConfigurationError on an option that does not exist."""
        if options is None or isinstance(options, Injection):
            return options or cls()
        given = as_mapping(options, "injection")
        check_keys(given, [field.name for field in fields(cls)], "injection")
        return cls(**given)
