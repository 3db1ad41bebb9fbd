"""`inferscale bench encoding`: long facts, from `add` until each is encoded, against the prefill of their own tokens.

Both take turns on one engine, each time for a new user. The prefill is asked for all at once, as an engine that batches
likes it best, and shares nothing with what was computed before. The encodes are those of the memory as it is set up:
each fact behind its context, which is injected where it has blobs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from benchmarks.costs import prefill_seconds
from benchmarks.place import Place, about, add_arguments, opened
from benchmarks.reporting import spread, table, write
from inferscale_memory.errors import EngineError
from inferscale_memory.progress import bar


def main(argv: Sequence[str] = ()) -> int:
    """Tokens a second of encoding long facts, beside those of a plain prefill."""
    parser = argparse.ArgumentParser("inferscale bench encoding", description=main.__doc__)
    add_arguments(parser, random=False)
    parser.add_argument("--facts", type=int, default=64, help="facts of one round (default 64)")
    parser.add_argument(
        "--words", type=int, nargs=2, default=[200, 280], metavar=("FROM", "TO"), help="length of a fact"
    )
    parser.add_argument("--repeat", type=int, default=3, help="rounds after the first (default 3)")
    options = parser.parse_args(argv)
    if min(options.facts, options.repeat, *options.words) < 1 or options.words[0] > options.words[1]:
        parser.error("--facts, --repeat and --words must be at least 1, and --words FROM at most TO")
    with opened(options) as place:
        report = {
            "about": about(options, place),
            **run(place, options.facts, tuple(options.words), options.repeat),
        }
    show(report)
    write(options, report)
    return 0


def run(place: Place, facts: int, words: tuple[int, int], repeat: int) -> dict[str, Any]:
    """Rounds of encoding and prefilling `facts` new facts of so many words each.

    Raises:
        EngineError: blobs cannot be used with this model, or a fact was not encoded.
    """
    if place.engine.unsupported:
        raise EngineError(f"blobs cannot be used with this model: {place.engine.unsupported}")
    vocabulary = [
        word
        for user in place.users
        for session in user.sessions
        for turn in session.turns
        for word in turn.text.split()
    ]
    draw = random.Random(0)
    rows = []
    with bar("Encoding against prefilling", repeat + 1) as advance:
        for number in range(repeat + 1):
            texts = [" ".join(draw.choices(vocabulary, k=draw.randint(*words))) for _ in range(facts)]
            steps = (_encoded, _prefilled)
            row: dict[str, Any] = {"repetition": number}
            for step in steps if number % 2 else reversed(steps):
                row.update(step(place, texts, f"bench-{number}"))
            if number:  # the first warms up
                row["encoded_per_s"] = row["encoded_tokens"] / row["encode_s"]
                row["prefilled_per_s"] = row["prefilled_tokens"] / row["prefill_s"]
                rows.append({**row, "ratio": row["prefilled_per_s"] / row["encoded_per_s"]})
            advance()
    columns = ("encoded_tokens", "encoded_per_s", "prefilled_per_s", "ratio")
    summary = {
        "facts": facts,
        **{name: spread([row[name] for row in rows]) for name in columns},
        "computed": spread([row["computed_tokens"] / row["encoded_tokens"] for row in rows]),
    }
    return {"rows": rows, "summary": summary}


def _encoded(place: Place, texts: Sequence[str], user: str) -> dict[str, Any]:
    """`flush` after the facts were added; they are gone when it returns."""
    memory, engine = place.memory, place.engine
    with engine.held():
        for text in texts:
            memory.add(text, user_id=user, infer=False)
        engine.encodes.clear()
    began = perf_counter()
    memory.flush()
    seconds = perf_counter() - began
    requests = [request for batch in engine.encodes for request in batch]
    spans = [span for request in requests for span in request.spans]
    memory.delete_all(user_id=user)
    if len(spans) < len(texts):
        raise EngineError(f"{len(spans)} of {len(texts)} facts were encoded: give --blob-bytes more")
    return {
        "encode_s": seconds,
        "encoded_tokens": sum(span.stop - span.start for span in spans),
        "computed_tokens": sum(len(request.ids) - request.base_tokens for request in requests),
    }


def _prefilled(place: Place, texts: Sequence[str], salt: str) -> dict[str, Any]:
    """The same facts as bare prompts."""
    encode = place.engine.tokenizer.encode
    ids = [tuple(encode(text)) for text in texts]
    seconds = asyncio.run(prefill_seconds(place.engine, ids, f"prefill {salt}"))
    return {"prefill_s": seconds, "prefilled_tokens": sum(map(len, ids))}


def show(report: dict[str, Any]) -> None:
    """The table on stdout. `ratio`: how much longer a token takes to encode than to prefill; `computed`: tokens that
    were computed for each token of a fact, its context included."""
    table(
        "Encoding long facts against the prefill of their own tokens, tokens a second",
        [report["summary"]],
        ("facts", "encoded_tokens", "encoded_per_s", "prefilled_per_s", "ratio", "computed"),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
