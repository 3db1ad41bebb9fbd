"""The scheduler side: passes each of vLLM's calls to the part that answers it.

It runs inside vLLM's scheduler, so everything here is bookkeeping on integers. For each request vLLM calls in this
order:

    arrived -> (match -> allocated)+ -> build, once a step -> observe, once a step -> finished

Invariant: rows that were given back may still be read or written by a step in flight. That is safe because the workers
carry out steps in order, carry out moves first within a step, and because blobs that a step loads are pinned while its
captures are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inferscale_memory.connector import protocol
from inferscale_memory.connector.metadata import Capture, Orders, Report
from inferscale_memory.connector.protocol import Encode, Forget, Inject, Outcome, Probe, Refusal
from inferscale_memory.connector.scheduler.admission import Admission
from inferscale_memory.connector.scheduler.blocks import NULL_BLOCK
from inferscale_memory.connector.scheduler.encode import Encoder
from inferscale_memory.connector.scheduler.forget import Forgetter
from inferscale_memory.connector.scheduler.inject import Injector
from inferscale_memory.connector.scheduler.prefix_cache_index import PrefixCache
from inferscale_memory.connector.scheduler.receipts import Receipts
from inferscale_memory.connector.scheduler.requests import (
    Answer,
    EncodeState,
    InjectState,
    State,
    take_params,
)
from inferscale_memory.kv.store import BlobStore


class SchedulerSide:
    """Decides what the connector does, for one engine.

    Args:
        secret: signs owners, and keys the hashes of blobs and salts.
        fingerprint: the fingerprint of the model.
        block_size: tokens of a block of the paged cache.
        unsupported: why blobs cannot be used with this model, if that is known at the start.
        ahead: whether a request waits for its load and runs in a later step.

    Attributes:
        requests: the requests that have arrived and not ended.
    """

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
        self.store = store
        self.requests: dict[str, State] = {}
        self.receipts = Receipts()
        self.admission = Admission(secret, fingerprint, store.tiers[0].capacity, unsupported)
        self.injector = Injector(store, block_size, ahead=ahead)
        self.encoder = Encoder(store, self.injector, block_size)
        self.forgetter = Forgetter(store, self.encoder, block_size)
        self._block_size = block_size

    def bind_cache(self, cache: PrefixCache) -> None:
        """Take vLLM's prefix cache, once it exists."""
        self.forgetter.bind_cache(cache)

    # -- before a step ------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """Read what a new request asks for. Forgetting takes effect here."""
        ask = protocol.parse(take_params(request), self.admission.secret)
        if ask is None:
            return
        state = self.requests[request.request_id] = self._admit(request, ask)
        if isinstance(state, EncodeState | InjectState):
            self.forgetter.began(request.request_id, state)

    def match(self, request: Any, cached: int) -> tuple[int | None, bool]:
        """How many prompt tokens beyond the `cached` local ones will be injected, and whether the request waits for
        them. The number is None when vLLM should ask again in the next step. Changes no blob."""
        match self.requests.get(request.request_id):
            case EncodeState() as state:
                return self.encoder.match(state, cached)
            case InjectState() as state if not state.as_text:
                external = self.injector.match(state, cached)
                return external, bool(self.injector.ahead and external)
            case _:
                return 0, False

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """vLLM has given the request its blocks. The first `external` tokens after the cached ones are ours to
        write."""
        match self.requests.get(request.request_id):
            case EncodeState() as state:
                self.encoder.allocated(state, blocks, external)
            case InjectState() as state:
                self.injector.allocated(state, blocks, external)

    def build(self, scheduled: dict[str, int], blocks_of: Callable[[str], Sequence[int]]) -> Orders:
        """The orders of a step.

        Args:
            scheduled: how many tokens the step computes of each request.
            blocks_of: the block ids of a request.
        """
        loads = self.injector.take_loads()
        captures: list[Capture] = []
        for name, tokens in scheduled.items():
            state = self.requests.get(name)
            if isinstance(state, EncodeState) and state.open:
                captures += self.encoder.captures(state, tokens, blocks_of)
        self.encoder.advance(self.requests)
        self.store.unpin_all()
        moves, wipes = self.store.take_moves(), self.store.take_wipes()
        return Orders(tuple(moves), tuple(loads), tuple(captures), wipes=tuple(wipes))

    # -- after a step -------------------------------------------------------------------------------------------

    def observe(self, report: Report | None) -> None:
        """Take in what the workers did in a step. The reports of all ranks are merged."""
        if report is None:
            return
        if report.status and self.admission.unsupported is None:
            self.admission.unsupported = report.status
        # First, because what the same step computed from failed loads must not be kept.
        for name in report.failed_loads:
            state = self.requests.get(name)
            if isinstance(state, EncodeState) and state.error is None:
                self.encoder.fail(state, "the blobs that it depends on could not be loaded; encode again")
        for name, start, stop in report.captured:
            if state := self._open_encode(name):
                self.encoder.captured(state, start, stop)
        for name, reason in report.lost.items():
            if state := self._open_encode(name):
                self.encoder.fail(state, reason)
        self.injector.loaded(report.loaded)

    def loads_failed(self, names: set[str], blocks_of: Callable[[str], Sequence[int]]) -> set[int]:
        """Have the requests of failed loads prefilled as text. Returns the blocks that no request may find in the
        prefix cache, now or later.

        What the same step computed after a failed load is wrong as well. A request that was aborted or preempted has
        already left its blocks in the prefix cache; these are found by their hashes and evicted here.
        """
        bad: set[int] = set()
        for name in names:
            state = self.injector.failed(name)
            if state is None:
                continue
            self.forgetter.evict(state.request.block_hashes)
            if name in self.requests:
                cached = state.matched.cached if state.matched is not None else 0
                bad.update(blocks_of(name)[cached // self._block_size :])
        return bad - {NULL_BLOCK}

    def finished(self, request: Any) -> dict[str, Any] | None:
        """What to tell the client of a request that has ended or was aborted."""
        name = request.request_id
        match self.requests.pop(name, None):
            case EncodeState() as state:
                if state.open:
                    self.encoder.fail(state, "the encode ended before all of it was captured; encode again")
                self.forgetter.ended(name, state)
                reply: dict[str, Any] = {"blobs": state.blobs, "error": state.error}
                if state.base is not None:
                    reply["injected"] = state.base.injected
            case InjectState() as state:
                self.forgetter.ended(name, state)
                reply = {
                    "injected": state.injected,
                    "promoted": state.promoted,
                    "lost": state.lost,
                    "compose_s": state.compose_s,
                    "refused": state.refused,
                    "missing": list(state.missing),
                }
                self.receipts.keep(state.ask.owner, state.ask.receipt, reply)
            case Answer(reply):
                if "fingerprint" in reply:  # the start-up check may have ended since the probe arrived
                    reply["unsupported"] = self.admission.unsupported
            case _:
                return None
        return {protocol.NAME: reply}

    # -- when the weights may have changed ----------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every blob. vLLM resets its caches when weights change, and blobs of the old weights must not be
        injected into the new ones. Encodes that have begun fail, and encodes that wait go on. A load under way counts
        as failed, so the request that waits for it is computed."""
        self.encoder.reset(self.requests.values())
        self.injector.reset()
        self.store.clear()

    def fail_stale_loads(self, report: Report) -> set[str]:
        """Take the loads that were ordered before a reset out of `report`. Returns their requests, which must go on
        waiting: their loads fail in the next step, and then vLLM computes the prompts."""
        return self.injector.fail_stale_loads(report)

    # -- inside -------------------------------------------------------------------------------------------------

    def _open_encode(self, name: str) -> EncodeState | None:
        state = self.requests.get(name)
        return state if isinstance(state, EncodeState) and state.open else None

    def _admit(self, request: Any, ask: protocol.Ask | Refusal) -> State:
        match ask:
            case Refusal(reason):
                return Answer({"error": reason, "refused": reason})
            case Probe():
                known = self.store.known(ask.keys)
                return Answer(
                    {
                        "at_hand": [key for key in known if self.store.usable(ask.owner, key) is not None],
                        "fingerprint": self.admission.fingerprint,
                        "unsupported": self.admission.unsupported,
                    }
                )
            case Forget():
                return Answer({"dropped": self.forgetter.forget(ask, self.requests)})
            case Outcome():
                return Answer({"outcome": self.receipts.take(ask.owner, ask.receipt)})
            case Encode() | Inject() if ask.mentions and len(ask.mentions) > request.num_prompt_tokens:
                reason = f"{len(ask.mentions)} mentions in a prompt of {request.num_prompt_tokens} tokens"
                return Answer({"error": reason, "refused": reason})
            case Encode():
                return self.admission.encode(request, ask)
            case Inject():
                return self.admission.inject(request, ask)
