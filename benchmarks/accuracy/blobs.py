"""The blobs of one conversation under any encoding, made when they are first needed, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from time import perf_counter

from benchmarks.accuracy.encodings import Encoding, Material, encoding
from inferscale_memory.engine.base import BlobRef, EncodeRequest, Engine, Span
from inferscale_memory.errors import EngineError


@dataclass(frozen=True, slots=True)
class Cost:
    """What encoding has cost. Attributes: facts kept, tokens of theirs, tokens computed, seconds."""

    facts: int = 0
    own_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.facts + other.facts,
            self.own_tokens + other.own_tokens,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
        )


class Blobs:
    """Blobs of an owner's facts, on one engine.

    Attributes:
        costs: by encoding. The tokens of blobs that others stand on are counted under their own encoding, their
            seconds under both.
    """

    def __init__(
        self,
        engine: Engine,
        owner: str,
        material: Material,
        ids: Sequence[tuple[int, ...]],
        preamble: tuple[int, ...],
    ) -> None:
        self._engine = engine
        self._owner = owner
        self._material = material
        self._ids = ids
        self._preamble = preamble
        self._keys: dict[tuple[str, int, int], str] = {}  # by encoding, where its chain begins, and place
        self.costs: dict[str, Cost] = {}

    @cached_property
    def preamble(self) -> str:
        """Key of the preamble's blob."""
        request = EncodeRequest(self._owner, self._preamble, (Span(0, len(self._preamble)),))
        return self._kept(request)[0]

    def keys(self, how: Encoding, places: Sequence[int]) -> dict[int, str]:
        """The key of each place. A chain begins with the first of `places`."""
        first = min(places) if how.name == "chain" else 0
        began = perf_counter()
        cost = Cost()
        for group in self._groups(how, places, first):
            if any((how.name, first, place) not in self._keys for place in group):
                request = self._request(how, group)
                for place, key in zip(group, self._kept(request), strict=True):
                    self._keys[how.name, first, place] = key
                own = sum(len(self._ids[place]) for place in group)
                cost += Cost(len(group), own, len(request.ids) - request.base_tokens)
        if cost.facts:
            spent = Cost(cost.facts, cost.own_tokens, cost.tokens, perf_counter() - began)
            self.costs[how.name] = self.costs.get(how.name, Cost()) + spent
        return {place: self._keys[how.name, first, place] for place in places}

    def _groups(self, how: Encoding, places: Sequence[int], first: int) -> list[list[int]]:
        """Places that one pass encodes, in an order in which every blob finds those that it stands on."""
        if how.name == "chain":
            return [sorted(places)]
        if how.group is not None:
            of = [how.group(self._material, place) for place in range(len(self._ids))]
            wanted = {of[place] for place in places}
            groups = groupby(range(len(of)), key=of.__getitem__)
            return [list(members) for number, members in groups if number in wanted]
        if how.base == how.name:
            return [[place] for place in sorted(self._all_below(how, places, first))]
        return [[place] for place in places]

    def _all_below(self, how: Encoding, places: Sequence[int], first: int) -> set[int]:
        """`places`, and every place that one of them stands on, as far as it has no blob yet."""
        found: set[int] = set()
        waiting = list(places)
        while waiting:
            place = waiting.pop()
            if place not in found and (how.name, first, place) not in self._keys:
                found.add(place)
                waiting += how.context(self._material, place)
        return found

    def _request(self, how: Encoding, group: Sequence[int]) -> EncodeRequest:
        """One encode that keeps `group`. What does not fit before it is left out from the front."""
        ids = list(self._preamble) if how.preamble else []
        context = [] if how.group else how.context(self._material, group[0])
        room = self._engine.max_model_len - 2 - sum(len(self._ids[place]) for place in group)
        while context and len(ids) + sum(len(self._ids[place]) for place in context) > room:
            del context[0]
        base: tuple[BlobRef, ...] = ()
        if how.base is not None:
            below = self.keys(encoding(how.base), context) if how.base != how.name else None
            names = [below[place] if below else self._keys[how.name, 0, place] for place in context]
            standing = [
                (self.preamble, len(ids)),
                *zip(names, (len(self._ids[p]) for p in context), strict=True),
            ]
            base = tuple(BlobRef(key, tokens) for key, tokens in standing)
        for place in context:
            ids += self._ids[place]
        spans = []
        for place in group:
            spans.append(Span(len(ids), len(ids) + len(self._ids[place])))
            ids += self._ids[place]
        return EncodeRequest(self._owner, tuple(ids), tuple(spans), base=base)

    def _kept(self, request: EncodeRequest) -> list[str]:
        [result] = self._engine.encode([request])
        if not result.refs:
            raise EngineError(f"an encode failed ({result.error}): give the engine more room for blobs")
        return [ref.key for ref in result.refs]
