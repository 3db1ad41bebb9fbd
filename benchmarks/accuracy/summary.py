"""Records of single questions, brought together: one row per setting, over the questions that every setting has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.accuracy.measures import mean_interval, recovered
from benchmarks.accuracy.settings import NONE, Setting

Record = Mapping[str, Any]


def rows(
    settings: Sequence[Setting], records: Sequence[Record], *, category: int | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """One row per setting, with paired differences against text in its best order at the same k.

    Only questions are counted that every setting has, so that all rows are about the same ones. A setting that was
    never asked has no row.
    """
    asked = {record["setting"] for record in records}
    settings = [setting for setting in settings if setting.name in asked]
    table: dict[str, dict[str, Record]] = {setting.name: {} for setting in settings}
    for record in records:
        if record["setting"] in table and category in (None, record["category"]):
            table[record["setting"]][record["question"]] = record
    shared = sorted(set.intersection(*(set(found) for found in table.values()))) if table else []
    if not shared:
        return []
    return [_row(setting, table, settings, shared, seed) for setting in settings]


def best_text(settings: Sequence[Setting], nll: Mapping[str, float], of: Setting) -> Setting | None:
    """The text path that recalls as much as `of` with the lowest NLL, whatever its order; nothing moved, nothing
    scaled."""
    texts = [
        setting
        for setting in settings
        if setting == setting.plainest
        and (setting.k, setting.budget, setting.tokens, setting.pinned)
        == (of.k, of.budget, of.tokens, of.pinned)
        and setting.path == "text"
    ]
    return min(texts, key=lambda setting: nll[setting.name], default=None)


def _row(
    setting: Setting,
    table: Mapping[str, Mapping[str, Record]],
    settings: Sequence[Setting],
    questions: Sequence[str],
    seed: int,
) -> dict[str, Any]:
    def column(of: Setting, name: str) -> list[float]:
        return [float(table[of.name][question][name]) for question in questions]

    mine = [table[setting.name][question] for question in questions]
    row: dict[str, Any] = {
        **setting.row(),
        "name": setting.name,
        "questions": len(questions),
        "nll": mean(column(setting, "nll")),
        "ttft_ms": median(column(setting, "ttft_ms")),
        "injected_tokens": median(column(setting, "injected_tokens")),
        "prompt_tokens": median(column(setting, "prompt_tokens")),
    }
    for name in ("kl", "kl_best_last", "f1", "em", "judge"):
        found = [record.get(name) for record in mine]
        row[name] = None if any(value is None for value in found) else mean(found)  # type: ignore[type-var]
    text = best_text(
        settings,
        {name: mean(r["nll"] for r in found.values()) for name, found in table.items()},
        setting,
    )
    if text is None or NONE.name not in table:
        return row
    share, interval = recovered(column(NONE, "nll"), column(text, "nll"), column(setting, "nll"), seed=seed)
    differences = [a - b for a, b in zip(column(setting, "nll"), column(text, "nll"), strict=True)]
    row |= {
        "against": text.name,
        "recovered": share,
        "recovered_ci": list(interval),
        "nll_difference": mean(differences),
        "nll_difference_ci": list(mean_interval(differences, seed=seed)),
    }
    for name in ("f1", "judge"):
        if row[name] is not None and all(
            table[text.name][question].get(name) is not None for question in questions
        ):
            differences = [a - b for a, b in zip(column(setting, name), column(text, name), strict=True)]
            row |= {
                f"{name}_difference": mean(differences),
                f"{name}_difference_ci": list(mean_interval(differences, seed=seed)),
            }
    return row
