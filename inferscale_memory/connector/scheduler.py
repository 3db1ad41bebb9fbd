"""The scheduler side: verifies what requests ask, matches blobs, allocates rows, and answers.

It never sees a tensor. It runs inside vLLM's scheduler, so everything here is bookkeeping on integers, and for each
request vLLM calls in this order:

    arrived -> (match -> allocated)+ -> build, once a step -> observe, once a step -> finished

Invariants:
- Tokens are claimed only if the worker will write them before the forward that reads them: `match` claims what
  `allocated` can promote, and vLLM calls nothing of ours in between. That forward is in the same step, or, where
  loads run ahead, in a later one: then vLLM calls `allocated` a second time, with nothing left to write.
- A key enters the directory only after every rank reported every kept position of every layer, and it is computed
  from the ids in the prompt that vLLM prefilled.
- What one step loads is not evicted in that step: it is pinned from `allocated` until `build`.
- A row given back may still be read or written by a step in flight. That is safe because workers carry steps out in
  order, within a step moves come first, and what a step loads is pinned while its captures are planned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.connector import protocol
from inferscale_memory.connector.admission import Admission
from inferscale_memory.connector.metadata import Capture, Load, Orders, Report
from inferscale_memory.connector.protocol import Encode, Forget, Inject, Outcome, Probe, Refusal
from inferscale_memory.connector.receipts import Receipts
from inferscale_memory.connector.requests import (
    Answer,
    Encoding,
    Injection,
    Match,
    digest_of,
    take_params,
)
from inferscale_memory.connector.residency import Name, PrefixCache, Residency
from inferscale_memory.connector.running import Running
from inferscale_memory.kv.store import BlobStore, Entry

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
"""vLLM's placeholder for blocks that slid out of an attention window: nothing may be written there."""
RESET = "the engine's caches were reset, and its weights may have changed; encode again"


