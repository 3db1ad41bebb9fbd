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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.connector import protocol
from inferscale_memory.connector.metadata import Capture, Load, Orders, Report
from inferscale_memory.connector.protocol import Encode, Forget, Inject, Outcome, Probe, Refusal
from inferscale_memory.connector.requests import (
    Answer,
    Encoding,
    Injection,
    Match,
    adapter_of,
    digest_of,
    not_plain,
)
from inferscale_memory.connector.residency import Name, PrefixCache, Residency
from inferscale_memory.kv.key import blob_key
from inferscale_memory.kv.store import BlobStore, Entry
from inferscale_memory.prompt.segments import PUBLIC_OWNER

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
"""vLLM's placeholder for blocks that slid out of an attention window: nothing may be written there."""
MAX_OUTCOMES = 1024
"""Most outcomes kept for clients that have not asked yet: a client asks when its stream has ended, or never."""


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
        self._secret = secret
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._store = store
        self._unsupported = unsupported
        self._ahead = ahead
        self._planned: list[Load] = []
        self._waiting: str | None = None  # the encode that waits for room before all others
        self._residency: Residency | None = None
        self._requests: dict[str, Encoding | Injection | Answer] = {}
        self._outcomes: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()  # by (owner, receipt)
        self._loading: dict[
            str, Injection
        ] = {}  # until their workers report: the request may have ended before

    def bind_cache(self, cache: PrefixCache) -> None:
        """The prefix cache of this engine, once vLLM has made it."""
        self._residency = Residency(cache, self._block_size)

    # -- a request's life ---------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """Read what a new request asks. Forgetting happens here and now."""
        ask = protocol.parse(request.kv_transfer_params, self._secret)
        if not isinstance(request.kv_transfer_params, dict):
            request.kv_transfer_params = None
        if ask is not None:
            self._requests[request.request_id] = self._admit(request, ask)

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
        for state in self._requests.values():
            if isinstance(state, Encoding) and state.fresh and not state.request.skip_reading_prefix_cache:
                self._begin_afresh(state)
        self._store.unpin_all()
        return Orders(tuple(self._store.take_moves()), tuple(loads), tuple(captures))

    def observe(self, report: Report | None) -> None:
        """What the workers did in a step, all ranks merged."""
        if report is None:
            return
        if report.status and self._unsupported is None:
            self._unsupported = report.status
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
        match self._requests.pop(request.request_id, None):
            case Encoding() as encoding:
                if encoding.open:
                    self._fail(encoding, "the encode ended before all of it was kept")
                self._note(encoding)
                reply: dict[str, Any] = {"blobs": encoding.blobs, "error": encoding.error}
                if encoding.base is not None:
                    reply["injected"] = encoding.base.injected
            case Injection() as injection:
                self._note(injection)
                reply = {
                    "injected": injection.injected,
                    "promoted": injection.promoted,
                    "lost": injection.lost,
                    "compose_s": injection.compose_s,
                    "refused": injection.refused,
                    "missing": list(injection.missing),
                }
                self._remember(injection.ask, reply)
            case Answer(reply):
                if "fingerprint" in reply:  # the start-up check may have ended since the probe arrived
                    reply["unsupported"] = self._unsupported
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
                        "at_hand": [key for key in ask.keys if self._usable(ask.owner, key)],
                        "fingerprint": self._fingerprint,
                        "unsupported": self._unsupported,
                    }
                )
            case Forget():
                return Answer({"dropped": self._forget(ask)})
            case Outcome():
                return Answer({"outcome": self._outcomes.pop((ask.owner, ask.receipt), None)})
            case Encode():
                return self._admit_encode(request, ask)
            case Inject():
                return self._admit_inject(request, ask)

    def _admit_encode(self, request: Any, ask: Encode) -> Encoding:
        ids = request.prompt_token_ids
        problem = self._unsupported or not_plain(request)
        if problem is None and not self._under(protocol.encode_salt, request, ask):
            problem = "an encode runs only under the encode salt of its owner and of what it begins with"
        if problem is None and ask.spans[-1][1] > len(ids):
            problem = f"a span ends at {ask.spans[-1][1]}, the prompt has {len(ids)} tokens"
        based = sum(tokens for _, tokens in ask.segments)
        if problem is None and ask.spans[0][0] < based:
            problem = f"a span begins at {ask.spans[0][0]}, within the {based} tokens that are injected"
        # A refused one is prefilled all the same: what it mentions has to be found in the prefix cache.
        spans = ask.spans if problem is None else ()
        keys = tuple(
            blob_key(
                self._secret, self._model(request), ask.owner, ids[:start], ids[start:stop], ask.segments
            )
            for start, stop in spans
        )
        positions = np.concatenate(
            [np.empty(0, dtype=np.int64), *(np.arange(start, stop, dtype=np.int64) for start, stop in spans)]
        )
        arrived = np.zeros(len(positions), dtype=np.bool_)
        base = None
        if ask.segments:
            base = Injection(Inject(ask.owner, ask.segments), request, barred=problem is not None)
        return Encoding(ask, request, base, keys, positions, arrived, error=problem)

    def _admit_inject(self, request: Any, ask: Inject) -> Injection:
        problem = self._unsupported or not_plain(request)
        if problem is None and not self._under(protocol.compose_salt, request, ask):
            problem = "a request is injected only under the salt of its composition"
        if problem is None and sum(tokens for _, tokens in ask.segments) > len(request.prompt_token_ids):
            problem = "the composition is longer than the prompt"
        return Injection(ask, request, refused=problem, barred=problem is not None)

    def _under(self, salt: Callable[..., str], request: Any, ask: Encode | Inject) -> bool:
        """Whether a request has the salt that `salt` makes of what it asks."""
        return bool(
            request.cache_salt
            == salt(
                self._secret,
                self._fingerprint,
                ask.owner,
                ask.segments,
                lora=adapter_of(request),
                nonce=ask.nonce,
            )
        )

    def _remember(self, ask: Inject, reply: dict[str, Any]) -> None:
        """Keep the reply for a client that will ask for it: one whose answer is streamed."""
        if ask.receipt:
            self._outcomes[ask.owner, ask.receipt] = reply
            while len(self._outcomes) > MAX_OUTCOMES:
                self._outcomes.popitem(last=False)

    def _usable(self, owner: str, key: str) -> Entry | None:
        entry = self._store.get(key)
        return entry if entry is not None and entry.owner in (owner, PUBLIC_OWNER) else None

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
        entries: list[Entry] = []
        position = 0
        owner = injection.ask.owner
        injection.missing = tuple(k for k, _ in injection.ask.segments if self._usable(owner, k) is None)
        for key, tokens in injection.ask.segments:
            entry = self._usable(owner, key)
            if entry is None:
                break
            if entry.tokens != tokens or entry.ids_digest != digest_of(
                injection.request, ids[position : position + tokens]
            ):
                injection.refused = "the prompt's token ids are not those of the blob"
                break
            entries.append(entry)
            position += tokens
        return entries

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
        encoding.rows = None

    def _model(self, request: Any) -> str:
        """The model a blob belongs to: an adapter makes it another one."""
        lora = adapter_of(request)
        return f"{self._fingerprint}+{lora}" if lora else self._fingerprint

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
        names = {(ask.owner, key) for key in ask.keys} | {("", tag) for tag in ask.tags}
        for state in self._requests.values():
            if isinstance(state, Encoding | Injection):
                self._forget_running(state, names)
        if self._residency is not None:
            for name in names:
                self._residency.evict(name)
        dropped = 0
        for key in ask.keys:
            entry = self._store.get(key)
            if entry is not None and entry.owner == ask.owner:
                dropped += self._store.forget(key)
        return dropped

    def _forget_running(self, state: Encoding | Injection, names: set[Name]) -> None:
        found: dict[Name, int] = {}
        for name, at in state.mentions():
            found[name] = min(at, found.get(name, at))
        hit = names & found.keys()
        if not hit:
            return
        state.forgotten += hit
        if isinstance(state, Encoding) and state.error is None:
            self._fail(state, "a fact in it was forgotten meanwhile")
        if self._residency is not None:
            first = min(found[name] for name in hit) // self._block_size
            self._residency.evict_hashes(list(state.request.block_hashes)[first:])

    def _note(self, state: Encoding | Injection) -> None:
        """Remember where the facts of a request that ends are cached; evict what was forgotten while it ran."""
        if self._residency is None:
            return
        self._residency.note(state.mentions(), state.request.block_hashes)
        for name in state.forgotten:
            self._residency.evict(name)
