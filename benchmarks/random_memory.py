"""A memory for machines that have nothing but torch and transformers: facts in a list, found by an exact numpy search
over random vectors.

It stands for `Memory` where time is measured and nothing else: encoding, prompts and composition are those of the
library. Nothing is embedded: the same words have the same random vector, so every path recalls the same facts. It must
never be taken for a memory: what it recalls has nothing to do with the question, and nothing is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import RLock
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.commands.demo.conversations import Session
from inferscale_memory.engine.base import EncodeRequest, Span
from inferscale_memory.errors import EngineError
from inferscale_memory.prompt import (
    PUBLIC_OWNER,
    EncodePlan,
    Fact,
    Prompt,
    PromptTemplate,
    Segment,
    Turn,
    compose,
    fact_line,
    plan_session,
)

DIMENSIONS = 384
BATCH = 64
"""Facts of one encode, as a memory's encoder takes them."""
WINDOW = 24


@dataclass(frozen=True, slots=True)
class Recalled:
    """A fact in a prompt."""

    text: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """As a memory's `prepare` returns it."""

    prompt: Prompt
    memories: tuple[Recalled, ...]
    dropped: tuple[Recalled, ...]
    search_s: float
    compose_s: float


@dataclass(slots=True)
class _Owner:
    """What one owner has in memory. Attributes: vectors: [facts, dimensions], float32, of length 1."""

    vectors: NDArray[np.float32]
    texts: list[str] = field(default_factory=list)
    ids: list[tuple[int, ...]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    waiting: list[tuple[EncodePlan, int]] = field(default_factory=list)  # and the place its session begins at


class RandomMemory:
    """`remember`, `prepare`, and their async twins. Many threads may call it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._template = PromptTemplate(engine.tokenizer)
        self._owners: dict[str, _Owner] = {}
        self._preamble: str | None = None
        self._lock = RLock()

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, user_id: str, session: Session) -> None:
        """Every turn of a session becomes a fact, to be encoded behind the turns before it."""
        lines = [fact_line(turn.text, when=session.date, speaker=turn.speaker) for turn in session.turns]
        ids = [self._template.fact_ids(line) for line in lines]
        with self._lock:
            owner = self._owner(user_id)
            first = len(owner.ids)
            owner.texts += lines
            owner.ids += ids
            owner.keys += [None] * len(ids)
            owner.vectors = np.concatenate((owner.vectors, np.stack([_vector(line) for line in lines])))
            owner.waiting += [
                (plan, first)
                for plan in plan_session(
                    [Turn(line) for line in ids],
                    keep=range(len(ids)),
                    preamble=self._template.encode_preamble,
                    w=WINDOW,
                    max_tokens=self.engine.max_model_len - 2,
                )
            ]

    def flush(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Encode what is waiting, in batches. Raises EngineError when it cannot be."""
        with self._lock:
            waiting = [
                (user, plan, first) for user, owner in self._owners.items() for plan, first in owner.waiting
            ]
            for owner in self._owners.values():
                owner.waiting.clear()
        self._encode_preamble()
        done, total = 0, sum(len(plan.kept) for _, plan, _ in waiting)
        while waiting:
            batch: list[tuple[str, EncodePlan, int]] = []
            while waiting and sum(len(plan.kept) for _, plan, _ in batch) < BATCH:
                batch.append(waiting.pop(0))
            requests = [
                EncodeRequest(user, plan.ids, tuple(Span(*span) for span in plan.spans))
                for user, plan, _ in batch
            ]
            for (user, plan, first), result in zip(batch, self.engine.encode(requests), strict=True):
                if not result.refs:
                    raise EngineError(f"an encode failed ({result.error}): give the engine more --blob-bytes")
                with self._lock:
                    for place, ref in zip(plan.kept, result.refs, strict=True):
                        self._owners[user].keys[first + place] = ref.key
                done += len(plan.kept)
            if progress is not None:
                progress(done, total)

    async def aadd(self, user_id: str, session: Session) -> None:
        """Write a session and encode it."""
        await asyncio.to_thread(self.write, user_id, session)
        await asyncio.to_thread(self.flush)

    # -- asking ----------------------------------------------------------------------------------------------

    def prepare(self, text: str, *, user_id: str, top_k: int, max_tokens: int) -> Prepared:
        """The prompt of a question with `top_k` facts, the nearest last. Arguments as `Memory.prepare` takes them."""
        vector = _vector(text)
        began = perf_counter()
        with self._lock:
            owner = self._owner(user_id)
            scores = owner.vectors @ vector
            nearest = (
                np.argpartition(-scores, min(top_k, len(scores)) - 1)[:top_k] if len(scores) else np.empty(0, int)
            )
            ranked = nearest[np.argsort(-scores[nearest], kind="stable")]
            found = [(owner.texts[at], owner.ids[at], owner.keys[at]) for at in ranked]
        search_s = perf_counter() - began
        began = perf_counter()
        facts = [
            Fact(ids, key, f"{rank}", score=float(rank)) for rank, (_, ids, key) in enumerate(reversed(found))
        ]
        composed = compose(
            self._template.split([{"role": "user", "content": text}]),
            facts,
            owner=user_id,
            max_tokens=self.engine.max_model_len - max_tokens,
            preamble_key=self._preamble,
        )
        left_out = {fact.tag for fact in composed.dropped}
        lines = [(Recalled(line), f"{len(found) - 1 - rank}") for rank, (line, _, _) in enumerate(found)]
        prompt = composed.prompt
        plain = tuple(Segment(part.ids, part.key) for part in prompt.segments)
        return Prepared(
            Prompt(prompt.owner, plain),
            tuple(recalled for recalled, tag in lines if tag not in left_out),
            tuple(recalled for recalled, tag in lines if tag in left_out),
            search_s,
            perf_counter() - began,
        )

    async def aprepare(self, text: str, *, user_id: str, top_k: int, max_tokens: int) -> Prepared:
        """See `prepare`."""
        return await asyncio.to_thread(self.prepare, text, user_id=user_id, top_k=top_k, max_tokens=max_tokens)

    # -- inside ----------------------------------------------------------------------------------------------

    def _owner(self, user_id: str) -> _Owner:
        if user_id not in self._owners:
            self._owners[user_id] = _Owner(np.empty((0, DIMENSIONS), dtype=np.float32))
        return self._owners[user_id]

    def _encode_preamble(self) -> None:
        ids = self._template.encode_preamble
        [result] = self.engine.encode([EncodeRequest(PUBLIC_OWNER, ids, (Span(0, len(ids)),))])
        if not result.refs:
            raise EngineError(f"the preamble could not be encoded ({result.error}): give more --blob-bytes")
        self._preamble = result.refs[0].key


def _vector(text: str) -> NDArray[np.float32]:
    """A random vector of length 1, the same for the same text."""
    seed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
    vector = np.random.default_rng(seed).standard_normal(DIMENSIONS, dtype=np.float32)
    found: NDArray[np.float32] = vector / np.linalg.norm(vector)
    return found
