"""Which requests under way hold which facts, so that forgetting one finds them without asking each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from inferscale_memory.connector.residency import Name


class Running:
    """Names by request and requests by name, with the position (tokens) where each name first stands."""

    def __init__(self) -> None:
        self._names: dict[str, Mapping[Name, int]] = {}
        self._holders: dict[Name, set[str]] = {}

    def __len__(self) -> int:
        """Requests remembered."""
        return len(self._names)

    def add(self, request: str, mentions: Iterable[tuple[Name, int]]) -> None:
        """A request begins that holds these names."""
        first: dict[Name, int] = {}
        for name, at in mentions:
            if at < first.get(name, at + 1):
                first[name] = at
        if not first:
            return
        self._names[request] = first
        for name in first:
            self._holders.setdefault(name, set()).add(request)

    def remove(self, request: str) -> Mapping[Name, int]:
        """The request has ended; what it held."""
        names = self._names.pop(request, {})
        for name in names:
            holders = self._holders[name]
            holders.discard(request)
            if not holders:
                del self._holders[name]
        return names

    def holding(self, names: Set[Name]) -> dict[str, dict[Name, int]]:
        """The requests that hold any of `names`: which ones, and where they first stand."""
        found: dict[str, dict[Name, int]] = {}
        for name in names & self._holders.keys():
            for request in self._holders[name]:
                found.setdefault(request, {})[name] = self._names[request][name]
        return found
