"""The write path: the turn log before mem0 runs, the journal in step with mem0's store, encoding behind both.

A fact is acknowledged when the store and the journal have it. It must never lose a fact because of a blob.

Not yet here (the drop-in issue adds it): reconciling store and journal after a crash between the two, and
scrubbing forgotten text from mem0's history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

from mem0.exceptions import ValidationError as Mem0ValidationError

from inferscale_memory.journal import Fact, Forgotten, Journal, NewTurn, Turn
from inferscale_memory.memory.at_hand import AtHand
from inferscale_memory.memory.encoder import Encoder
from inferscale_memory.memory.engines import LazyEngine
from inferscale_memory.memory.mirror import Rows
from inferscale_memory.memory.plan import fact_words
from inferscale_memory.memory.scope import Scope, fact_tag, said_tag
from inferscale_memory.memory.words import words_of


@dataclass(slots=True)
class _Batch:
    """What one call of the user's does: its turns, the facts it writes, and what it makes forgotten.

    A thread of a cancelled coroutine may still write when the call has ended: `open` says whether what it does
    is still carried out with the rest.
    """

    path: WritePath
    scope: Scope = field(default_factory=Scope)
    turns: list[Turn] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    written: list[str] = field(default_factory=list)
    forgotten: list[Forgotten] = field(default_factory=list)
    open: bool = True
    lock: RLock = field(default_factory=RLock)


# Which call is under way. A context variable, because asyncio.to_thread carries it along.
_under_way: ContextVar[_Batch | None] = ContextVar("inferscale_write", default=None)


def owner_under_way() -> str | None:
    """Whose words the call under way writes, if there is one."""
    batch = _under_way.get()
    return None if batch is None else batch.scope.owner or None


def turns_under_way() -> Sequence[Turn]:
    """The turns the call under way is about."""
    batch = _under_way.get()
    return () if batch is None else tuple(batch.turns)


class WritePath:
    """Told by the face what is said, and by the mirror what becomes of facts."""

    def __init__(self, journal: Journal, engine: LazyEngine, encoder: Encoder, at_hand: AtHand) -> None:
        self._journal = journal
        self._engine = engine
        self._encoder = encoder
        self._at_hand = at_hand

    # -- told by the face ------------------------------------------------------------------------------------

    @contextmanager
    def saying(self, scope: Scope, turns: Sequence[NewTurn], again: Sequence[Turn] = ()) -> Iterator[None]:
        """Log `turns`, and link the facts that are written within the block to them. They are encoded
        together, when the block is left. What mem0 refuses is taken out of the log again. Turns that are said
        `again` are in the log, and stay there."""
        logged = list(again) or self._journal.append_turns(
            scope.key, turns, one_session=scope.run_id is not None
        )
        batch = _Batch(self, scope, logged)
        try:
            with self._collected(batch):
                yield
        except (ValueError, Mem0ValidationError):
            if not batch.written and not again:
                self._journal.redact_turns(turn.number for turn in logged)
            raise

    @contextmanager
    def collected(self) -> Iterator[None]:
        """What is forgotten within the block is taken from the engine at once when it is left."""
        with self._collected(_Batch(self)):
            yield

    @contextmanager
    def _collected(self, batch: _Batch) -> Iterator[None]:
        token = _under_way.set(batch)
        try:
            yield
        finally:
            _under_way.reset(token)
            self._carry_out(batch)

    # -- told by the mirror ----------------------------------------------------------------------------------

    def expect(self, ids: Sequence[str]) -> None:
        self._journal.allow(list(ids))

    def written(self, rows: Rows) -> None:
        with self._batch() as batch:
            known = self._journal.facts(fact for fact, _ in rows)
            new = []
            for name, payload in rows:
                if name in known:  # mem0 tries again, record by record, what failed as a batch
                    self._reword(batch, known[name], payload)
                elif (fact := self._read(name, payload, batch)) is not None:
                    new.append(fact)
            batch.written += self._journal.write_facts(new)

    def updated(self, fact: str, payload: Mapping[str, Any]) -> None:
        known = self._journal.facts([fact]).get(fact)
        if known is None:
            self.written([(fact, payload)])
            return
        with self._batch() as batch:
            self._reword(batch, known, payload)

    def deleted(self, ids: Sequence[str]) -> None:
        with self._batch() as batch:
            batch.forgotten.append(self._journal.forget_facts(list(ids)))

    def cleared(self) -> None:
        with self._batch() as batch:
            batch.forgotten.append(self._journal.forget_everything())

    # -- told by the encoder ---------------------------------------------------------------------------------

    def check(self, rows: Rows) -> None:
        """What the store holds now of facts the journal may not know, or in other words: another program
        wrote them, or a crash came between the two writes."""
        for name, payload in rows:
            self.updated(name, payload)

    # -- inside ----------------------------------------------------------------------------------------------

    @contextmanager
    def _batch(self) -> Iterator[_Batch]:
        """The batch under way, or one of its own that is carried out at once."""
        batch = _under_way.get()
        if batch is not None and batch.path is self:
            with batch.lock:
                if batch.open:
                    yield batch
                    return
        batch = _Batch(self)
        yield batch
        self._carry_out(batch)

    def _read(self, name: str, payload: Mapping[str, Any], batch: _Batch) -> Fact | None:
        """The fact behind a payload, linked to the turns of the batch it came from. None for what is no
        fact."""
        scope, words = Scope.of(payload), words_of(payload)
        if not scope.owner or not words.text:
            return None
        itself, sources = None, list[Turn]()
        if batch.turns and batch.scope == scope:
            sources = batch.turns
            # With infer=False mem0 makes one fact of every message and says which role it had.
            itself = next(
                (turn for turn in sources if _is(turn, payload) and turn.number not in batch.taken), None
            )
        if itself is not None:
            batch.taken.add(itself.number)
            sources = [itself]
        return Fact(
            name,
            scope.owner,
            scope.key,
            fact_tag(scope.owner, name),
            words.text,
            words.speaker,
            words.when,
            session=sources[-1].session if sources else None,
            turns=tuple(turn.number for turn in sources),
            verbatim=itself is not None,
        )

    def _reword(self, batch: _Batch, known: Fact, payload: Mapping[str, Any]) -> None:
        """The words of a known fact are those of `payload` now. Its turns said the old ones."""
        words = words_of(payload)
        if words.line == fact_words(known).line:
            return
        fact = Fact(
            known.fact,
            known.owner,
            known.scope,
            known.tag,
            words.text,
            words.speaker,
            words.when,
            session=known.session,
        )
        batch.forgotten.append(self._journal.reword_fact(fact))
        batch.written.append(fact.fact)

    def _carry_out(self, batch: _Batch) -> None:
        with batch.lock:
            batch.open = False
        try:
            self._drop(batch.forgotten)
        finally:
            bereaved = [fact for forgotten in batch.forgotten for fact in forgotten.bereaved]
            self._encoder.submit(dict.fromkeys([*batch.written, *bereaved]), wait=True)

    def _drop(self, forgotten: Sequence[Forgotten]) -> None:
        """Take blobs and cached blocks from the engine. An engine that was never started holds nothing."""
        keys: dict[str, dict[str, None]] = {}
        tags: dict[str, dict[str, None]] = {}
        for what in forgotten:
            for entry in what.blobs:
                keys.setdefault(entry.owner, {})[entry.key] = None
            for fact in what.facts:
                tags.setdefault(fact.owner, {})[fact.tag] = None
                for owner in Scope.read(fact.scope).owners:  # mem0 may have shown it to any of them
                    tags[fact.owner][said_tag(owner)] = None
        engine = self._engine.started
        for owner in dict.fromkeys([*keys, *tags]):
            theirs = list(keys.get(owner, ()))
            self._at_hand.drop(theirs)
            if engine is not None:
                engine.forget(owner, theirs, list(tags.get(owner, ())))


def _is(turn: Turn, payload: Mapping[str, Any]) -> bool:
    return turn.role == payload.get("role") and turn.text == payload.get("data")
