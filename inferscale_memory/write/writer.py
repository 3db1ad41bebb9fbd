"""The write path: the turn log before mem0 runs, the journal in step with mem0's store, encoding behind both.

A fact is acknowledged when the store and the journal have it, and forgotten when nothing says it any more. What a
call is about to do is noted first, so that a start after a crash can finish it. It must never lose a fact because
of a blob.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import md5
from typing import Any

from inferscale_memory.facts.expiry import expires, is_expired
from inferscale_memory.facts.scope import Scope, fact_tag, said_tag, turn_tag
from inferscale_memory.facts.text import words_of
from inferscale_memory.forget.forget import (
    ADD,
    DELETE,
    DELETE_ALL,
    EXPIRE,
    RESET,
    UPDATE,
    Forgetting,
)
from inferscale_memory.forget.outbox import Outbox
from inferscale_memory.journal import Fact, Forgotten, Intent, Journal, NewTurn, PendingForget, Turn
from inferscale_memory.storage.sqlite import is_full
from inferscale_memory.write.encoder import Encoder
from inferscale_memory.write.observer import Payload, Rows
from inferscale_memory.write.plan import fact_words
from inferscale_memory.write.unit_of_work import Batch

# Which call is under way. A context variable, because asyncio.to_thread carries it along.
_under_way: ContextVar[Batch | None] = ContextVar("inferscale_write", default=None)


def owner_under_way() -> str | None:
    """Whose words the call under way writes, if there is one."""
    batch = _under_way.get()
    return None if batch is None else batch.scope.owner or None


def call_under_way() -> Batch | None:
    """The call itself."""
    return _under_way.get()


class WritePath:
    """Told by the face what is said, and by the mirror what becomes of facts."""

    def __init__(
        self,
        journal: Journal,
        outbox: Outbox,
        encoder: Encoder,
        forgetting: Forgetting,
    ) -> None:
        self._journal = journal
        self._outbox = outbox
        self._encoder = encoder
        self._forgetting = forgetting

    # -- told by the face ------------------------------------------------------------------------------------

    @contextmanager
    def saying(self, scope: Scope, turns: Sequence[NewTurn], again: Sequence[Turn] = ()) -> Iterator[None]:
        """Log `turns`, and link the facts that are written within the block to them. They are encoded
        together, when the block is left. Where nothing came of it, and it is not kept to be made again, the turns
        are taken out of the log: the app was told so, and will say them again. Turns that are said `again` stay."""
        with self._journal.transaction():
            logged = list(again) or self._journal.turns.append(
                scope.key, turns, one_session=scope.run_id is not None
            )
            begun = self._journal.intents.begin(
                Intent(ADD, scope=scope.key, turns=tuple(turn.number for turn in logged))
            )
        batch = Batch(self, scope, logged, begun=[begun])
        try:
            with self._collected(batch):
                yield
        except BaseException:
            if not batch.written and not again and not self._journal.failed_adds.kept(logged):
                self._journal.turns.redact(turn.number for turn in logged)
                self._journal.scrub()
            raise

    @contextmanager
    def collected(self, whole: Intent | None = None) -> Iterator[None]:
        """What is lost within the block is forgotten everywhere when it is left. `whole` is a call that deletes
        everything of a scope, or of all; where it fails only what it did is forgotten."""
        batch = Batch(self, whole=whole)
        if whole is not None:
            batch.begun.append(self._journal.intents.begin(whole))
        with self._collected(batch):
            try:
                yield
            except BaseException:
                batch.whole = None
                raise

    @contextmanager
    def resumed(self, number: int, intent: Intent) -> Iterator[None]:
        """Finish within the block what was begun before a crash."""
        batch = Batch(self, begun=[number], resumed=True)
        if intent.kind == ADD:
            batch.scope, batch.turns = Scope.read(intent.scope), self._journal.turns.get(intent.turns)
        elif intent.kind in (DELETE_ALL, RESET):
            batch.whole = intent
        else:
            batch.lost.append(intent)
            batch.announced.add(intent.fact)
        with self._collected(batch):
            yield

    def expire(self, *, resumed: bool = False) -> None:
        """Facts whose time is over leave prompts, blobs, windows, turns and messages. The store keeps
        them, as mem0 does, until they are deleted."""
        ids = self._journal.facts.expired(datetime.now(UTC))
        if not ids:
            return
        expired = self._journal.facts.get(ids)
        batch = Batch(self, resumed=resumed)
        with self._collected(batch):
            for fact in expired.values():
                self._lose(batch, EXPIRE, fact.fact, fact.scope, fact.text)
            self.deleted(list(expired))

    def scrub(self, number: int) -> None:
        """Finish a call of which only the scrub was left: what it had forgotten is not known any more."""
        self._forgetting.complete([], None, [number], resumed=True)

    def said_again(self, texts: Sequence[str]) -> None:
        """What mem0 does not write, because a fact that it was shown says it already: the turns under way have said
        that fact once more, and go with it."""
        with self._batch() as batch:
            again = {fact for text in texts for fact in batch.shown.get(_digest(text), ())}
            if again and batch.turns:
                self._journal.facts.link_turns(again, [turn.number for turn in batch.turns])

    @contextmanager
    def _collected(self, batch: Batch) -> Iterator[None]:
        token = _under_way.set(batch)
        try:
            yield
        except BaseException:
            batch.cut_off = True
            raise
        finally:
            _under_way.reset(token)
            self._carry_out(batch)

    # -- told by the mirror ----------------------------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[None]:
        batch = _under_way.get()
        if batch is not None and batch.path is self and batch.enter():
            try:
                yield
            finally:
                batch.leave()
        else:
            with self.collected():
                yield

    def shown(self, rows: Rows) -> None:
        batch = _under_way.get()
        if batch is not None and batch.path is self and batch.turns:
            with batch.changing():
                for fact, payload in rows:
                    batch.shown.setdefault(str(payload.get("hash")), set()).add(fact)

    def expect(self, ids: Sequence[str]) -> None:
        batch = _under_way.get()
        if batch is not None and batch.path is self:
            batch.expected += ids
        self._journal.facts.remove_tombstones(list(ids))

    def failed(self, error: Exception) -> None:
        batch = _under_way.get()
        if batch is not None and batch.path is self and is_full(error):
            batch.full = True

    def losing(self, fact: str, held: Callable[[], Payload | None], becomes: Payload | None) -> None:
        payload = held()
        if payload is None:
            return
        if becomes is not None and is_expired(payload) and not is_expired({**payload, **becomes}):
            self._journal.facts.remove_tombstones([fact])  # it had been put away
        text = str(payload.get("data") or "")
        if becomes is not None and becomes.get("data", text) == text:
            return
        kind = DELETE if becomes is None else UPDATE
        with self._batch() as batch:
            self._lose(batch, kind, fact, Scope.of(payload).key, text)

    def losing_many(self, rows: Rows) -> None:
        with self._batch(), self._journal.transaction():
            for fact, payload in rows:
                self.losing(fact, lambda payload=payload: payload, None)  # type: ignore[misc]

    def losing_everything(self, ids: Callable[[], Sequence[str]]) -> None:
        with self._batch() as batch:
            if batch.whole is None:
                batch.whole = Intent(RESET, facts=tuple(ids()))
                batch.begun.append(self._journal.intents.begin(batch.whole))

    def written(self, rows: Rows) -> None:
        with self._batch() as batch:
            known = self._journal.facts.get(fact for fact, _ in rows)
            new = []
            for name, payload in rows:
                if name in known:  # mem0 tries again, record by record, what failed as a batch
                    self._reword(batch, known[name], payload)
                elif (fact := self._read(name, payload, batch)) is not None:
                    if is_expired(payload):  # it is in the store, as mem0 wants it, and nowhere else
                        batch.forgotten.append(self._journal.forget_turns(fact.turns))
                        self._journal.forget_facts([name])  # a start after a crash finds it in the store
                        batch.lost.append(Intent(EXPIRE, name, fact.scope, (fact.text,)))
                        batch.told.add(name)
                    else:
                        new.append(fact)
            batch.written += self._journal.facts.write(new)

    def updated(self, fact: str, payload: Mapping[str, Any]) -> None:
        known = self._journal.facts.get([fact]).get(fact)
        with self._batch() as batch:
            batch.told.add(fact)
            if known is None:
                self.written([(fact, payload)])
            else:
                self._reword(batch, known, payload)
            for loss in batch.lost:
                if loss.fact == fact and loss.kind == UPDATE:
                    self._forgetting.unlink(loss)

    def deleted(self, ids: Sequence[str]) -> None:
        with self._batch() as batch:
            forgotten = self._journal.forget_facts(list(ids))
            batch.forgotten.append(forgotten)
            batch.told.update(ids)
            # A call that was cancelled has ended without the thread that deletes for it.
            batch.lost += [
                Intent(DELETE, fact.fact, fact.scope, (fact.text,))
                for fact in forgotten.facts
                if fact.fact not in batch.announced
            ]

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
    def _batch(self) -> Iterator[Batch]:
        """The batch under way, or one of its own that is carried out at once."""
        batch = _under_way.get()
        if batch is not None and batch.path is self:
            with batch.changing() as still:
                if still:
                    yield batch
                    return
        batch = Batch(self)
        yield batch
        self._carry_out(batch)

    def _read(self, name: str, payload: Mapping[str, Any], batch: Batch) -> Fact | None:
        """The fact behind a payload, linked to the turns of the batch it came from. None for what is no
        fact."""
        scope, words = Scope.of(payload), words_of(payload)
        if not scope.owner or not words.text:
            return None
        itself, sources = None, tuple[Turn, ...]()
        if batch.turns and batch.scope == scope:
            sources = tuple(batch.turns)
            # With infer=False mem0 makes one fact of every message and says which role it had.
            itself = next(
                (turn for turn in sources if _is(turn, payload) and turn.number not in batch.taken), None
            )
        if itself is not None:
            batch.taken.add(itself.number)
            sources = (itself,)
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
            expires=expires(payload),
        )

    def _reword(self, batch: Batch, known: Fact, payload: Mapping[str, Any]) -> None:
        """What a known fact says is what `payload` says now. With another text it has no turns: they said the
        old one."""
        words, end = words_of(payload), expires(payload)
        fact = replace(known, text=words.text, speaker=words.speaker, when=words.when, expires=end)
        if fact == known:
            return
        if fact.text != known.text:
            fact = replace(fact, turns=(), verbatim=False)
        if fact_words(fact).line == fact_words(known).line:
            self._journal.facts.write([fact])
            return
        batch.forgotten.append(self._journal.reword_fact(fact))
        batch.written.append(fact.fact)

    def _lose(self, batch: Batch, kind: str, fact: str, scope: str, text: str) -> None:
        """Note that `text` goes, and with it the turns it came from."""
        turns = self._journal.turns.get(self._journal.facts.turns_of([fact]))
        loss = Intent(kind, fact, scope, (text, *(turn.text for turn in turns if turn.text)))
        batch.lost.append(loss)
        batch.announced.add(fact)
        if batch.whole is None:  # which is noted itself
            batch.begun.append(self._journal.intents.begin(loss))

    def _carry_out(self, batch: Batch) -> None:
        """All that is left to do, the engine before the intents are finished: what it could not be told is noted."""
        batch.end()
        try:
            try:
                self._settle(batch)
                if batch.lost or batch.whole is not None:
                    batch.forgotten += self._forgetting.turns(batch.lost, batch.whole)
            finally:
                self._outbox.send(_engines_part(batch.forgotten))
            if batch.cut_off:
                self._forgetting.enter(
                    [*batch.written, *(loss.fact for loss in batch.lost if loss.kind != EXPIRE)]
                )
            if batch.lost or batch.whole is not None:
                self._forgetting.complete(batch.lost, batch.whole, batch.begun, resumed=batch.resumed)
            else:
                self._journal.intents.finish(batch.begun)
        finally:
            if not batch.resumed:
                orphaned = [fact for forgotten in batch.forgotten for fact in forgotten.orphaned]
                # Only who says something new waits where too many facts wait: a change is one row's.
                new = bool(batch.turns)
                self._encoder.submit(dict.fromkeys([*batch.written, *orphaned]), wait=new)

    def _settle(self, batch: Batch) -> None:
        """Find out about facts whose loss was announced and not told: the store has refused, or it has failed
        after all was done."""
        for loss in [loss for loss in batch.lost if loss.fact not in batch.told]:
            held = self._forgetting.held(loss.fact)
            if held is not None and held.get("data") == loss.words[0]:
                batch.lost.remove(loss)
            elif held is None and loss.kind == UPDATE:
                batch.lost.remove(
                    loss
                )  # a store that deletes before it inserts has lost it: the words are all there is
            elif held is None:
                batch.forgotten.append(self._journal.forget_facts([loss.fact]))
            else:
                known = self._journal.facts.get([loss.fact]).get(loss.fact)
                if known is not None:
                    self._reword(batch, known, held)


def _engines_part(forgotten: Sequence[Forgotten]) -> list[PendingForget]:
    """What of all that an engine may hold: blobs, and cached blocks by their tags."""
    keys: dict[str, dict[str, None]] = {}
    tags: dict[str, dict[str, None]] = {}
    for what in forgotten:
        for entry in what.blobs:
            keys.setdefault(entry.owner, {})[entry.key] = None
        for fact in (*what.facts, *what.touched):
            tags.setdefault(fact.owner, {})[fact.tag] = None
            for owner in Scope.read(fact.scope).owners:  # mem0 may have shown it to any of them
                tags[fact.owner][said_tag(owner)] = None
        for scope, turn in what.turns:
            whose = Scope.read(scope)
            said = [said_tag(owner) for owner in whose.owners]
            tags.setdefault(whose.owner, {}).update(dict.fromkeys([turn_tag(whose.owner, turn), *said]))
    owners = dict.fromkeys([*keys, *tags])
    return [PendingForget(owner, tuple(keys.get(owner, ())), tuple(tags.get(owner, ()))) for owner in owners]


def _digest(text: str) -> str:
    """As mem0 keeps it with a fact, and tells by it that it knows a text."""
    return md5(text.encode(), usedforsecurity=False).hexdigest()


def _is(turn: Turn, payload: Mapping[str, Any]) -> bool:
    return turn.role == payload.get("role") and turn.text == payload.get("data")
