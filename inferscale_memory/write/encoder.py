"""Encoding follows writing: a worker thread turns written facts into blobs, in batches.

A fact waits here by id only; what is encoded is read from the journal when its turn comes, so a fact that was
forgotten meanwhile is passed over, and an encode that finishes after its fact was forgotten is discarded. It
must never make anybody's answer wait: a fact without a blob is served as text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Condition, Thread, current_thread

from inferscale_memory.bounded import Bounded
from inferscale_memory.engine.base import BlobRef, EncodeResult, Engine
from inferscale_memory.engine.known_blobs import KnownBlobs, Preambles
from inferscale_memory.engine.lazy import LazyEngine
from inferscale_memory.errors import ClosedError, EngineError
from inferscale_memory.facts.scope import turn_tag
from inferscale_memory.journal import Fact, Journal, LedgerEntry, PendingForget
from inferscale_memory.lifetime import close_at_exit
from inferscale_memory.prompt import PUBLIC_OWNER
from inferscale_memory.write.neighbours import Neighbours
from inferscale_memory.write.plan import Planned, Planner, fact_words, steps
from inferscale_memory.write.stacking import waves

Progress = Callable[[int, int], None]
"""Told how many facts are done, of how many."""

BATCH = 64
CAPACITY = 4096
STEP_TOKENS = 4096
"""How many tokens an engine is given to encode at once, where it does not say itself how many it computes together."""
_ATTEMPTS = 3
_FAILED = 10_000
"""So many facts that could not be encoded are remembered, those that failed last."""

_log = logging.getLogger(__name__)


class Encoder:
    """Facts on their way to becoming blobs.

    Attributes:
        failed: ids of facts that could not be encoded, and why; they are served as text.
    """

    def __init__(
        self,
        journal: Journal,
        engine: LazyEngine,
        at_hand: KnownBlobs,
        preambles: Preambles,
        *,
        w: int,
        neighbours: Neighbours | None,
        check: Callable[[Sequence[str]], Sequence[str]],
        expire: Callable[[], None],
        forget: Callable[[Sequence[PendingForget]], None],
    ) -> None:
        """`check` brings the journal in step with the store for the ids it is given, and returns those for which it
        could not; `expire` takes out of it what has expired, `forget` tells the engine what to forget."""
        self.failed: Bounded[str, str] = Bounded(_FAILED)
        self._journal = journal
        self._engine = engine
        self._at_hand = at_hand
        self._preambles = preambles
        self._w = w
        self._neighbours = neighbours
        self._check = check
        self._expire = expire
        self._forget = forget
        self._changed = Condition()
        self._waiting: dict[str, bool] = {}  # id -> whether to check it first
        self._working = 0
        self._done = 0
        self._attempts: Bounded[tuple[str, str], int] = Bounded(_FAILED)
        self._put_back: set[str] = set()
        self._broken: Exception | None = None
        self._closed = False
        self._thread: Thread | None = None  # while there is work
        close_at_exit(self)

    # -- from outside ----------------------------------------------------------------------------------------

    def submit(self, ids: Iterable[str], *, wait: bool, check: bool = False) -> None:
        """Have these facts encoded. With `wait`, blocks while `CAPACITY` facts are waiting; without, facts
        beyond that are left for their next recall. Does nothing where there is no engine and none is to be
        started, or where the engine is that of the parent of this process.

        Args:
            check: the journal may not know them, or in other words.
        """
        if self._engine.forked or (self._engine.started is None and not self._engine.eager):
            return
        with self._changed:
            wait = wait and current_thread() is not self._thread
            for fact in ids:
                if wait:
                    self._changed.wait_for(lambda: len(self._waiting) < CAPACITY or self._closed)
                if self._closed or len(self._waiting) >= CAPACITY:
                    return
                self._waiting[fact] = check or self._waiting.get(fact, False)
                self._changed.notify_all()
                if self._thread is None:  # in here: what comes next may have to wait for it
                    self._thread = Thread(target=self._work, name="inferscale-encoder", daemon=True)
                    self._thread.start()

    def flush(self, progress: Progress | None = None, timeout: float | None = None) -> None:
        """Wait until nothing is waiting. Raises the engine's error if it could not be started, TimeoutError
        after `timeout` seconds, ClosedError when the memory is closed meanwhile."""
        deadline = None if timeout is None else time.monotonic() + timeout
        start, shown = self._done, (0, 0)
        while True:
            with self._changed:
                done, left = self._done - start, len(self._waiting) + self._working
            if progress is not None and (done, done + left) != shown:
                progress(done, done + left)
                shown = (done, done + left)
            if not left:
                break
            rest = None if deadline is None else deadline - time.monotonic()
            if rest is not None and rest <= 0:
                raise TimeoutError(f"{left} facts are still waiting to be encoded after {timeout} s")
            with self._changed:
                if len(self._waiting) + self._working == left:
                    self._changed.wait(rest)
        with self._changed:
            broken, self._broken = self._broken, None
            closed = self._closed
        if broken is not None:
            raise broken
        if closed:
            raise ClosedError("the memory was closed before all facts were encoded: open it again")

    def stop(self) -> None:
        """Begin nothing new. What is not encoded yet is encoded when it is next recalled."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop, and wait for the encode under way."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join()

    # -- the worker ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            try:
                self._encode(batch)
            except Exception as error:
                if not self._closed:
                    if not isinstance(error, ClosedError):
                        _log.warning("%d facts stay text for now: %s", len(batch), error)
                    self._give_up(error)
            finally:
                with self._changed:
                    self._done += len(batch)
                    self._working = 0
                    self._changed.notify_all()

    def _take(self) -> dict[str, bool] | None:
        """The facts that are next; None when there are none, which ends the thread."""
        with self._changed:
            if self._closed or not self._waiting:
                self._thread = None
                return None
            names = list(self._waiting)
        # Not within the lock: who holds the journal's may be waiting for this one, to submit.
        try:
            places = self._journal.facts.places(names)
        except Exception as error:  # whatever ails it, the batch itself will say; this thread must live
            _log.warning("the journal could not be asked for an order: %s", error)
            places = {}
        with self._changed:
            if self._closed:
                self._thread = None
                return None
            # Those go first that others may stand on.
            first = sorted(names, key=lambda fact: places.get(fact, 0))[:BATCH]
            batch = {fact: self._waiting.pop(fact) for fact in first}
            self._working = len(batch)
            self._changed.notify_all()
            return batch

    def _give_up(self, error: Exception) -> None:
        """The engine itself failed: what is waiting would fail too."""
        with self._changed:
            self._broken = error
            if isinstance(error, EngineError):
                self._done += len(self._waiting)
                self._waiting.clear()

    def _encode(self, batch: Mapping[str, bool]) -> None:
        doubtful = [fact for fact, check in batch.items() if check]
        changing = set(self._check(doubtful)) if doubtful else set()
        self._put_back, again = changing - self._put_back, changing - self._put_back
        self.submit(again, wait=False, check=True)  # once: then they are left for their next recall
        self._expire()
        engine = self._engine.get()
        if engine.unsupported is not None:
            return
        template = self._engine.template
        self._preambles.key(engine, PUBLIC_OWNER, template.split([{"role": "user", "content": "?"}]).preamble)
        planner = Planner(self._journal, template, w=self._w, max_tokens=engine.max_model_len - 2)
        facts = self._wanted(engine, planner, [fact for fact in batch if fact not in changing])
        if self._neighbours is None:
            self._carry_out(engine, planner.plan(facts))
            return
        for wave in waves([self._neighbours.of(fact) for fact in facts]):
            preamble = self._preamble(engine)
            known = {other.fact: other for near in wave for other in near.neighbours}
            blobs = self._blobs(engine, known)
            self._carry_out(engine, [planner.among(near, preamble, blobs) for near in wave])

    def _preamble(self, engine: Engine) -> BlobRef | None:
        """The blob of what every fact is encoded behind."""
        ids = self._engine.template.encode_preamble
        key = self._preambles.key(engine, PUBLIC_OWNER, ids)
        return None if key is None else BlobRef(key, len(ids))

    def _carry_out(self, engine: Engine, planned: Sequence[Planned]) -> None:
        while planned:
            again: list[Planned] = []
            # Step by step, so that closing need not wait for more than one.
            for step in steps(planned, getattr(engine, "encode_tokens", STEP_TOKENS)):
                if self._closed:
                    return
                again += self._carry_out_step(engine, step)
            planned = again

    def _carry_out_step(self, engine: Engine, planned: Sequence[Planned]) -> list[Planned]:
        """Encode these; what is to be tried in their stead where that failed."""
        again: list[Planned] = []
        try:
            results = self._run(engine, planned)
        except Exception:
            for plan in planned:
                self._forget_dead(plan, ())
            raise
        for plan, result in results:
            simpler = [] if result.refs else plan.simpler()
            if simpler:
                self._at_hand.drop(ref.key for ref in plan.request.base)  # perhaps one of them is not
                again += simpler
            else:
                self._settle(engine, plan, result)
        return again

    @staticmethod
    def _run(engine: Engine, planned: Sequence[Planned]) -> list[tuple[Planned, EncodeResult]]:
        results = engine.encode([plan.request for plan in planned])
        return list(zip(planned, results, strict=True))

    def _wanted(self, engine: Engine, planner: Planner, ids: Sequence[str]) -> list[Fact]:
        """Those of `ids` that exist, can be encoded, and have no blob at hand."""
        facts = self._journal.facts.get(ids)
        kept = self._blobs(engine, facts)
        wanted = []
        for fact in facts.values():
            tried = self._attempts.get((fact.fact, fact_words(fact).digest), 0)
            if tried >= _ATTEMPTS or (fact.fact in kept and not self._outgrown(kept[fact.fact], fact)):
                continue
            if planner.fits(fact):
                wanted.append(fact)
            else:
                most = engine.max_model_len
                self._fail(fact, EncodeResult((), f"it has more tokens than one encode can hold ({most})"))
        return wanted

    def _outgrown(self, entry: LedgerEntry, fact: Fact) -> bool:
        """Whether a blob that is at hand was made behind something else than all facts before it, and should not be."""
        return self._neighbours is not None and not entry.chained and self._neighbours.chained(fact)

    def _blobs(self, engine: Engine, facts: Mapping[str, Fact]) -> dict[str, LedgerEntry]:
        """By id, the blobs of these facts that are at hand. Of those that are not, the journal is told."""
        entries = [
            entry
            for name, entry in self._journal.ledger.get(facts, engine.fingerprint).items()
            if entry.line == fact_words(facts[name]).digest
        ]
        at_hand: set[str] = set()
        for owner in {entry.owner for entry in entries}:
            keys = [entry.key for entry in entries if entry.owner == owner]
            at_hand |= self._at_hand.confirm(engine, owner, keys)
        lost = [entry.key for entry in entries if entry.key not in at_hand]
        if lost:
            self._journal.ledger.mark_lost(lost)
        return {entry.fact: entry for entry in entries if entry.key in at_hand}

    def _settle(self, engine: Engine, plan: Planned, result: EncodeResult) -> None:
        if not result.refs:
            for kept in plan.kept:
                self._fail(kept.fact, result)
            self._forget_dead(plan, ())
            return
        late = []
        old = self._journal.ledger.get([kept.fact.fact for kept in plan.kept], engine.fingerprint)
        replaced: list[str] = []
        for kept, ref in zip(plan.kept, result.refs, strict=True):
            fact = kept.fact
            line = fact_words(fact).digest
            entry = LedgerEntry(
                fact.fact, fact.owner, engine.fingerprint, ref.key, ref.tokens, line, kept.chained
            )
            if self._journal.ledger.enter(entry, fact, kept.context):
                self._at_hand.add([ref.key])
                self._attempts.pop((fact.fact, entry.line), None)
                self.failed.pop(fact.fact, None)
                if fact.fact in old and old[fact.fact].key != ref.key:
                    replaced.append(old[fact.fact].key)
            else:
                late.append((fact.fact, ref.key))
        unnamed = set(replaced) - self._journal.ledger.referenced(replaced) if replaced else ()
        if unnamed:  # nobody would find them when their fact goes
            self._forget([PendingForget(plan.request.owner, tuple(unnamed), ())])
        if late:
            self._forget_dead(plan, [key for _, key in late])
            self.submit([fact for fact, _ in late if self._journal.facts.get([fact])], wait=False)

    def _forget_dead(self, plan: Planned, keys: Sequence[str]) -> None:
        """Tell the engine what was forgotten while it encoded: these blobs, and cached blocks with words of facts and
        turns that are no more what they were. It was told when they were forgotten, perhaps before it had them."""
        known = self._journal.facts.get(fact.fact for fact in plan.mentioned)
        dead = [fact.tag for fact in plan.mentioned if known.get(fact.fact) != fact]
        turns = {number for kept in plan.kept for number in kept.context.turns}
        said = {turn.number for turn in self._journal.turns.get(turns)}
        dead += [turn_tag(plan.request.owner, number) for number in sorted(turns - said)]
        if keys or dead:
            self._forget([PendingForget(plan.request.owner, tuple(keys), tuple(dead))])

    def _fail(self, fact: Fact, result: EncodeResult) -> None:
        reason = result.error or "the engine gave no reason"
        if result.answered:
            name = (fact.fact, fact_words(fact).digest)
            self._attempts[name] = self._attempts.get(name, 0) + 1
        else:
            with self._changed:
                self._broken = EngineError(reason)
        self.failed[fact.fact] = reason
        _log.warning("Memory %s stays text: %s", fact.fact, reason)
