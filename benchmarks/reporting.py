"""From measurements to medians, ratios, a table, a file. Values only; nothing is measured here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

Row = Mapping[str, Any]
_WIDTH = 150


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, and of how many."""
    low, middle, high = np.percentile(values, (25, 50, 75)) if len(values) else (np.nan,) * 3
    return {"median": float(middle), "q1": float(low), "q3": float(high), "n": len(values)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99."""
    found = np.percentile(values, (50, 90, 99)) if len(values) else (np.nan,) * 3
    return dict(zip(("p50", "p90", "p99"), map(float, found), strict=True))


def medians(rows: Sequence[Row], names: Sequence[str]) -> dict[str, float]:
    """Median of each column of `names`."""
    return {name: float(median(row[name] for row in rows)) for name in names}


def ratio(
    rows: Sequence[Row], above: str, below: str, *, column: str, pair: Callable[[Row], Any]
) -> dict[str, float] | None:
    """Spread of `column` on path `above` over that on path `below`, within each repetition: what was measured near to
    each other is compared. None where a path was not taken.

    Args:
        pair: what the two rows of a repetition have in common.
    """
    of = {path: {pair(row): row[column] for row in rows if row["path"] == path} for path in (above, below)}
    both = [name for name in of[above] if name in of[below]]
    return spread([of[above][name] / of[below][name] for name in both]) if both else None


def table(title: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print rows on stdout; what a row has not is left empty."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=None)
    for name in columns:
        shown.add_column(name.removesuffix("_tokens"), justify="right")
    for row in rows:
        shown.add_row(*(_said(row.get(name)) for name in columns))
    console = Console()
    console.width = max(console.width, _WIDTH)  # a pipe has no width
    console.print(shown)


def write(options: argparse.Namespace, report: Mapping[str, Any]) -> None:
    """The report as JSON, where `--json` asks for it."""
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{_number(value['median'])} ({_number(value['q1'])}-{_number(value['q3'])})"
    return _number(value) if isinstance(value, float) else "" if value is None else str(value)


def _number(value: float) -> str:
    if value != value:  # nothing was measured
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
