"""What a fact is encoded behind in its session: the turns before it, laid out as ids to encode.

Pure functions over token ids. A window must depend on the turns up to its fact alone, never on what else is
asked for: then later encodes of the session begin with the same ids, and the engine's prefix cache has them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inferscale_memory.errors import PromptError


@dataclass(frozen=True, slots=True)
class Turn:
    """One line that can be context or be kept: a message of the session, or a fact.

    Attributes:
        ids: its token ids.
        tag: its name, by which it is forgotten; None for text that nobody will ask to forget.
    """

    ids: tuple[int, ...]
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """The ids of one encode, and what of it is kept.

    Attributes:
        ids: encode preamble, window, neighbours and facts, as they stand.
        spans: half-open ranges (start, stop) that are kept: ordered, disjoint, not empty.
        kept: one per span: index of the turn it says; (0,) where there is one fact only.
        mentions: (tag, position where it begins) of every tagged turn in `ids`, kept or context, in order.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    kept: tuple[int, ...]
    mentions: tuple[tuple[str, int], ...]


def window_start(index: int, w: int) -> int:
    """Index of the first turn in the window of turn `index`.

    It moves in steps of w: w to 2w - 1 turns stand before the fact (in the first 2w turns of a session, all),
    and w consecutive facts share their window's beginning. With w = 0 the fact stands alone.
    """
    return max(0, (index // w - 1) * w) if w > 0 else index


def plan_session(
    turns: Sequence[Turn], *, keep: Collection[int], preamble: tuple[int, ...], w: int, max_tokens: int
) -> list[EncodePlan]:
    """Encodes that together keep every turn of `keep` once, each behind its window.

    Turns with the same window share an encode. A window that outgrows the room loses its oldest turns, down
    to half of it: cutting just enough would move it with every turn, and no two encodes would share a prefix.

    Args:
        turns: one session from its beginning, in order.
        keep: indices of the turns to keep.
        preamble: the encode preamble.
        w: turns of context.
        max_tokens: most tokens of one encode.

    Raises:
        PromptError: a turn of `keep` does not exist, is empty, or does not fit even alone.
    """
    room = max_tokens - len(preamble)
    shared: dict[int, list[int]] = {}
    for index in sorted(set(keep)):
        if not 0 <= index < len(turns):
            raise PromptError(f"No turn {index} in a session of {len(turns)}: pass the whole session.")
        _check_fits(turns[index], room)
        shared.setdefault(_fitted_start(turns, index, w, room), []).append(index)
    plans = []
    for start, kept in shared.items():
        ids, spans, mentions = _laid_out(preamble, turns[start : kept[-1] + 1])
        plans.append(EncodePlan(ids, tuple(spans[index - start] for index in kept), tuple(kept), mentions))
    return plans


def _fitted_start(turns: Sequence[Turn], index: int, w: int, room: int) -> int:
    """`window_start`, moved on where the window has outgrown the room. Looks at no turn behind `index`."""
    start, size = window_start(index, w), 0
    for position in range(start, index + 1):
        size += len(turns[position].ids)
        if size > room:
            while start < position and size > room // 2:
                size -= len(turns[start].ids)
                start += 1
        if size > room:  # a turn that fits nowhere is context of nothing
            start, size = position + 1, 0
    return start


def _check_fits(fact: Turn, room: int) -> None:
    if not fact.ids:
        raise PromptError("A fact without tokens cannot be kept: leave out facts whose text is empty.")
    if len(fact.ids) > room:
        raise PromptError(
            f"A fact of {len(fact.ids)} tokens does not fit into an encode that has room for {max(0, room)}: "
            "shorten it, or raise max_tokens."
        )


def _laid_out(
    preamble: tuple[int, ...], turns: Sequence[Turn]
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[tuple[str, int], ...]]:
    """Ids, the span of every turn, and mentions."""
    ids, spans, mentions = list(preamble), [], []
    for turn in turns:
        if turn.tag is not None:
            mentions.append((turn.tag, len(ids)))
        spans.append((len(ids), len(ids) + len(turn.ids)))
        ids += turn.ids
    return tuple(ids), tuple(spans), tuple(mentions)
