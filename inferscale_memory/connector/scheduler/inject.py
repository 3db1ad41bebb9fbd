"""Injecting: claims the prompt tokens whose blobs are there, and plans the loads that write them.

Invariants:
- Tokens are claimed only if the worker writes them before the forward that reads them. `match` claims only what
  `allocated` can promote, and vLLM makes no other call to the connector in between. That forward is in the same step,
  or in a later one where loads run ahead; then vLLM calls `allocated` a second time, with nothing left to write.
- Blobs that a step loads are pinned from `allocated` until the step is built, so they are not evicted in that step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from inferscale_memory.connector.metadata import Load, Report
from inferscale_memory.connector.scheduler.blocks import NULL_BLOCK, slots_of
from inferscale_memory.connector.scheduler.requests import InjectState, Match, digest_of
from inferscale_memory.kv.store import BlobStore, Entry

logger = logging.getLogger(__name__)


class Injector:
    """Plans loads for one engine.

    Attributes:
        ahead: whether a request waits for its load and runs in a later step.
        planned: the loads of the step that is being scheduled.
        loading: the requests whose loads the workers have not reported yet. A request may end before its report.
    """

    def __init__(self, store: BlobStore, block_size: int, *, ahead: bool) -> None:
        self.ahead = ahead
        self.planned: list[Load] = []
        self.loading: dict[str, InjectState] = {}
        self._store = store
        self._block_size = block_size

    def match(self, state: InjectState, cached: int, beside: int = 0) -> int | None:
        """How many prompt tokens after the `cached` ones can be injected. Changes no blob.

        Args:
            beside: tokens that must find room on the device tier at the same time.

        Returns:
            None while the blobs have no room only because of what other requests load in this step.
        """
        entries, offset = self._verified(state), 0
        while entries and offset + entries[0].tokens <= cached:  # the prefix cache has all of this blob
            offset += entries.pop(0).tokens
        fit = self._store.promotable(entries, beside)
        if fit < len(entries) and self._store.holds(entries, beside):
            return None
        del entries[fit:]
        total = offset + sum(entry.tokens for entry in entries)
        external = max(0, min(total, len(state.request.prompt_token_ids) - 1) - cached)
        state.matched = Match(cached, external, offset, tuple(entries))
        return external

    def allocated(self, state: InjectState, blocks: Sequence[int], external: int) -> None:
        """Plan the load of the `external` tokens that were claimed, into the request's `blocks`."""
        try:
            self._plan_load(state, blocks, external)
        except Exception:  # the tokens are claimed, so they must be written or recomputed
            logger.exception("inferscale: a load could not be planned")
            self._plan(state, self._broken_load(state, blocks))

    def take_loads(self) -> list[Load]:
        """The loads of this step. Each is returned once."""
        loads, self.planned = self.planned, []
        return loads

    def loaded(self, seconds: Mapping[str, float]) -> None:
        """Loads have succeeded, each in so many seconds."""
        for name, each in seconds.items():
            if state := self.loading.pop(name, None):
                state.compose_s += each

    def failed(self, name: str) -> InjectState | None:
        """A load has failed, so vLLM prefills its request as text. None when no load was under way."""
        state = self.loading.pop(name, None)
        if state is None:
            return None
        # vLLM has not counted the tokens of a load that ran ahead when the load fails.
        state.lost = 0 if self.ahead else state.injected
        state.injected = state.promoted = 0
        state.as_text = True
        state.refused = "loading failed, so the text was prefilled"
        return state

    def reset(self) -> None:
        """Treat all loads under way as failed, because the weights may have changed since their blobs were made."""
        for state in self.loading.values():
            state.stale = True
        self.planned = [replace(load, broken=True) for load in self.planned]

    def fail_stale_loads(self, report: Report) -> set[str]:
        """Take the loads that were ordered before a reset out of `report`, and plan for each one that fails.

        Returns the requests of these loads. They must go on waiting until the workers report the failure in the next
        step; then vLLM computes their prompts.
        """
        stale = {name for name in report.loaded if (state := self.loading.get(name)) and state.stale}
        for name in stale:
            del report.loaded[name]
            state = self.loading[name]
            state.stale = False
            self._plan(state, self._broken_load(state, ()))
        return stale

    def _verified(self, state: InjectState) -> list[Entry]:
        """The leading blobs of the composition that the store lets into this prompt."""
        request, owner, segments = state.request, state.ask.owner, state.ask.segments
        ids = np.asarray(request.prompt_token_ids, dtype=np.int32)
        state.missing = tuple(key for key, _ in segments if self._store.usable(owner, key) is None)
        verified = self._store.verify(
            owner, segments, lambda start, stop: digest_of(request, ids[start:stop]), checked=state.checked
        )
        state.checked = max(state.checked, len(verified.entries))
        if verified.mismatch:
            state.refused = "the prompt has other token ids than the blob was made of"
        return verified.entries

    def _plan_load(self, state: InjectState, blocks: Sequence[int], external: int) -> None:
        match = state.matched
        first, state.admitted = not state.admitted, True
        if first:
            state.injected = external
        if match is None or external <= 0:
            return
        assert external == match.external, "vLLM allocated another number of tokens than was claimed"
        positions = np.arange(match.cached, match.cached + external, dtype=np.int64)
        if first:
            below = np.concatenate([np.full(entry.tokens, 0 not in entry.rows) for entry in match.entries])
            state.promoted = int(below[positions - match.offset].sum())
        promoted = self._store.promote(match.entries)
        assert promoted, "match() claimed only blobs that can be promoted"
        rows = np.concatenate([entry.rows[0] for entry in match.entries])[positions - match.offset]
        slots = slots_of(blocks, positions, self._block_size)
        # Tokens that slid out of an attention window are in the null block.
        written = slots >= self._block_size
        load = Load(
            state.request.request_id,
            rows[written],
            positions[written],
            slots[written],
            self._touched(blocks, match),
            ahead=self.ahead,
        )
        self._plan(state, load)

    def _plan(self, state: InjectState, load: Load) -> None:
        self.planned.append(load)
        self.loading[load.request] = state

    def _broken_load(self, state: InjectState, blocks: Sequence[int]) -> Load:
        """A load that the worker reports as failed."""
        nothing = np.empty(0, dtype=np.int64)
        match = state.matched
        touched = tuple(blocks) if match is None else self._touched(blocks, match)
        name = state.request.request_id
        return Load(name, nothing, nothing, nothing, touched, ahead=self.ahead, broken=True)

    def _touched(self, blocks: Sequence[int], match: Match) -> tuple[int, ...]:
        """The blocks that contain the claimed tokens."""
        stop = match.cached + match.external
        touched = blocks[match.cached // self._block_size : -(-stop // self._block_size)]
        return tuple(block for block in touched if block != NULL_BLOCK)
