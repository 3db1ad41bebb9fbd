"""What must hold of the rows of every benchmark, whatever engine they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]


def of(rows: Rows, path: str) -> Rows:
    found = [row for row in rows if row["path"] == path]
    assert found, f"no row of path {path}"
    return found


def times_to_first_token(
    report: dict[str, Any], *, repeat: int, ks: Sequence[int], host: bool, cache: bool
) -> None:
    """Every path was taken, on the same ids, and is what its name says."""
    rows = report["rows"]
    paths = ["text", "injected", *(["host"] if host else []), "hit", "none"]
    assert len(rows) == repeat * len(ks) * len(paths)
    for repetition in range(repeat):
        for k in ks:
            here = [row for row in rows if (row["repetition"], row["k"]) == (repetition, k)]
            assert sorted(row["path"] for row in here) == sorted(paths)
            with_memory = [row for row in here if row["path"] != "none"]
            assert len({row["prompt_tokens"] for row in with_memory}) == 1
            assert {row["memories"] for row in with_memory} == {k}
    for row in rows:
        known = row["injected_tokens"] + row["cached_tokens"] + row["prefilled_tokens"]
        assert row["prompt_tokens"] == known
        assert row["ttft_ms"] > row["search_ms"] + row["embed_ms"] + row["compose_ms"] > 0
    for row in of(rows, "injected"):
        assert row["injected_tokens"] > row["memory_tokens"] > 0
        assert (row["promoted_tokens"], row["cached_tokens"]) == (0, 0)
        assert min(row["inject_ms"], row["copy_ms"]) > 0
    for row in [*of(rows, "text"), *of(rows, "hit"), *of(rows, "none")]:
        assert row["injected_tokens"] == row["inject_ms"] == 0
    if host:
        for row in of(rows, "host"):
            assert row["injected_tokens"] >= row["promoted_tokens"] >= row["memory_tokens"] > 0
    if cache:
        for row in of(rows, "hit"):
            assert row["cached_tokens"] > row["prompt_tokens"] // 2
        assert all(row["cached_tokens"] < row["prompt_tokens"] // 2 for row in of(rows, "text"))
    assert all(row["search_ms"] == row["memories"] == 0 for row in of(rows, "none"))
    assert [(row["k"], row["path"]) for row in report["summary"]] == [(k, path) for k in ks for path in paths]
    assert all(
        row["ttft_ms"]["q1"] <= row["ttft_ms"]["median"] <= row["ttft_ms"]["q3"] for row in report["summary"]
    )
    names = {row["ratio"] for row in report["ratios"]}
    assert names >= {"text / injected", "injected / hit", "injected / none"}
    assert ("host / injected" in names) == host
    assert [row["k"] for row in report["composing"]] == list(ks)
    costs = report["encoding"]
    assert costs["request_tokens"] > costs["own_tokens"] > 0 < costs["facts"]
    assert costs["ratio"]["median"] > 0
