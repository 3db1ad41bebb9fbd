"""`inferscale bench throughput`: many users with memories of their own, on one engine, in a closed loop.

Along every path the same users ask the same questions, loop after loop, the paths in turn:

    text      the facts are prefilled; the prefix cache is on
    injected  the facts' blobs are injected
    hit       the text path's ids, asked once before, untimed: what the prefix cache still holds of them is in `cached`
    none      the question alone
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.crowd import Crowd, Loop, Member, members
from benchmarks.place import Place, about, add_arguments, opened
from benchmarks.reporting import medians, percentiles, ratio, spread, table, write
from inferscale_memory.errors import EngineError
from inferscale_memory.progress import bar

PATHS = ("text", "injected", "hit", "none")
_RATIOS = (("injected", "text"), ("injected", "hit"), ("injected", "none"))
_TOKENS = ("prompt_tokens", "injected_tokens", "promoted_tokens", "cached_tokens", "prefilled_tokens")


def main(argv: Sequence[str] = ()) -> int:
    """Requests per second and time to the first token of many users at once."""
    parser = argparse.ArgumentParser("inferscale bench throughput", description=main.__doc__)
    add_arguments(parser, random=True)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 10, 50, 100], help="how many at once")
    parser.add_argument("--facts", type=int, default=40, help="of each user (default 40)")
    parser.add_argument("--top-k", "--k", dest="k", type=int, default=20, help="memories recalled (default 20)")
    parser.add_argument("--questions", type=int, default=2, help="of each user in a loop (default 2)")
    parser.add_argument("--rounds", type=int, default=3, help="loops along every path (default 3)")
    parser.add_argument("--max-tokens", type=int, default=8, help="of an answer (default 8)")
    parser.add_argument(
        "--writes", type=float, default=0.0, help="facts added a second meanwhile (default 0)"
    )
    options = parser.parse_args(argv)
    counts = (*options.users, options.facts, options.k, options.questions, options.rounds, options.max_tokens)
    if min(counts) < 1 or options.writes < 0:
        parser.error("all counts must be at least 1, and --writes at least 0")
    with opened(options, asynchronous=True) as place:
        report = {"about": about(options, place), **asyncio.run(run(place, options))}
    show(report)
    write(options, report)
    if options.plots:
        _draw(report, options)
    return 0


async def run(place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """Everything measured at `place`: a row per loop, medians over loops, ratios.

    Args:
        options: users, facts, k, questions, rounds, max_tokens and writes.

    Raises:
        EngineError: blobs cannot be used with this model, or nothing was injected.
    """
    if place.engine.unsupported:
        raise EngineError(f"blobs cannot be used with this model: {place.engine.unsupported}")
    counts = sorted(set(options.users))
    everybody = members(place.users, counts[-1], options.facts)
    crowd = Crowd(
        place,
        everybody,
        k=options.k,
        questions=options.questions,
        max_tokens=options.max_tokens,
        writes=options.writes,
    )
    place.engine.encodes.clear()
    await _remember(crowd, everybody)
    note = _room(place)
    if note:
        print(note, file=sys.stderr)
    rows: list[dict[str, Any]] = []
    answers: dict[tuple[int, str], list[float]] = {}
    for path in PATHS:  # to warm up
        await crowd.loop(path, 1, 0)
    loops = [(users, number) for number in range(options.rounds) for users in counts]
    with bar("Asking", len(loops) * len(PATHS)) as advance:
        for serial, (users, number) in enumerate(loops, 1):
            for step in range(len(PATHS)):
                path = PATHS[(number + step) % len(PATHS)]
                loop = await crowd.loop(path, users, serial)
                rows.append(_row(loop, users, path, number))
                answers.setdefault((users, path), []).extend(answer.ttft_s for answer in loop.answers)
                advance()
    if any(not row["injected_tokens"] for row in rows if row["path"] == "injected"):
        raise EngineError("nothing was injected in a loop: give --blob-bytes or --host-bytes more")
    return {
        "room": note,
        "rows": rows,
        "summary": [_summary(rows, answers, users, path) for users in counts for path in PATHS],
        "ratios": _ratios(rows, counts),
    }


async def _remember(crowd: Crowd, everybody: Sequence[Member]) -> None:
    with bar("Writing and encoding", sum(len(member.said) for member in everybody)) as advance:
        for member in everybody:
            await crowd.remember(member, member.sessions())
            await crowd.flushed()
            advance(len(member.said))


def _room(place: Place) -> str:
    """What to say where the tiers cannot hold everybody's blobs; else nothing."""
    spans = [span for batch in place.engine.encodes for request in batch for span in request.spans]
    tokens, room = sum(span.stop - span.start for span in spans), place.device_tokens + place.host_tokens
    if tokens <= room:
        return ""
    return (
        f"The blobs of all users take {tokens * place.row_bytes / 1e9:.1f} GB and there is room for "
        f"{room * place.row_bytes / 1e9:.1f}: some memories are prefilled as text. Give "
        "--blob-bytes or --host-bytes more."
    )


