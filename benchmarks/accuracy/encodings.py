"""What a fact is encoded behind: the lever with the most in it, named by short strings.

    alone           nothing: no preamble, no context (the paper's w = 0)
    preamble        the canonical preamble
    window:20       the 20 turns before, without a preamble (the paper's w = 20)
    window:20+      the same behind the preamble, sliding
    anchored:20     behind the preamble, 20 to 39 turns, in steps (shared prefixes)
    session         behind the preamble, the session so far
    near:8          behind the preamble, the 8 nearest facts, the nearest last
    near:8:known    the 8 nearest of the facts before it: those known when it is written
    near:8:two      the 8 nearest, each behind its own 2 nearest
    near:6,20       6 nearest, then the 20 turns before
    stacked:8       behind the blobs of the 8 nearest of the facts before it, which are injected, not prefilled: every
                    one of those stands on its own neighbours' blobs in turn
    stacked:8:two   the same, but the blobs it stands on were encoded behind the preamble only
    chain           behind the preamble and every fact before it

A context never holds the fact itself, nor anything twice. `pinned` puts a chain of facts in front of all others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.locomo import Fact
from inferscale_memory.errors import ConfigurationError

_FORM = re.compile(
    r"(?P<name>alone|preamble|session|chain)|window:(?P<window>\d+)(?P<plus>\+?)|anchored:(?P<anchored>\d+)"
    r"|near:(?P<near>\d+)(?P<which>:known|:two)?(,(?P<turns>\d+))?"
    r"|stacked:(?P<stacked>\d+)(?P<floor>:two)?"
)


@dataclass(frozen=True, slots=True)
class Material:
    """An owner's facts. Attributes: similarity: [facts, facts], float32, cosines."""

    facts: Sequence[Fact]
    similarity: NDArray[np.float32]

    def nearest(self, place: int, n: int, among: Sequence[int]) -> list[int]:
        """The n of `among` that are nearest to fact `place`, the nearest last."""
        others = np.array([other for other in among if other != place], dtype=np.int64)
        ranked = others[np.argsort(-self.similarity[place, others], kind="stable")[:n]]
        return [int(other) for other in ranked[::-1]]

    def central(self, count: int, n: int = 8) -> list[int]:
        """The `count` facts that are oftenest among the n nearest of others, in order: a stand-in for what an app would
        pin."""
        everything = range(len(self.facts))
        often = np.zeros(len(self.facts), dtype=np.int64)
        for place in everything:
            often[self.nearest(place, n, everything)] += 1
        return sorted(int(place) for place in np.argsort(-often, kind="stable")[:count])


@dataclass(frozen=True, slots=True)
class Encoding:
    """A named way to encode.

    Attributes:
        name: as above.
        preamble: whether the canonical preamble stands first.
        context: places of the facts that stand before a fact, in order.
        group: of a place, where its context is the whole group so far: one pass encodes a group.
        base: name of the encoding whose blobs the context is taken from; None where it is prefilled.
    """

    name: str
    preamble: bool
    context: Callable[[Material, int], list[int]]
    group: Callable[[Material, int], int] | None = None
    base: str | None = None


def encoding(name: str) -> Encoding:
    """The encoding of that name. Raises ConfigurationError when there is none."""
    found = _FORM.fullmatch(name)
    if found is None:
        raise ConfigurationError(
            f"no encoding is called {name!r}: alone, preamble, window:N, window:N+, anchored:N, session, near:N, "
            "near:N:known, near:N:two, near:N,W, stacked:N, stacked:N:two and chain are"
        )
    parts = found.groupdict()
    if name == "session":
        return Encoding(name, True, _session, group=lambda material, place: material.facts[place].session)
    if name == "chain":
        return Encoding(name, True, _all, group=lambda material, place: 0)
    if parts["name"]:
        return Encoding(name, name != "alone", _nothing)
    if parts["window"]:
        w = int(parts["window"])
        return Encoding(name, bool(parts["plus"]), lambda material, place: _turns(material, place, w))
    if parts["anchored"]:
        w = int(parts["anchored"])
        return Encoding(name, True, lambda material, place: _anchored(material, place, w))
    if parts["stacked"]:
        n = int(parts["stacked"])
        base = "preamble" if parts["floor"] else name
        return Encoding(name, True, lambda material, place: _near(material, place, n, 0, ":known"), base=base)
    n, w, which = int(parts["near"]), int(parts["turns"] or 0), parts["which"]
    return Encoding(name, True, lambda material, place: _near(material, place, n, w, which))


def pinned(how: Encoding, front: Sequence[int]) -> Encoding:
    """`how` behind a chain: those of the facts `front` that were there before a fact stand before its context, and
    nothing else before each other.

    Raises:
        ConfigurationError: `how` does not stand on its own blobs.
    """
    if how.base != how.name:
        raise ConfigurationError(f"facts are pinned before stacked:N, not before {how.name}")

    def context(material: Material, place: int) -> list[int]:
        before = [other for other in front if other < place]
        rest = [] if place in front else how.context(material, place)
        return before + [other for other in rest if other not in front]

    name = f"{how.name} pinned {len(front)}"
    return replace(how, name=name, context=context, base=name)


def _nothing(material: Material, place: int) -> list[int]:
    return []


def _all(material: Material, place: int) -> list[int]:
    return list(range(place))


def _session(material: Material, place: int) -> list[int]:
    return [other for other in range(place) if material.facts[other].session == material.facts[place].session]


def _turns(material: Material, place: int, w: int) -> list[int]:
    return list(range(max(0, place - w), place))


def _anchored(material: Material, place: int, w: int) -> list[int]:
    session = _session(material, place)
    return session[max(0, (len(session) // w - 1) * w) :] if w else []


def _near(material: Material, place: int, n: int, w: int, which: str | None) -> list[int]:
    everything = range(len(material.facts)) if which != ":known" else range(place)
    window = _turns(material, place, w)
    nearest = [other for other in material.nearest(place, n, everything) if other not in window]
    if which == ":two":
        second = (near for other in nearest for near in material.nearest(other, 2, everything))
        nearest = [near for near in dict.fromkeys(second) if near != place and near not in nearest] + nearest
    return nearest + window
