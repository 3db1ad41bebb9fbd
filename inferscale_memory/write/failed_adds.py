"""How a call to `add` that failed is made again out of the turn log.

What is made again is what is still in the log: it must never bring back words that were forgotten meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from inferscale_memory.facts.scope import Scope
from inferscale_memory.journal import FailedAdd, Journal, NewTurn, Turn

RETRIED = ("metadata", "expiration_date", "infer", "memory_type", "prompt")
"""The arguments of `add` that are kept with a failed call. An LLM that was passed is none: it is no JSON."""


def said_in_vain(journal: Journal, scope: Scope, turns: Sequence[NewTurn]) -> list[Turn]:
    """The turns of a failed call about the very same messages: an app that tries again by itself has said them
    once, and is not to be answered by two sets of facts when `retry_failed` is called. Empty where there is none."""
    said = [(turn.role, turn.text) for turn in turns]
    for call in journal.failed_adds.of_scope(scope.key):
        known = journal.turns.get(call.turns)
        if [(turn.role, turn.text) for turn in known] == said:
            return known
    return []


def said_in_part(journal: Journal, scope: Scope, turns: Sequence[NewTurn]) -> list[list[Turn]]:
    """The turns of each failed call about a part of these messages, one behind the other. They are said once more, so
    those calls need not be made again."""
    said = [(turn.role, turn.text) for turn in turns]
    parts = []
    for call in journal.failed_adds.of_scope(scope.key):
        known = journal.turns.get(call.turns)
        part = [(turn.role, turn.text) for turn in known]
        places = range(len(said) - len(part) + 1)
        if 0 < len(part) < len(said) and any(said[place : place + len(part)] == part for place in places):
            parts.append(known)
    return parts


def middle(turns: Sequence[Turn]) -> int:
    """Index of the turn with which the second half of their words begins: neither the first nor behind the last."""
    sizes = list(accumulate(len(turn.text or "") for turn in turns))
    return min(range(1, len(turns)), key=lambda place: abs(2 * sizes[place - 1] - sizes[-1]))


def as_messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [
        {"role": turn.role, "content": turn.text or "", **({"name": turn.speaker} if _named(turn) else {})}
        for turn in turns
    ]


def options_again(call: FailedAdd, turns: Sequence[Turn]) -> dict[str, Any]:
    """The arguments of the call. Its facts are dated by when it was said, not by when it was understood."""
    when = turns[-1].when  # all of one call have the same
    dated = {} if when is None else {"created_at": when.isoformat()}
    return {**call.options, "metadata": {**dated, **(call.options.get("metadata") or {})}}


def _named(turn: Turn) -> bool:
    return turn.speaker not in ("", turn.role.capitalize())
