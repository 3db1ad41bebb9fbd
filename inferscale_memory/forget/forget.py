"""What else goes when a fact goes: turns, messages and events that say it, links to it, and what is left of its bytes.

The one place for both faces and for a start after a crash. It must be done again without harm, and must never leave
to mem0 what mem0 forgets only sometimes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferscale_memory.facts.scope import Scope
from inferscale_memory.forget.entities import Entities
from inferscale_memory.forget.history import HistoryFile
from inferscale_memory.forget.qdrant_files import QdrantFiles
from inferscale_memory.journal import Forgotten, Intent, Journal

ADD, DELETE, UPDATE, EXPIRE = "add", "delete", "update", "expire"
DELETE_ALL, RESET, SCRUB = "delete_all", "reset", "scrub"


class Forgetting:
    """Finishes what the vector store and the journal's facts have begun."""

    def __init__(
        self,
        journal: Journal,
        history: HistoryFile,
        entities: Entities,
        qdrant_files: QdrantFiles,
        payload: Callable[[str], Mapping[str, Any] | None],
        forget_lines: Callable[[], None],
    ) -> None:
        """`payload` is what the store holds of a fact, `forget_lines` empties this process's own caches."""
        self._journal = journal
        self._history = history
        self._entities = entities
        self._qdrant_files = qdrant_files
        self.held = payload
        self._forget_lines = forget_lines

    def turns(self, lost: Sequence[Intent], whole: Intent | None) -> list[Forgotten]:
        """Forget the turns that say one of these facts and are not known to be its own, and all of a scope."""
        forgotten = []
        if whole is not None:
            whose = Scope.read(whole.scope)
            turns = self._journal.turns.in_scopes(lambda scope: whose.covers(Scope.read(scope)))
            forgotten.append(self._journal.forget_turns(turns))
        words: dict[str, list[tuple[str, ...]]] = {}
        for loss in lost:
            if loss.says_something:
                words.setdefault(loss.scope.split("&")[0], []).append(loss.words)
        saying = [turn for owner, these in words.items() for turn in self._journal.turns.saying(owner, these)]
        if saying:
            forgotten.append(self._journal.forget_turns(saying))
        return forgotten

    def complete(
        self, lost: Sequence[Intent], whole: Intent | None, begun: Sequence[int], *, resumed: bool = False
    ) -> None:
        """Carry out the rest, and note that the intents `begun` are finished.

        Args:
            lost: each fact that was deleted, given other words, or has expired.
            whole: the call that deletes everything of a scope, or of all.
            resumed: a crash came between, so what else was lost is not known.
        """
        self._events(lost, whole, resumed)
        words = {text for loss in lost for text in loss.words} | self._links(lost, whole, resumed)
        self._forget_lines()
        if begun:
            self._journal.intents.reduce_to_scrub(begun)
        unknown = resumed and (whole is not None or not lost)
        if self._scrub(None if unknown or (whole and whole.kind == RESET) else words):
            self._journal.intents.finish(begun)

    def enter(self, facts: Sequence[str]) -> None:
        """The last event of each of these, if mem0 did not come to write it."""
        for fact in facts:
            self._history.enter(fact, self.held(fact))

    def unlink(self, loss: Intent) -> set[str]:
        """Take the links of one fact away now: mem0 is about to link its new words."""
        return self._entities.unlink(Scope.read(loss.scope), loss.fact.__eq__)

    def _events(self, lost: Sequence[Intent], whole: Intent | None, resumed: bool) -> None:
        self._history.forget_messages(lost)
        now: dict[str, str | None] = {}
        for loss in lost:
            if loss.kind != EXPIRE:  # an expired memory stays where mem0 can show it
                payload = self.held(loss.fact) if loss.kind == UPDATE else None
                now[loss.fact] = None if payload is None else payload.get("data")
        if whole is not None:
            self._history.forget_scope(Scope.read(whole.scope))
            if resumed or whole.kind == RESET:
                left = self._history.memories()  # of any store that shares the file
                ours = self._journal.facts.tombstones(left).union(whole.facts).intersection(left)
                now |= {name: None for name in ours if self.held(name) is None}
        self._history.redact(now)

    def _links(self, lost: Sequence[Intent], whole: Intent | None, resumed: bool) -> set[str]:
        """Unlinks what was deleted; the texts of the entities that go."""
        gone: dict[str, set[str]] = {}
        for loss in lost:
            if loss.kind == DELETE:
                gone.setdefault(loss.scope if whole is None else whole.scope, set()).add(loss.fact)
        texts = set[str]()
        for scope, ids in gone.items():
            texts |= self._entities.unlink(Scope.read(scope), ids.__contains__)
        if whole is not None and resumed:
            texts |= self._entities.unlink(Scope.read(whole.scope), lambda name: self.held(name) is None)
        return texts

    def _scrub(self, words: set[str] | None) -> bool:
        done = [self._journal.scrub(), self._history.scrub(words), self._qdrant_files.scrub(words)]
        return all(done)
