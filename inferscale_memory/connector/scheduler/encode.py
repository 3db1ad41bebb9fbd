"""Encoding: finds room for new blobs, plans which tokens the workers capture, and enters the blobs in the store.

Invariants:
- A key enters the store only after every rank has reported every kept position of every layer. The key is computed from
  the ids of the prompt that vLLM prefilled.
- An encode that depends on other blobs keeps nothing unless all of them were injected into it.
- Encodes that wait for room get it in turn: while one waits, no later one reserves rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from inferscale_memory.connector.metadata import Capture
from inferscale_memory.connector.scheduler.blocks import slots_of
from inferscale_memory.connector.scheduler.inject import Injector
from inferscale_memory.connector.scheduler.requests import EncodeState, InjectState, State, digest_of
from inferscale_memory.kv.store import BlobStore

RESET = "the engine's caches were reset, and its weights may have changed; encode again"


class Encoder:
    """Plans captures for one engine.

    Args:
        injector: injects the blobs that an encode depends on.

    Attributes:
        waiting: the encode that gets room before all others, if one waits.
        recomputed: encodes that must not read the prefix cache, and have no room to begin yet.
    """

    def __init__(self, store: BlobStore, injector: Injector, block_size: int) -> None:
        self.waiting: str | None = None
        self.recomputed: set[str] = set()
        self._store = store
        self._injector = injector
        self._block_size = block_size

    # -- before a step ------------------------------------------------------------------------------------------

    def match(self, state: EncodeState, cached: int) -> tuple[int | None, bool]:
        """What vLLM's `get_num_new_matched_tokens` answers. Only the blobs that an encode depends on are injected."""
        if state.open and state.base is None and cached > state.ask.spans[0][0]:
            # The prefix cache reaches into a span that is to be kept, where the hooks would see nothing.
            self.recomputed.add(state.request.request_id)
            return None, False  # until `advance` has found room for it
        tokens = state.unreserved
        # What fills the tier now is pinned or reserved, and will become free again.
        may_wait = tokens > 0 and state.base_tokens + tokens <= self._store.tiers[0].capacity
        if may_wait and not (self._has_its_turn(state) and self._store.reservable(tokens)):
            return self._wait(state)
        base = state.base
        if base is None or not state.open:
            return 0, False
        external = self._injector.match(base, cached, tokens)
        if external is None:
            return self._wait(state)
        if external < state.base_tokens:
            complete = base.refused is None and not base.missing and not cached
            if complete and may_wait:
                return self._wait(state)
            reason = "blobs that it depends on are missing; encode those first"
            if cached or state.rows is not None:
                reason = "its nonce was used before, or it was preempted; encode again"
            elif complete:
                reason = "it and the blobs that it depends on do not fit the device tier; raise device_bytes"
            self.fail(state, base.refused or reason)
            return 0, False
        return external, self._injector.ahead

    def allocated(self, state: EncodeState, blocks: Sequence[int], external: int) -> None:
        """Plan the load of the blobs that an encode depends on, then reserve rows for what it keeps."""
        if state.base is not None:
            self._load_base(state, state.base, blocks, external)
        self._reserve(state)  # second, when the blobs to be loaded are pinned

    # -- in a step ----------------------------------------------------------------------------------------------

    def captures(
        self, state: EncodeState, tokens: int, blocks_of: Callable[[str], Sequence[int]]
    ) -> list[Capture]:
        """What to capture of an encode that computes `tokens` tokens in this step."""
        try:
            return self._plan_captures(state, tokens, blocks_of(state.request.request_id))
        except Exception as error:
            self.fail(state, f"its captures could not be planned ({error!r}); encode again")
            return []

    def advance(self, requests: Mapping[str, State]) -> None:
        """A step has been scheduled. Let the next encode have its turn, and let encodes that must not read the prefix
        cache begin."""
        first = requests.get(self.waiting or "")
        if not (isinstance(first, EncodeState) and first.unreserved):
            self.waiting = None
        for name in list(self.recomputed):
            state = requests.get(name)
            if isinstance(state, EncodeState) and not state.request.skip_reading_prefix_cache:
                self._begin_recomputed(state)
            else:
                self.recomputed.discard(name)

    # -- after a step -------------------------------------------------------------------------------------------

    def captured(self, state: EncodeState, first: int, last: int) -> None:
        """All ranks have captured the kept tokens `[first, last)` of an encode. With the last ones, store its blobs."""
        state.captured[first:last] = True
        if not state.captured.all() or state.rows is None:
            return
        request, taken = state.request, 0
        for key, (start, stop) in zip(state.keys, state.ask.spans, strict=True):
            rows = state.rows[taken : taken + stop - start]
            digest = digest_of(request, request.prompt_token_ids[start:stop])
            self._store.commit(key, state.ask.owner, digest, rows)
            state.blobs.append([key, stop - start])
            taken += stop - start
        self._store.touch_composition(state.keys)
        state.rows = None

    def fail(self, state: EncodeState, reason: str) -> None:
        """Keep nothing of an encode, not even blobs that are stored already: its client does not know them yet."""
        state.error = reason
        for key, _ in state.blobs:
            self._store.forget(key)
        state.blobs.clear()
        if state.rows is not None:
            self._store.release(state.rows)
            state.rows = None

    def reset(self, states: Iterable[State]) -> None:
        """Fail the encodes that have begun, because the weights may have changed. Encodes that wait go on."""
        for state in states:
            if (
                isinstance(state, EncodeState)
                and state.error is None
                and (state.rows is not None or state.blobs)
            ):
                self.fail(state, RESET)

    # -- room ---------------------------------------------------------------------------------------------------

    def _has_its_turn(self, state: EncodeState) -> bool:
        """Whether no other encode waits for room. Without turns, small encodes would always get in before a large
        one."""
        return self.waiting in (None, state.request.request_id)

    def _wait(self, state: EncodeState) -> tuple[None, bool]:
        """Have vLLM ask again in the next step. No later encode gets room before this one."""
        self.waiting = self.waiting or state.request.request_id
        return None, False

    def _begin_recomputed(self, state: EncodeState) -> None:
        """Have vLLM skip the prefix cache for this encode as soon as there is room for it. Room comes first, because
        vLLM does not let such a request wait."""
        tokens = state.unreserved
        if 0 < tokens <= self._store.tiers[0].capacity:
            if self._has_its_turn(state):
                state.rows = self._store.reserve(tokens)
            if state.rows is None:
                self._wait(state)
                return
        state.request.skip_reading_prefix_cache = True

    def _load_base(self, state: EncodeState, base: InjectState, blocks: Sequence[int], external: int) -> None:
        self._injector.allocated(base, blocks, external)
        if state.open and base.injected < state.base_tokens:
            self.fail(state, "the blobs that it depends on were not injected; encode again")

    def _reserve(self, state: EncodeState) -> None:
        if state.open and state.rows is None:
            state.rows = self._store.reserve(len(state.positions))
            if state.rows is None:
                self.fail(
                    state,
                    f"{len(state.positions)} tokens do not fit the device tier of "
                    f"{self._store.tiers[0].capacity} tokens; raise device_bytes or keep fewer in one encode",
                )

    def _plan_captures(self, state: EncodeState, tokens: int, blocks: Sequence[int]) -> list[Capture]:
        start = state.request.num_computed_tokens
        first, last = np.searchsorted(state.positions, (start, start + tokens))
        if first == last or state.rows is None:
            return []
        slots = slots_of(blocks, state.positions[first:last], self._block_size)
        piece = (state.request.request_id, int(first), int(last))
        return [Capture(piece, slots, state.rows[first:last])]
