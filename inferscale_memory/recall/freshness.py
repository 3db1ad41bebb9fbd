"""Whether the memories of a prompt still exist in the words in which they were put there."""

from __future__ import annotations

from collections.abc import Sequence

from inferscale_memory.facts.text import Words
from inferscale_memory.journal import Epoch, Journal
from inferscale_memory.recall.results import Prepared
from inferscale_memory.recall.retrieved import RetrievedMemory


class Freshness:
    """Asks the journal. While its epoch is that of the prompt, nothing can have gone, and no memory is looked up."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def wordings(self, ids: Sequence[str]) -> dict[str, str]:
        """Id -> digest of the line it has now, of those that exist."""
        return self._wordings(ids)[1]

    def gone(self, prepared: Prepared) -> list[RetrievedMemory]:
        """The memories of a prompt that were forgotten or reworded since it was prepared."""
        memories = [memory for memory in prepared.memories if not memory.foreign]
        if not memories or (prepared.epoch is not None and prepared.epoch == self._journal.epoch()):
            return []
        return self._changed(memories)[1]

    def unchanged(self, prepared: Prepared) -> tuple[bool, Epoch | None]:
        """Whether the journal knows every memory of a prompt in the words that it has there, and the epoch in which
        that is so."""
        if not prepared.memories:
            return True, prepared.epoch
        if any(memory.foreign for memory in prepared.memories):
            epoch, changed = self._changed(prepared.memories)
            return not changed, epoch
        if prepared.epoch is not None and prepared.epoch == self._journal.epoch():
            return True, prepared.epoch
        epoch, changed = self._changed(prepared.memories)
        return not changed, epoch

    def _changed(self, memories: Sequence[RetrievedMemory]) -> tuple[Epoch, list[RetrievedMemory]]:
        epoch, now = self._wordings([memory.id for memory in memories])
        return epoch, [memory for memory in memories if now.get(memory.id) != memory.digest]

    def _wordings(self, ids: Sequence[str]) -> tuple[Epoch, dict[str, str]]:
        epoch, known = self._journal.known(ids)
        return epoch, {name: Words(fact.text, fact.speaker, fact.when).digest for name, fact in known.items()}