class SchedulerSide:
    """Everything the connector decides, for one engine."""

    def __init__(
        self,
        *,
        secret: bytes,
        fingerprint: str,
        block_size: int,
        store: BlobStore,
        unsupported: str | None,
        ahead: bool = False,
    ) -> None:
        self._admission = Admission(secret, fingerprint, store.tiers[0].capacity, unsupported)
        self._block_size = block_size
        self._store = store
        self._ahead = ahead
        self._planned: list[Load] = []
        self._waiting: str | None = None  # the encode that waits for room before all others
        self._residency: Residency | None = None
        self._requests: dict[str, Encoding | Injection | Answer] = {}
        self._running = Running()
        self._afresh: set[str] = set()  # encodes that are to pass over the prefix cache, and do not yet
        self._receipts = Receipts()
        # Until their workers report: the request may have ended before.
        self._loading: dict[str, Injection] = {}

    def bind_cache(self, cache: PrefixCache) -> None:
        """The prefix cache of this engine, once vLLM has made it."""
        self._residency = Residency(cache, self._block_size)

    # -- a request's life ---------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """Read what a new request asks. Forgetting happens here and now."""
        ask = protocol.parse(take_params(request), self._admission.secret)
        if ask is None:
            return
        state = self._requests[request.request_id] = self._admit(request, ask)
        if isinstance(state, Encoding | Injection):
            self._running.add(request.request_id, state.mentions())

    def match(self, request: Any, cached: int) -> tuple[int | None, bool]:
        """How many prompt tokens beyond the `cached` local ones will be injected. Changes no blob."""
        match self._requests.get(request.request_id):
            case Encoding() as encoding:
                return self._match_encode(encoding, cached)
            case Injection() as injection if not injection.barred:
                external = self._match_inject(injection, cached)
                return external, bool(self._ahead and external)
            case _:
                return 0, False

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """vLLM has given the request its blocks, `external` tokens of which are ours to write in this step."""
        match self._requests.get(request.request_id):
            case Encoding() as encoding:
                if encoding.base is not None:
                    self._stand(encoding, encoding.base, blocks, external)
                self._reserve(encoding)  # after it: what is to be loaded is pinned now
            case Injection() as injection:
                self._load(injection, blocks, external)

    def build(self, scheduled: dict[str, int], blocks_of: Callable[[str], Sequence[int]]) -> Orders:
        """The step's orders. `scheduled`: tokens per request of this step; `blocks_of`: a request's block ids."""
        loads, self._planned = self._planned, []
        captures: list[Capture] = []
        for name, tokens in scheduled.items():
            match self._requests.get(name):
                case Encoding() as encoding if encoding.open:
                    try:
                        captures += self._captures(encoding, tokens, blocks_of(name))
                    except Exception as error:
                        self._fail(encoding, f"its rows could not be planned: {error!r}")
        first = self._requests.get(self._waiting or "")
        if not (isinstance(first, Encoding) and first.unreserved):
            self._waiting = None
        for name in list(self._afresh):
            state = self._requests.get(name)
            if isinstance(state, Encoding) and not state.request.skip_reading_prefix_cache:
                self._begin_afresh(state)
            else:
                self._afresh.discard(name)
        self._store.unpin_all()
        moves, wipes = self._store.take_moves(), self._store.take_wipes()
        return Orders(tuple(moves), tuple(loads), tuple(captures), wipes=tuple(wipes))

    def observe(self, report: Report | None) -> None:
        """What the workers did in a step, all ranks merged."""
        if report is None:
            return
        if report.status and self._admission.unsupported is None:
            self._admission.unsupported = report.status
        for name in report.failed_loads:  # first: what the same step computed behind them is not to be kept
            state = self._requests.get(name)
            if isinstance(state, Encoding) and state.error is None:
                self._fail(state, "what it stands on could not be loaded")
        for name, start, stop in report.captured:
            state = self._requests.get(name)
            if isinstance(state, Encoding) and state.open:
                self._arrived(state, start, stop)
        for name, reason in report.lost.items():
            state = self._requests.get(name)
            if isinstance(state, Encoding) and state.open:
                self._fail(state, reason)
        for name, seconds in report.loaded.items():
            if injection := self._loading.pop(name, None):
                injection.compose_s += seconds

    def loads_failed(self, names: set[str], blocks_of: Callable[[str], Sequence[int]]) -> set[int]:
        """Loads that failed will be recomputed; the blocks that must not be hit until then, or ever.

        What was computed after them in the same step is as wrong, and an aborted or preempted request has left its
        blocks behind in the prefix cache already: those are found by their hashes, and evicted here.
        """
        bad: set[int] = set()
        for name in names:
            injection = self._loading.pop(name, None)
            if injection is None:
                continue
            # Loads that run ahead fail before vLLM counts them.
            injection.lost = 0 if self._ahead else injection.injected
            injection.injected = injection.promoted = 0
            injection.barred = True
            injection.refused = "loading failed, so the text was prefilled"
            if self._residency is not None:
                self._residency.evict_hashes(injection.request.block_hashes)
            if name in self._requests:
                cached = injection.matched.cached if injection.matched is not None else 0
                bad.update(blocks_of(name)[cached // self._block_size :])
        return bad - {NULL_BLOCK}

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended or was aborted: what to tell the client."""
        names = self._running.remove(request.request_id)
        match self._requests.pop(request.request_id, None):
            case Encoding() as encoding:
                if encoding.open:
                    self._fail(encoding, "the encode ended before all of it was kept")
                self._note(encoding, names)
                reply: dict[str, Any] = {"blobs": encoding.blobs, "error": encoding.error}
                if encoding.base is not None:
                    reply["injected"] = encoding.base.injected
            case Injection() as injection:
                self._note(injection, names)
                reply = {
                    "injected": injection.injected,
                    "promoted": injection.promoted,
                    "lost": injection.lost,
                    "compose_s": injection.compose_s,
                    "refused": injection.refused,
                    "missing": list(injection.missing),
                }
                self._receipts.keep(injection.ask.owner, injection.ask.receipt, reply)
            case Answer(reply):
                if "fingerprint" in reply:  # the start-up check may have ended since the probe arrived
                    reply["unsupported"] = self._admission.unsupported
            case _:
                return None
        return {protocol.NAME: reply}

    # -- what is asked ------------------------------------------------------------------------------------------

    def _admit(self, request: Any, ask: protocol.Ask | Refusal) -> Encoding | Injection | Answer:
        match ask:
            case Refusal(reason):
                return Answer({"error": reason, "refused": reason})
            case Probe():
                return Answer(
                    {
                        "at_hand": [
                            key for key in self._store.known(ask.keys) if self._store.usable(ask.owner, key)
                        ],
                        "fingerprint": self._admission.fingerprint,
                        "unsupported": self._admission.unsupported,
                    }
                )
            case Forget():
                return Answer({"dropped": self._forget(ask)})
            case Outcome():
                return Answer({"outcome": self._receipts.take(ask.owner, ask.receipt)})
            case Encode() | Inject() if ask.mentions and len(ask.mentions) > request.num_prompt_tokens:
                reason = f"{len(ask.mentions)} mentions in a prompt of {request.num_prompt_tokens} tokens"
                return Answer({"error": reason, "refused": reason})
            case Encode():
                return self._admission.encode(request, ask)
            case Inject():
                return self._admission.inject(request, ask)

    # -- injecting ----------------------------------------------------------------------------------------------

    def _match_inject(self, injection: Injection, cached: int, beside: int = 0) -> int | None:
        """Tokens that can be injected behind the `cached` ones, with `beside` more to be kept on the device. None while
        they have no room only because of what other requests load in this step."""
        entries, offset = self._leading(injection), 0
        while entries and offset + entries[0].tokens <= cached:  # wholly in the prefix cache already
            offset += entries.pop(0).tokens
        fit = self._store.promotable(entries, beside)
        if fit < len(entries) and self._store.holds(entries, beside):
            return None
        del entries[fit:]
        total = offset + sum(entry.tokens for entry in entries)
        external = max(0, min(total, len(injection.request.prompt_token_ids) - 1) - cached)
        injection.matched = Match(cached, external, offset, tuple(entries))
        return external

    def _leading(self, injection: Injection) -> list[Entry]:
        """The leading segments whose blobs are at hand, with the prompt's own ids under them."""
        ids = np.asarray(injection.request.prompt_token_ids, dtype=np.int32)
        request, owner, segments = injection.request, injection.ask.owner, injection.ask.segments
        injection.missing = tuple(key for key, _ in segments if self._store.usable(owner, key) is None)
        verified = self._store.verify(
            owner,
            segments,
            lambda start, stop: digest_of(request, ids[start:stop]),
            checked=injection.checked,
        )
        injection.checked = max(injection.checked, len(verified.entries))
        if verified.mismatch:
            injection.refused = "the prompt's token ids are not those of the blob"
        return verified.entries

    def _load(self, injection: Injection, blocks: Sequence[int], external: int) -> None:
        try:
            self._plan_load(injection, blocks, external)
        except Exception:  # the tokens are claimed: they must be written, or recomputed
            logger.exception("inferscale: a load could not be planned")
            self._plan(injection, self._broken_load(injection, blocks))

    def _plan_load(self, injection: Injection, blocks: Sequence[int], external: int) -> None:
        match = injection.matched
        first, injection.admitted = not injection.admitted, True
        if first:
            injection.injected = external
        if match is None or external <= 0:
            return
        assert external == match.external, "vLLM allocated another count than was claimed"
        positions = np.arange(match.cached, match.cached + external, dtype=np.int64)
        if first:
            below = np.concatenate([np.full(entry.tokens, 0 not in entry.rows) for entry in match.entries])
            injection.promoted = int(below[positions - match.offset].sum())
        promoted = self._store.promote(match.entries)
        assert promoted, "match() claimed only what is promotable"
        rows = np.concatenate([entry.rows[0] for entry in match.entries])[positions - match.offset]
        slots = self._slots(blocks, positions)
        held = slots >= self._block_size  # block 0 is the null block: it slid out of an attention window
        load = Load(
            injection.request.request_id,
            rows[held],
            positions[held],
            slots[held],
            self._touched(blocks, match),
            ahead=self._ahead,
        )
        self._plan(injection, load)

    def _plan(self, injection: Injection, load: Load) -> None:
        self._planned.append(load)
        self._loading[load.request] = injection

    def _broken_load(self, injection: Injection, blocks: Sequence[int]) -> Load:
        """A load that the worker reports as failed."""
        nothing = np.empty(0, dtype=np.int64)
        match = injection.matched
        touched = tuple(blocks) if match is None else self._touched(blocks, match)
        name = injection.request.request_id
        return Load(name, nothing, nothing, nothing, touched, ahead=self._ahead, broken=True)

    def _touched(self, blocks: Sequence[int], match: Match) -> tuple[int, ...]:
        """The blocks that what was claimed stands in."""
        stop = match.cached + match.external
        touched = blocks[match.cached // self._block_size : -(-stop // self._block_size)]
        return tuple(block for block in touched if block != NULL_BLOCK)

    def _slots(self, blocks: Sequence[int], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slot of each position: block id times block size plus the offset within the block."""
        table = np.asarray(blocks, dtype=np.int64)
        return table[positions // self._block_size] * self._block_size + positions % self._block_size

    # -- encoding -----------------------------------------------------------------------------------------------

    def _match_encode(self, encoding: Encoding, cached: int) -> tuple[int | None, bool]:
        """Only what it stands on is injected into an encode. A local hit inside a kept span would leave nothing to
        catch."""
        if encoding.open and encoding.base is None and cached > encoding.ask.spans[0][0]:
            encoding.fresh = True
            self._afresh.add(encoding.request.request_id)
            return None, False  # until `build` has found room for it
        tokens = encoding.unreserved
        # What fills the tier now is pinned or being kept: it will be free again.
        waiting = tokens > 0 and encoding.based + tokens <= self._store.tiers[0].capacity
        if waiting and not (self._has_its_turn(encoding) and self._store.reservable(tokens)):
            return self._wait(encoding)
        base = encoding.base
        if base is None or not encoding.open:
            return 0, False
        external = self._match_inject(base, cached, tokens)
        if external is None:
            return self._wait(encoding)
        if external < encoding.based:
            complete = base.refused is None and not base.missing and not cached
            if complete and waiting:
                return self._wait(encoding)
            reason = "what it stands on is not at hand; encode that first"
            if cached or encoding.rows is not None:
                reason = "its nonce was used before, or it was preempted; encode again"
            elif complete:
                reason = "it and what it stands on do not fit the device tier; raise its budget"
            self._fail(encoding, base.refused or reason)
            return 0, False
        return external, self._ahead

    def _has_its_turn(self, encoding: Encoding) -> bool:
        """Whether no other encode waits for room: smaller ones would take it before its eyes."""
        return self._waiting in (None, encoding.request.request_id)

    def _wait(self, encoding: Encoding) -> tuple[None, bool]:
        """Ask again in the next step; none that comes after it gets room before."""
        self._waiting = self._waiting or encoding.request.request_id
        return None, False

    def _begin_afresh(self, encoding: Encoding) -> None:
        """Have vLLM pass over the prefix cache, from the step on in which there is room: what `match` says does not
        count any more then."""
        tokens = encoding.unreserved
        if 0 < tokens <= self._store.tiers[0].capacity:
            if self._has_its_turn(encoding):
                encoding.rows = self._store.reserve(tokens)
            if encoding.rows is None:
                self._wait(encoding)
                return
        encoding.request.skip_reading_prefix_cache = True

    def _stand(self, encoding: Encoding, base: Injection, blocks: Sequence[int], external: int) -> None:
        """Have its base loaded. Nothing is kept that stands on anything else."""
        self._load(base, blocks, external)
        if encoding.open and base.injected < encoding.based:
            self._fail(encoding, "what it stands on was not injected")

    def _reserve(self, encoding: Encoding) -> None:
        if encoding.open and encoding.rows is None:
            encoding.rows = self._store.reserve(len(encoding.positions))
            if encoding.rows is None:
                self._fail(
                    encoding,
                    f"{len(encoding.positions)} tokens do not fit the device tier of "
                    f"{self._store.tiers[0].capacity}; raise its budget or keep less in one encode",
                )

    def _captures(self, encoding: Encoding, tokens: int, blocks: Sequence[int]) -> list[Capture]:
        start = encoding.request.num_computed_tokens
        first, last = np.searchsorted(encoding.positions, (start, start + tokens))
        if first == last or encoding.rows is None:
            return []
        positions = encoding.positions[first:last]
        piece = (encoding.request.request_id, int(first), int(last))
        return [Capture(piece, self._slots(blocks, positions), encoding.rows[first:last])]

    def _arrived(self, encoding: Encoding, first: int, last: int) -> None:
        encoding.arrived[first:last] = True
        if not encoding.arrived.all() or encoding.rows is None:
            return
        request, taken = encoding.request, 0
        for key, (start, stop) in zip(encoding.keys, encoding.ask.spans, strict=True):
            rows = encoding.rows[taken : taken + stop - start]
            digest = digest_of(request, request.prompt_token_ids[start:stop])
            self._store.commit(key, encoding.ask.owner, digest, rows)
            encoding.blobs.append([key, stop - start])
            taken += stop - start
        self._store.touch_composition(encoding.keys)
        encoding.rows = None

    def _fail(self, encoding: Encoding, reason: str) -> None:
        """Keep nothing of this encode, not even what was stored already and its client has not heard of."""
        encoding.error = reason
        for key, _ in encoding.blobs:
            self._store.forget(key)
        encoding.blobs.clear()
        if encoding.rows is not None:
            self._store.release(encoding.rows)
            encoding.rows = None

    # -- forgetting ---------------------------------------------------------------------------------------------

    def _forget(self, ask: Forget) -> int:
        """Drop blobs and cached blocks now, and see to it that requests in flight leave none behind."""
        names: set[Name] = {*zip(repeat(ask.owner), ask.keys), *zip(repeat(""), ask.tags)}
        for name, found in self._running.holding(names).items():
            state = self._requests.get(name)
            if isinstance(state, Encoding | Injection):
                self._forget_running(state, found)
        if self._residency is not None:
            self._residency.evict_all(names)
        return self._store.forget_of(ask.owner, ask.keys)

    def _forget_running(self, state: Encoding | Injection, found: Mapping[Name, int]) -> None:
        """Names that a request under way holds, by where they first stand, are forgotten."""
        state.forgotten |= found.keys()
        if isinstance(state, Encoding) and state.error is None:
            self._fail(state, "a fact in it was forgotten meanwhile")
        if self._residency is not None:
            first = min(found.values()) // self._block_size
            self._residency.evict_hashes(list(state.request.block_hashes)[first:])

    def _note(self, state: Encoding | Injection, names: Mapping[Name, int]) -> None:
        """Remember where the facts of a request that ends are cached; evict what was forgotten while it ran."""
        if self._residency is None:
            return
        self._residency.note(names.items(), state.request.block_hashes)
        self._residency.evict_all(state.forgotten)

    # -- when the model may be another one ----------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every blob: vLLM resets its caches when weights change, and what was computed with the old ones must
        not be injected into the new. Encodes that have begun fail, those that wait go on. A load under way counts as
        failed, so that the request that waits for it is computed."""
        for state in self._requests.values():
            if (
                isinstance(state, Encoding)
                and state.error is None
                and (state.rows is not None or state.blobs)
            ):
                self._fail(state, RESET)
        for injection in self._loading.values():
            injection.stale = True
        self._planned = [replace(load, broken=True) for load in self._planned]
        self._store.clear()

    def load_again(self, report: Report) -> set[str]:
        """The requests of whose loads a report tells that were ordered before a reset. They go on waiting, for a load
        that fails in the next step: so vLLM has them computed."""
        stale = {name for name in report.loaded if (load := self._loading.get(name)) and load.stale}
        for name in stale:
            del report.loaded[name]
            injection = self._loading[name]
            injection.stale = False
            self._plan(injection, self._broken_load(injection, ()))
        return stale
