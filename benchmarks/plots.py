"""Pictures of what was measured: a PNG, and one HTML page with the same picture and the numbers in it.

The page holds everything it shows: it asks nobody for anything.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from inferscale_memory.errors import ConfigurationError

Row = Mapping[str, Any]
_COLOURS = {"text": "#c0392b", "injected": "#1e8449", "none": "#555555", "hit": "#2471a3"}


def quality_against_ttft(rows: Sequence[Row], folder: Path) -> None:
    """`quality.png` and `quality.html` in `folder`: every setting a point, text's and ours.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    figure, axes = _figure("Answer quality against time to the first token")
    for path, colour in _COLOURS.items():
        mine = [row for row in rows if row["path"] == path]
        if mine:
            axes.scatter(
                [row["ttft_ms"] for row in mine],
                [-row["nll"] for row in mine],
                color=colour,
                label=path,
                alpha=0.8,
            )
            front = _front(mine)
            axes.plot(
                [row["ttft_ms"] for row in front], [-row["nll"] for row in front], color=colour, alpha=0.4
            )
            for row in front:
                axes.annotate(
                    row["name"].removeprefix(path).strip(),
                    (row["ttft_ms"], -row["nll"]),
                    fontsize=6,
                    alpha=0.8,
                )
    axes.set(
        xscale="log",
        xlabel="time to the first token, ms",
        ylabel="log-likelihood of the gold answer, nats a token",
    )
    axes.legend()
    _save(figure, rows, folder, "quality", ("name", "nll", "recovered", "kl", "f1", "ttft_ms", "questions"))


def lines(
    rows: Sequence[Row], folder: Path, name: str, *, title: str, x: str, y: str, by: str, log: bool = False
) -> None:
    """`<name>.png` and `<name>.html`: column `y` over column `x`, one line for each value of column `by`."""
    figure, axes = _figure(title)
    for value in dict.fromkeys(row[by] for row in rows):
        mine = sorted((row for row in rows if row[by] == value), key=lambda row: row[x])
        axes.plot(
            [row[x] for row in mine],
            [row[y] for row in mine],
            marker="o",
            label=str(value),
            color=_COLOURS.get(str(value)),
        )
    axes.set(xlabel=x, ylabel=y, yscale="log" if log else "linear")
    axes.legend()
    _save(figure, rows, folder, name, tuple(rows[0]) if rows else ())


def ttft_lines(summary: Sequence[Row], folder: Path, name: str, *, title: str, x: str) -> None:
    """`lines` of the median time to the first token over column `x`, one for each path."""
    medians = [{**row, "ttft_ms": row["ttft_ms"]["median"]} for row in summary]
    lines(medians, folder, name, title=title, x=x, y="ttft_ms", by="path", log=True)


def _front(rows: Sequence[Row]) -> list[Row]:
    """Those that nothing is both faster and better than, the fastest first."""
    best, front = float("inf"), []
    for row in sorted(rows, key=lambda row: (row["ttft_ms"], row["nll"])):
        if row["nll"] < best:
            best = row["nll"]
            front.append(row)
    return front


def _figure(title: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("plots need matplotlib: pip install 'inferscale-memory[bench]'") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure: Any, rows: Sequence[Row], folder: Path, name: str, columns: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=150)
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    svg = drawing.getvalue()
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_said(row.get(column)))}</td>" for column in columns) + "</tr>\n"
        for row in rows
    )
    (folder / f"{name}.html").write_text(
        "<!doctype html><meta charset='utf-8'>"
        f"<title>{escape(name)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 10px;text-align:right}"
        "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f4f4f4}</style>"
        f"{svg[svg.index('<svg') :]}<table><tr>{head}</tr>\n{body}</table>\n",
        encoding="utf-8",
    )


def _said(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
