"""One configuration to be measured, and the grid of those that a command asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from benchmarks.accuracy.encodings import encoding
from benchmarks.accuracy.encodings import pinned as behind
from inferscale_memory.errors import ConfigurationError

ORDERS = ("best-last", "chronological", "sessions")
"""Most relevant last; as they were said; by session in the order of their best fact, the best session last, and within
one as they were said."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to put memories in front of a question.

    Attributes:
        path: "none", "text" or "injected".
        encoding: what facts are encoded behind; "" where nothing is injected.
        order: one of `ORDERS`.
        m: how many of the best stand as text behind all others.
        k: how many are recalled; 0 without memory.
        tokens: instead of k, as many of the most relevant as fit so many tokens.
        budget: tokens; then not k facts are recalled, but all of the latest that fit stand in the order they were said.
        key_scale: what the keys of facts are multiplied by.
        pinned: how many facts, the same for every question, stand in front as well.
    """

    path: str
    encoding: str = ""
    order: str = ""
    m: int = 0
    k: int = 0
    budget: int = 0
    key_scale: float = 1.0
    tokens: int = 0
    pinned: int = 0

    @property
    def name(self) -> str:
        """Short and unique."""
        many = f"all {self.budget}" if self.budget else f"k={self.k}"
        many = f"{self.tokens} tokens" if self.tokens else many
        parts = [self.path, self.encoding, self.order, many if self.path != "none" else ""]
        parts += [f"m={self.m}" if self.m else "", f"x{self.key_scale:g}" if self.key_scale != 1.0 else ""]
        parts += [f"pinned {self.pinned}" if self.pinned else ""]
        return " ".join(part for part in parts if part)

    @property
    def as_text(self) -> Setting:
        """The same prompt, read."""
        return replace(self, path="text", encoding="", m=self._moved)

    @property
    def references(self) -> tuple[Setting, ...]:
        """The text paths whose distributions it is compared with."""
        if self.path == "text":
            return (self.plainest, replace(self.plainest, order="best-last")) if not self.budget else ()
        return (self.as_text,) if self.path == "injected" else ()

    @property
    def plainest(self) -> Setting:
        """Text in the same order, nothing moved and nothing scaled."""
        return replace(self, path="text", encoding="", m=0, key_scale=1.0)

    @property
    def _moved(self) -> int:
        return 0 if self.order == "best-last" else self.m  # there the best are the last already

    def row(self) -> dict[str, Any]:
        """Its fields for a report."""
        return asdict(self)


NONE = Setting("none")


def grid(
    *,
    encodings: Sequence[str],
    orders: Sequence[str],
    ms: Sequence[int],
    ks: Sequence[int],
    budgets: Sequence[int] = (),
    key_scales: Sequence[float] = (1.0,),
    tokens: Sequence[int] = (),
    text_orders: Sequence[str] = (),
    pinned: Sequence[int] = (0,),
) -> list[Setting]:
    """Every combination, with all the text paths that they are held against, and no memory; text first.

    Args:
        text_orders: orders in which memories stand as text only.

    Raises:
        ConfigurationError: an order or an encoding that does not exist, or a count out of range.
    """
    for order in (*orders, *text_orders):
        if order not in ORDERS:
            raise ConfigurationError(f"no order is called {order!r}: {', '.join(ORDERS)} are")
    for name in encodings:
        encoding(name)
    if (
        any(count < 1 for count in (*ks, *tokens))
        or any(m < 0 for m in ms)
        or any(s <= 0 for s in key_scales)
        or any(count < 0 for count in pinned)
    ):
        raise ConfigurationError(
            "k and tokens must be at least 1, m and pinned at least 0, and a scale above 0"
        )
    for name in encodings if any(pinned) else ():
        behind(encoding(name), ())  # refuses those that cannot
    recalled = [(k, 0) for k in ks] + [(0, count) for count in tokens]
    injected = [
        Setting("injected", name, order, m, k, 0, scale, count, front)
        for (k, count), order, name, m, scale, front in product(
            recalled, orders, encodings, ms, key_scales, pinned
        )
        if (m <= k or count) and name != "chain"
    ]
    injected += [Setting("injected", "chain", "chronological", 0, 0, budget) for budget in budgets]
    texts = [
        Setting("text", "", order, 0, k, tokens=count, pinned=front)
        for (k, count), order, front in product(recalled, (*orders, *text_orders), pinned)
    ]
    texts += [Setting("text", "", "chronological", 0, 0, budget) for budget in budgets]
    texts += [setting.as_text for setting in injected]
    return list(dict.fromkeys([NONE, *texts, *injected]))