def _row(loop: Loop, users: int, path: str, number: int) -> dict[str, Any]:
    completions = [_counts(answer.completion) for answer in loop.answers]
    times = percentiles([1e3 * answer.ttft_s for answer in loop.answers])
    return {
        "users": users,
        "path": path,
        "round": number,
        "requests": len(loop.answers),
        "seconds": loop.seconds,
        "requests_per_s": len(loop.answers) / loop.seconds,
        **{f"ttft_{name}_ms": value for name, value in times.items()},
        **medians(completions, _TOKENS),
        "refused": sum(completion["refused"] is not None for completion in completions),
        "written": loop.written,
        "written_per_s": loop.written / loop.seconds,
    }


def _counts(completion: Any) -> dict[str, Any]:
    """The counts of a completion."""
    return {name: getattr(completion, name) for name in (*_TOKENS, "refused")}


def _summary(
    rows: Sequence[dict[str, Any]], answers: dict[tuple[int, str], list[float]], users: int, path: str
) -> dict[str, Any]:
    mine = [row for row in rows if (row["users"], row["path"]) == (users, path)]
    times = percentiles([1e3 * seconds for seconds in answers[users, path]])
    return {
        "users": users,
        "path": path,
        "requests_per_s": spread([row["requests_per_s"] for row in mine]),
        **{f"ttft_{name}_ms": value for name, value in times.items()},
        **medians(mine, _TOKENS),
        "refused": sum(row["refused"] for row in mine),
        "written": sum(row["written"] for row in mine),
    }


def _ratios(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for users in counts:
        mine = [row for row in rows if row["users"] == users]
        for above, below in _RATIOS:
            for column in ("requests_per_s", "ttft_p50_ms"):
                value = ratio(mine, above, below, column=column, pair=lambda row: row["round"])
                found.append({"users": users, "ratio": f"{above} / {below}", "of": column, "value": value})
    return found


def show(report: dict[str, Any]) -> None:
    """Tables on stdout."""
    if report["about"]["note"]:
        print(report["about"]["note"])
    names = (
        "users",
        "path",
        "requests_per_s",
        "ttft_p50_ms",
        "ttft_p90_ms",
        "ttft_p99_ms",
        *_TOKENS,
        "refused",
        "written",
    )
    table("Requests a second: medians of the loops (quartiles)", report["summary"], names)
    table("Ratios, medians of the ratios of each round", report["ratios"], ("users", "ratio", "of", "value"))


def _draw(report: dict[str, Any], options: argparse.Namespace) -> None:
    from benchmarks.plots import lines

    rows = [{**row, "requests_per_s": row["requests_per_s"]["median"]} for row in report["summary"]]
    for name, title, y in (
        ("throughput", "Requests a second", "requests_per_s"),
        ("throughput-ttft", "Time to the first token, median", "ttft_p50_ms"),
    ):
        lines(rows, options.plots, name, title=title, x="users", y=y, by="path", log=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
