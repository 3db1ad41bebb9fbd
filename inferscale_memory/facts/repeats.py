"""Facts that say the same words are recalled once: k places in a prompt are for k things.

The store keeps every one of them, as mem0 does. Texts are the same where they differ in white space alone and have the
same owner and speaker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC
from typing import Any

from inferscale_memory.facts.scope import Scope
from inferscale_memory.facts.search_result import Placement, placement_of
from inferscale_memory.facts.text import Words, payload_of, words_of
from inferscale_memory.journal import Fact

Row = Mapping[str, Any]


def once(rows: Sequence[Row]) -> list[Row]:
    """Search results without those that repeat another.

    Of several the one stands that was said on the latest day, because what was said in between may contradict the
    others; of those of one day the first, which is most likely to have a blob. It takes the place of the most relevant.
    Rows that are pinned or belong to a whole scope all stay, and nothing else repeats them.
    """
    standing = {_said(row) for row in rows if _stays(row)}
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        if _stays(row):
            groups[row["id"]] = [row]
        elif (said := _said(row)) not in standing:
            groups.setdefault(said, []).append(row)
    return [group[0] if len(group) == 1 else min(group, key=_day_and_place) for group in groups.values()]


def lines_once(rows: Iterable[Row]) -> list[Row]:
    """Those of `rows`, in the order written, that are the first with their line, date included. What was said again on
    another day stays: its place among the others tells something."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        first.setdefault((_owner(row), words_of(payload_of(row)).line), row)
    return list(first.values())


def facts_once(facts: Sequence[Fact]) -> tuple[list[Fact], list[Fact]]:
    """The same for facts of one owner as the journal knows them: those that stand, and those that repeat them."""
    first: dict[str, Fact] = {}
    for fact in facts:
        first.setdefault(Words(fact.text, fact.speaker, fact.when).line, fact)
    stand = {fact.fact for fact in first.values()}
    return list(first.values()), [fact for fact in facts if fact.fact not in stand]


def same_words(one: Fact, other: Fact) -> bool:
    """Whether two facts of one owner say the same."""
    return Words(one.text, one.speaker, None).line == Words(other.text, other.speaker, None).line


def _stays(row: Row) -> bool:
    return placement_of(row) is not Placement.NEAREST


def _said(row: Row) -> tuple[str, str]:
    words = words_of(payload_of(row))
    return _owner(row), Words(words.text, words.speaker, None).line


def _owner(row: Row) -> str:
    return Scope.of(payload_of(row)).owner


def _day_and_place(row: Row) -> tuple[int, float, str]:
    when = words_of(payload_of(row)).when
    if when is None:
        return 0, 0.0, str(row["id"])
    moment = when if when.tzinfo else when.replace(tzinfo=UTC)
    return -when.date().toordinal(), moment.timestamp(), str(row["id"])
