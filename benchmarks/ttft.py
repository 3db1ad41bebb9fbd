"""`inferscale bench ttft`: time to the first token along every path, on the same facts and the same token ids.

    text      the facts are prefilled; the engine's prefix cache is on, and all questions share one salt
    injected  the facts' blobs lie on the device
    host      the facts' blobs lie in host memory: others were in use since, and the engine says what came back
    hit       the text path's ids again, all of it in the engine's own prefix cache: the floor
    none      the question alone

A time runs from the question to the first token. Where an injected row was not injected, a host row did not come from
the host, or two paths had different ids, the benchmark ends: a wrong number is worse than none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.costs import encoding
from benchmarks.evictor import Evictor
from benchmarks.place import Place, about, add_arguments, opened
from benchmarks.reporting import medians, ratio, spread, table, write
from inferscale_memory.commands.demo.conversations import Question, User
from inferscale_memory.commands.demo.copying import PlainCopy
from inferscale_memory.commands.demo.paths import Once, Paths
from inferscale_memory.commands.demo.remembering import alternating, remember
from inferscale_memory.engine.base import EncodeRequest, SamplingOptions
from inferscale_memory.errors import EngineError
from inferscale_memory.progress import bar

PATHS = ("text", "injected", "host", "hit", "none")
_ANSWER = SamplingOptions(max_tokens=2, ignore_eos=True)
"""The first token's answer would leave before the workers' report of what composing took."""
_ENCODED_AGAIN = 64
"""Facts by which the cost of encoding is measured."""
_RATIOS = (("text", "injected"), ("injected", "hit"), ("host", "injected"), ("injected", "none"))
_PARTS = ("ttft_ms", "embed_ms", "search_ms", "compose_ms", "inject_ms")
_TOKENS = ("prompt_tokens", "injected_tokens", "promoted_tokens", "cached_tokens", "prefilled_tokens")


def main(argv: Sequence[str] = ()) -> int:
    """Time to the first token: text, injected from device and host, a prefix-cache hit, no memory; what encoding and
    composing cost."""
    parser = argparse.ArgumentParser("inferscale bench ttft", description=main.__doc__)
    add_arguments(parser, random=True)
    parser.add_argument(
        "--top-k", "--k", dest="k", type=int, nargs="+", default=[5, 10, 20, 50], help="how many memories to recall"
    )
    parser.add_argument("--repeat", type=int, default=9, help="questions along every path (default 9)")
    options = parser.parse_args(argv)
    if min(options.k) < 1 or options.repeat < 1:
        parser.error("--top-k and --repeat must be at least 1")
    # The device tier holds one composition of any length, and little else: then it is soon full of somebody else's.
    with opened(options, device_tokens=options.max_model_len + 512) as place:
        report = {"about": about(options, place), **run(place, options.k, options.repeat)}
    show(report)
    write(options, report)
    if options.plots:
        from benchmarks.plots import ttft_lines

        ttft_lines(report["summary"], options.plots, "ttft", title="Time to the first token", x="k")
    return 0


def run(place: Place, ks: Sequence[int], repeat: int, *, copy: PlainCopy | None = None) -> dict[str, Any]:
    """Everything measured at `place`: rows, their medians, ratios, what encoding and composing cost.

    Raises:
        EngineError: blobs cannot be used with this model, or a row is not what its path says.
    """
    engine = place.engine
    if engine.unsupported:
        raise EngineError(f"blobs cannot be used with this model: {engine.unsupported}")
    batches = _remember(place)
    measured = _Measured(place, copy or PlainCopy(place.device))
    questions = alternating(place.users)
    ks = sorted(set(ks))
    for _ in measured.repetition(*questions[0], ks[-1], salt="warm-up", turn=0):
        pass
    rows: list[dict[str, Any]] = []
    paths = [path for path in PATHS if place.host or path != "host"]
    with bar("Asking", repeat * len(ks) * len(paths)) as advance:
        for turn in range(repeat):
            user, question = questions[turn % len(questions)]
            round_ = turn // len(questions)  # what is asked again is not to be known already
            for k in ks:
                for row in measured.repetition(user, question, k, salt=f"{round_}", turn=turn):
                    rows.append({"repetition": turn, **row})
                    advance()
    with bar("Encoding against prefilling", 1):
        costs = encoding(engine, batches, min(repeat, 5))
    return {
        "rows": rows,
        "summary": _summary(rows, paths, ks),
        "ratios": _ratios(rows, ks),
        "composing": _composing(rows, ks),
        "encoding": costs,
    }


def _remember(place: Place) -> Sequence[Sequence[EncodeRequest]]:
    """Everything that was said becomes facts; returns the last batches in which they were encoded, of some 64 facts."""
    batches = place.engine.encodes
    batches.clear()
    if place.random:
        _remember_at_random(place)
    else:
        remember(place.memory, place.users)
    last: list[Sequence[EncodeRequest]] = []
    while batches and sum(len(request.spans) for batch in last for request in batch) < _ENCODED_AGAIN:
        last.insert(0, batches.pop())
    return last


def _remember_at_random(place: Place) -> None:
    for user in place.users:
        for session in user.sessions:
            place.memory.write(user.user_id, session)
    with bar("Encoding each fact once", sum(user.turns for user in place.users)) as advance:
        done = 0

        def progress(encoded: int, _: int) -> None:
            nonlocal done
            advance(encoded - done)
            done = encoded

        place.memory.flush(progress)


class _Measured:
    """Asks one question along every path."""

    def __init__(self, place: Place, copy: PlainCopy) -> None:
        self._place = place
        self._paths = Paths(place.memory, _ANSWER)
        self._copy = copy
        self._evictor = Evictor(place.engine, place.device_tokens) if place.host else None
        self._serial = 0

    def repetition(
        self, user: User, question: Question, k: int, *, salt: str, turn: int
    ) -> Iterator[dict[str, Any]]:
        """One row per path. `turn` rotates the order of the paths; a hit follows its text."""
        seen: dict[str, list[int]] = {}

        def once(path: str, way: str, salt: str) -> dict[str, Any]:
            clock = self._place.clock
            before = clock.seconds if clock is not None else 0.0
            done = self._paths.once(way, user.user_id, question.text, k, salt)
            embed_s = (clock.seconds if clock is not None else 0.0) - before
            if path != "none":
                seen[path] = done.prompt.ids
            return self._row(path, user, question, k, done, embed_s)

        steps: list[Callable[[], list[dict[str, Any]]]] = [
            lambda: [self._from_device(once)],
            lambda: [once("text", "text", f"text {salt}"), once("hit", "text", f"text {salt}")],
            lambda: [once("none", "none", self._fresh())],
        ]
        if self._evictor is not None:
            steps.append(lambda: [self._from_host(once)])
        for number in range(len(steps)):
            yield from steps[(turn + number) % len(steps)]()
        if len({tuple(ids) for ids in seen.values()}) > 1:
            raise EngineError("the paths had different prompts: the memory has changed while it was measured")

    def _from_device(self, once: Callable[[str, str, str], dict[str, Any]]) -> dict[str, Any]:
        if self._evictor is not None:  # whoever was asked before has pushed it out
            once("injected", "injected", self._fresh())
        copied = self._copied(once("injected", "injected", self._fresh()))
        if copied["promoted_tokens"]:
            raise EngineError("blobs that had just been used came from the host: give --blob-bytes more")
        return copied

    def _from_host(self, once: Callable[[str, str, str], dict[str, Any]]) -> dict[str, Any]:
        assert self._evictor is not None, "asked only where there is a host tier"
        self._evictor.evict()
        row = once("host", "injected", self._fresh())
        if row["promoted_tokens"] < row["memory_tokens"]:
            raise EngineError(
                f"{row['promoted_tokens']} tokens of {row['memory_tokens']} came from the host: blobs have stayed on "
                "the device, pass a smaller --blob-bytes"
            )
        return row

    def _copied(self, row: dict[str, Any]) -> dict[str, Any]:
        """With what a plain copy of the injected bytes takes at this moment."""
        seconds = self._copy.seconds(row["injected_tokens"] * self._place.row_bytes)
        return {**row, "copy_ms": 1e3 * seconds}

    def _row(
        self, path: str, user: User, question: Question, k: int, done: Once, embed_s: float
    ) -> dict[str, Any]:
        completion = done.completion
        injected = path in ("injected", "host")
        if injected and (completion.refused or not completion.injected_tokens):
            raise EngineError(
                f"not everything was injected ({completion.refused}): give --host-bytes or --blob-bytes more"
            )
        composition = done.prompt.composition if injected else ()
        return {
            "k": k,
            "path": path,
            "user": user.user_id,
            "question": question.text,
            "ttft_ms": 1e3 * done.ttft_s,
            "embed_ms": 1e3 * embed_s,
            "search_ms": 1e3 * max(0.0, done.search_s - embed_s),
            "compose_ms": 1e3 * done.compose_s,
            "inject_ms": 1e3 * completion.compose_s,
            "memories": len(done.memories),
            "dropped": done.dropped,
            "memory_tokens": sum(len(segment.ids) for segment in composition[1:]),
            **{name: getattr(completion, name) for name in _TOKENS},
        }

    def _fresh(self) -> str:
        """A salt that nothing was computed under."""
        self._serial += 1
        return f"once {self._serial}"


def _of(rows: Sequence[dict[str, Any]], k: int, path: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["k"], row["path"]) == (k, path)]


def _summary(rows: Sequence[dict[str, Any]], paths: Sequence[str], ks: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for k in ks:
        for path in paths:
            mine = _of(rows, k, path)
            times = {name: spread([row[name] for row in mine]) for name in _PARTS}
            found.append({"k": k, "path": path, **times, **medians(mine, _TOKENS)})
    return found


def _ratios(rows: Sequence[dict[str, Any]], ks: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for k in ks:
        mine = [row for row in rows if row["k"] == k]
        for above, below in _RATIOS:
            value = ratio(mine, above, below, column="ttft_ms", pair=lambda row: row["repetition"])
            if value is not None:
                found.append({"k": k, "ratio": f"{above} / {below}", "value": value})
    return found


def _composing(rows: Sequence[dict[str, Any]], ks: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for k in ks:
        mine = _of(rows, k, "injected")
        found.append(
            {
                "k": k,
                **medians(mine, ("injected_tokens",)),
                "inject_ms": spread([row["inject_ms"] for row in mine]),
                "copy_ms": spread([row["copy_ms"] for row in mine]),
                "ratio": spread([row["inject_ms"] / row["copy_ms"] for row in mine]),
            }
        )
    return found


def show(report: dict[str, Any]) -> None:
    """Tables on stdout."""
    if report["about"]["note"]:
        print(report["about"]["note"])
    parts = _PARTS[1:]
    summary = [{**row, **{name: row[name]["median"] for name in parts}} for row in report["summary"]]
    names = ("k", "path", "ttft_ms", *parts, *_TOKENS)
    table("Time to the first token, medians (quartiles)", summary, names)
    table("Ratios, medians of the ratios of each repetition", report["ratios"], ("k", "ratio", "value"))
    table(
        "Composing against a plain copy of the same bytes",
        report["composing"],
        ("k", "injected_tokens", "inject_ms", "copy_ms", "ratio"),
    )
    table(
        "Encoding a fact against the prefill of its own tokens",
        [report["encoding"]],
        ("facts", "own_tokens", "request_tokens", "computed_tokens", "encode_ms", "prefill_ms", "ratio"),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
