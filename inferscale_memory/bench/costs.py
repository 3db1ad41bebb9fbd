"""What blobs cost beside what they are held against: encoding facts against prefilling their own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from inferscale_memory.bench.reporting import spread
from inferscale_memory.bench.watched import Watched
from inferscale_memory.engine.base import EncodeRequest, SamplingOptions
from inferscale_memory.errors import EngineError
from inferscale_memory.prompt import Prompt, Segment

_ONE = SamplingOptions(max_tokens=1, ignore_eos=True)


def encoding(engine: Watched, batch: Sequence[EncodeRequest], repeat: int) -> dict[str, Any]:
    """A batch as the memory has encoded it, for a new owner each time, against the prefill of the facts' own tokens,
    all at once too. The two take turns after one round to warm up.

    Returns:
        milliseconds a fact, and `ratio`, each with its spread; facts, their own tokens, and the tokens of the
        requests, windows included. What the engine's prefix cache saves of those shows in the time.

    Raises:
        EngineError: an encode failed.
    """
    facts = [request.ids[span.start : span.stop] for request in batch for span in request.spans]
    encodes, prefills = [], []
    for turn in range(repeat + 1):
        steps = [
            lambda turn=turn: encodes.append(_encode(engine, batch, f"user:bench {turn}")),
            lambda turn=turn: prefills.append(_prefill(engine, facts, f"prefill {turn}")),
        ]
        for step in steps if turn % 2 else reversed(steps):
            step()
    count = len(facts)
    return {
        "facts": count,
        "requests": len(batch),
        "own_tokens": sum(map(len, facts)),
        "request_tokens": sum(len(request.ids) for request in batch),
        "encode_ms": spread([1e3 * seconds / count for seconds in encodes[1:]]),
        "prefill_ms": spread([1e3 * seconds / count for seconds in prefills[1:]]),
        "ratio": spread([a / b for a, b in zip(encodes[1:], prefills[1:], strict=True)]),
    }


def _encode(engine: Watched, batch: Sequence[EncodeRequest], owner: str) -> float:
    requests = [replace(request, owner=owner, mentions=()) for request in batch]
    began = perf_counter()
    results = engine.encode(requests)
    seconds = perf_counter() - began
    failed = [result.error for result in results if not result.refs]
    if failed:
        raise EngineError(f"an encode failed ({failed[0]}): give the engine more --blob-bytes")
    engine.forget(owner, [ref.key for result in results for ref in result.refs])
    return seconds


def _prefill(engine: Watched, facts: Sequence[tuple[int, ...]], salt: str) -> float:
    async def all_at_once() -> float:
        prompts = [
            Prompt("user:bench", (Segment(fact),), f"{salt} {number}") for number, fact in enumerate(facts)
        ]
        began = perf_counter()
        await asyncio.gather(*(engine.agenerate(prompt, _ONE) for prompt in prompts))
        return perf_counter() - began

    return asyncio.run(all_at_once())
