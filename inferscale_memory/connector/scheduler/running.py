"""Which unfinished requests contain which facts, so that forgetting a fact finds them without a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from inferscale_memory.connector.scheduler.prefix_cache_index import Name


class Running:
    """Names by request and requests by name, with the first position (in tokens) of each name."""

    def __init__(self) -> None:
        self._names: dict[str, Mapping[Name, int]] = {}
        self._holders: dict[Name, set[str]] = {}

    def __len__(self) -> int:
        """How many requests contain any name."""
        return len(self._names)

    def add(self, request: str, mentions: Iterable[tuple[Name, int]]) -> None:
        """Enter a request that contains these names."""
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
        """Remove a request that has ended. Returns its names."""
        names = self._names.pop(request, {})
        for name in names:
            holders = self._holders[name]
            holders.discard(request)
            if not holders:
                del self._holders[name]
        return names

    def holding(self, names: Set[Name]) -> dict[str, dict[Name, int]]:
        """The requests that contain any of `names`, each with the first positions of those that it contains."""
        found: dict[str, dict[Name, int]] = {}
        for name in names & self._holders.keys():
            for request in self._holders[name]:
                found.setdefault(request, {})[name] = self._names[request][name]
        return found
