"""What blobs cost beside what they are held against: encoding facts against prefilling their own tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from benchmarks.reporting import spread
from benchmarks.watched import Watched
from inferscale_memory.engine.base import EncodeRequest, SamplingOptions
from inferscale_memory.errors import EngineError
from inferscale_memory.prompt import Prompt, Segment

_ONE = SamplingOptions(max_tokens=1, ignore_eos=True)


def encoding(engine: Watched, batches: Sequence[Sequence[EncodeRequest]], repeat: int) -> dict[str, Any]:
    """Batches as the memory has encoded them, one after the other, against the prefill of the facts' own tokens, all at
    once. The two take turns after one round to warm up.

    What stands on blobs is encoded for its own owner again, who has these, and forgotten before. What does not has a
    new owner each time.

    Returns:
        milliseconds a fact, and `ratio`, each with its spread; facts, their own tokens, the tokens of the requests, and
        how many of those were computed, not injected. What the engine's prefix cache saves shows in the time.

    Raises:
        EngineError: an encode failed.
    """
    requests = [request for batch in batches for request in batch]
    facts = [request.ids[span.start : span.stop] for request in requests for span in request.spans]
    encodes, prefills = [], []
    for turn in range(repeat + 1):
        steps = [
            lambda turn=turn: encodes.append(_encode(engine, batches, f"user:bench {turn}")),
            lambda turn=turn: prefills.append(asyncio.run(prefill_seconds(engine, facts, f"prefill {turn}"))),
        ]
        for step in steps if turn % 2 else reversed(steps):
            step()
    if _stacked(batches):
        for batch in batches:  # the memory is left as it was
            engine.encode(batch)
    count = len(facts)
    return {
        "facts": count,
        "requests": len(requests),
        "own_tokens": sum(map(len, facts)),
        "request_tokens": sum(len(request.ids) for request in requests),
        "computed_tokens": sum(len(request.ids) - request.base_tokens for request in requests),
        "encode_ms": spread([1e3 * seconds / count for seconds in encodes[1:]]),
        "prefill_ms": spread([1e3 * seconds / count for seconds in prefills[1:]]),
        "ratio": spread([a / b for a, b in zip(encodes[1:], prefills[1:], strict=True)]),
    }


def _encode(engine: Watched, batches: Sequence[Sequence[EncodeRequest]], owner: str) -> float:
    if not _stacked(batches):
        batches = [[replace(request, owner=owner, mentions=()) for request in batch] for batch in batches]
    began = perf_counter()
    results = [engine.encode(batch) for batch in batches]
    seconds = perf_counter() - began
    for batch, made in zip(batches, results, strict=True):
        for request, result in zip(batch, made, strict=True):
            if not result.refs:
                raise EngineError(f"an encode failed ({result.error}): give the engine more --blob-bytes")
            engine.forget(request.owner, [ref.key for ref in result.refs])
    return seconds


def _stacked(batches: Sequence[Sequence[EncodeRequest]]) -> bool:
    return any(request.base for batch in batches for request in batch)


async def prefill_seconds(engine: Watched, texts: Sequence[tuple[int, ...]], salt: str) -> float:
    """Seconds to prefill bare texts, asked for all at once. `salt`: one under which nothing was computed before."""
    prompts = [Prompt("user:bench", (Segment(ids),), f"{salt} {number}") for number, ids in enumerate(texts)]
    began = perf_counter()
    await asyncio.gather(*(engine.agenerate(prompt, _ONE) for prompt in prompts))
    return perf_counter() - began
