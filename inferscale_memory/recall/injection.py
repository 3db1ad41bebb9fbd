"""The options that say how memories are encoded and placed. Their defaults were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import wraps
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
from inferscale_memory.deprecation import renamed, warn
from inferscale_memory.facts.scope import IDS
from inferscale_memory.prompt.template import DEFAULT_HEADING, DEFAULT_SYSTEM
from inferscale_memory.recall.order import ORDERS

_LONGEST_GAP = 1e9
"""Seconds."""


OLD_NAMES = {
    "k": "top_k",
    "w": "context_turns",
    "whole": "full_memory_tokens",
    "tokens": "max_memory_tokens",
}
"""Options that had another name one release ago: old name -> new name."""

_COUNTS = ("top_k", "neighbours", "context_turns", "full_memory_tokens", "max_memory_tokens", "text_last")


def _takes_old_names(cls: type[Injection]) -> type[Injection]:
    """The class, whose constructor also takes the old names of options, with a DeprecationWarning."""
    initialize = cls.__init__

    @wraps(initialize)
    def construct(self: Injection, *args: Any, **options: Any) -> None:
        initialize(self, *args, **renamed(options, OLD_NAMES, "injection."))

    cls.__init__ = construct  # type: ignore[method-assign]
    return cls


@_takes_old_names
@dataclass(frozen=True, slots=True)
class Injection:
    """How memories are encoded, and where they are placed in a prompt.

    Attributes:
        top_k: how many memories a question recalls, unless the call says otherwise.
        neighbours: how many of the nearest earlier facts a new fact is encoded behind. Those that have blobs are
            injected, so little more than the fact's own tokens is computed.
        context_turns: how many turns directly before a fact it is encoded behind. With neighbours these are the last
            `context_turns` turns. Without, they are from `context_turns` to `2 * context_turns - 1` turns, or the whole
            session if that is shorter, and the facts of a session share encodes.
        full_memory_tokens: token limit up to which the whole memory of a question's ids goes into the prompt, in the
            order in which it was written, instead of the `top_k` nearest. Each fact is then encoded behind all earlier
            facts of its ids, and injecting them is exact in conversations without a system text of their own. 0 turns
            this off.
        pinned: name of a metadata key. Memories for which it is true are in every prompt of their ids, before the
            `top_k` and in the order in which they were written; other facts are encoded behind them. "" turns this off.
        max_memory_tokens: most tokens of memories in a prompt, pinned ones included; the least relevant are left out.
            0 for as many as there is room for.
        session_gap: seconds between two turns after which a new session begins. A conversation with a run_id is one
            session.
        text_last: how many of the most relevant memories are prefilled as text behind the injected ones, so that they
            attend to all the others.
        order: of the memories in a prompt: "best_last", the most relevant nearest to the question; "chronological", as
            they were said; or "sessions", each session together and in its own order, the session of the most relevant
            memory last.
        heading: the line above the memories.
        system: system text of conversations that bring none.
    """

    top_k: int = 20
    neighbours: int = 8
    context_turns: int = 0
    full_memory_tokens: int = 0
    pinned: str = ""
    max_memory_tokens: int = 0
    session_gap: float = 3600.0
    text_last: int = 0
    order: str = "best_last"
    heading: str = DEFAULT_HEADING
    system: str = DEFAULT_SYSTEM

    def __post_init__(self) -> None:
        for name in _COUNTS:
            self._set(name, as_count(getattr(self, name), f"injection.{name}"))
        for name in ("pinned", "heading", "system", "order"):
            self._set(name, as_text(getattr(self, name), f"injection.{name}"))
        if self.pinned in IDS:
            raise refusal("injection.pinned", self.pinned, "the name of a metadata key")
        if self.order not in ORDERS:
            raise refusal("injection.order", self.order, f"one of {', '.join(ORDERS)}")
        as_words(self.heading, "injection.heading")
        gap = as_number(self.session_gap, "injection.session_gap", least=0, most=_LONGEST_GAP)
        if not gap:
            raise refusal("injection.session_gap", self.session_gap, "more than 0 seconds")
        self._set("session_gap", gap)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def in_company(self) -> bool:
        """Whether facts are encoded behind other facts, and not behind turns alone."""
        return bool(self.neighbours or self.full_memory_tokens or self.pinned)

    @property
    def k(self) -> int:
        """The old name of `top_k`."""
        return int(self._renamed("k"))

    @property
    def w(self) -> int:
        """The old name of `context_turns`."""
        return int(self._renamed("w"))

    @property
    def whole(self) -> int:
        """The old name of `full_memory_tokens`."""
        return int(self._renamed("whole"))

    @property
    def tokens(self) -> int:
        """The old name of `max_memory_tokens`."""
        return int(self._renamed("tokens"))

    def _renamed(self, old: str) -> Any:
        new = OLD_NAMES[old]
        warn(f"Injection.{old} is now Injection.{new}: the old name works in this release and goes in the next")
        return getattr(self, new)

    @classmethod
    def read(cls, options: Injection | Mapping[str, Any] | None) -> Injection:
        """An `Injection` from a dictionary of options. Raises ConfigurationError on an unknown option."""
        if options is None or isinstance(options, Injection):
            return options or cls()
        given = renamed(as_mapping(options, "injection"), OLD_NAMES, "injection.")
        check_keys(given, [field.name for field in fields(cls)], "injection")
        return cls(**given)
