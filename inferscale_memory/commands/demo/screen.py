"""What the demo shows: answers side by side, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from inferscale_memory.commands.demo.paths import PATHS, Row, ratio, ttft_ms

BAR = 44
COLOURS = {"text": "red", "injected": "green", "hit": "cyan", "none": "white"}


def answers(console: Console, rows: Sequence[Row]) -> None:
    """Every question at the largest k, with the answer from injected memories beside the text path's."""
    k = max(row.k for row in rows)
    table = Table(title=f"Answers, k = {k}", title_justify="left")
    for name in ("user", "question", "injected", "text", "no memory"):
        table.add_column(name, overflow="fold")
    by_path = {path: [row for row in rows if (row.k, row.path) == (k, path)] for path in PATHS}
    for injected, text, none in zip(by_path["injected"], by_path["text"], by_path["none"], strict=True):
        table.add_row(injected.user, injected.question, *(_marked(row) for row in (injected, text, none)))
    console.print(table)
    for k in sorted({row.k for row in rows}):
        counts = {path: [row.right for row in rows if (row.k, row.path) == (k, path)] for path in PATHS}
        found = [row.found for row in rows if (row.k, row.path) == (k, "text")]
        parts = ", ".join(f"{path} {sum(counts[path])}" for path in ("injected", "text", "none"))
        console.print(
            f"k = {k}: right answers of {len(found)}: {parts}. The answer was among the recalled memories "
            f"{sum(found)} times.",
            highlight=False,
        )
        dropped = max(row.dropped for row in rows if row.k == k)
        if dropped:
            console.print(
                f"  up to {dropped} memories did not fit the context and were left out", style="yellow"
            )
    console.print()


def times(console: Console, rows: Sequence[Row], copy_s: Mapping[int, float]) -> None:
    """Time to first token per k and path, retrieval and composition included, and what composing costs."""
    console.print("[bold]Time to the first token[/bold] (median; retrieval and composition included)")
    longest = max(ttft_ms(rows, row.k, row.path) for row in rows)
    for k in sorted({row.k for row in rows}):
        console.print(f"\nk = {k}", highlight=False)
        for path in PATHS:
            chosen = [row for row in rows if (row.k, row.path) == (k, path)]
            value = ttft_ms(rows, k, path)
            bar = "█" * max(1, round(BAR * value / longest))
            injected = median(row.completion.injected_tokens for row in chosen)
            prefilled = median(row.completion.prefilled_tokens for row in chosen)
            console.print(
                f"  {path:<9}[{COLOURS[path]}]{bar:<{BAR}}[/] {value:7.0f} ms   "
                f"injected {injected:5.0f}  prefilled {prefilled:5.0f}",
                highlight=False,
            )
        _ratios(console, rows, k, copy_s[k])


def _ratios(console: Console, rows: Sequence[Row], k: int, copy_s: float) -> None:
    pairs = len([row for row in rows if (row.k, row.path) == (k, "injected")])
    composed = [row.completion for row in rows if (row.k, row.path) == (k, "injected")]
    compose_s = median(completion.compose_s for completion in composed)
    tokens = median(completion.injected_tokens for completion in composed)
    console.print(
        f"  injected is {ratio(rows, k, 'text', 'injected'):.1f}x faster than text and takes "
        f"{ratio(rows, k, 'injected', 'hit'):.2f}x a hit (median of {pairs} pairs); "
        f"composing {tokens:.0f} tokens took {1e3 * compose_s:.1f} ms, "
        f"{compose_s / copy_s:.1f}x a plain copy of the same bytes ({1e3 * copy_s:.1f} ms)",
        highlight=False,
    )


def _marked(row: Row) -> str:
    return f"[green]✓[/green] {row.answer}" if row.right else row.answer
