"""`inferscale bench index`: what the local vector store costs, as ratios within one run.

1. A search of 1,000 x 384 against a bare numpy dot product and argpartition, interleaved.
2. Inserting and deleting one fact at 20,000 facts against mem0's FAISS store.
3. The cold open of one owner in a file of 10,000 owners with 100 facts each.

Every number is a median. `--part` runs some of it, `--owners` makes the third smaller.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from inferscale_memory.index import Collection
from inferscale_memory.index.searcher import nearest, unit

DIMS = 384
OWNER = {"user_id": "user7"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the three measurements; `--json FILE` writes them too."""
    parser = argparse.ArgumentParser(prog="inferscale bench index", description=main.__doc__)
    parser.add_argument("--part", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--facts", type=int, default=20_000, help="of the second part")
    parser.add_argument("--owners", type=int, default=10_000, help="of the third part")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    found: dict[str, Any] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        if 1 in options.part:
            found["search"] = _search(folder)
        if 2 in options.part:
            found["write"] = _write(folder, options.facts)
        if 3 in options.part:
            found["open"] = _open(folder, options.owners)
    for part, numbers in found.items():
        print(f"{part:8s}" + "   ".join(f"{name} {value:,.4g}" for name, value in numbers.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _search(folder: Path, rows: int = 1000, k: int = 10, repeat: int = 300) -> dict[str, float]:
    """Microseconds. `searcher_ratio` is the exact search alone; `store_ratio` is a whole call with mem0's
    filters, from the vector to payloads the caller may change."""
    draw = np.random.default_rng(0)
    vectors = unit(draw.standard_normal((rows, DIMS)).astype(np.float32))
    facts = Collection(folder / "search.sqlite", "facts", dims=DIMS)
    _fill(facts, 7, vectors)

    def bare(query: Any) -> Any:
        scores = vectors @ query
        return np.argpartition(-scores, k)[:k]

    times: list[tuple[float, float, float]] = []
    for turn in range(repeat + 20):
        query = unit(draw.standard_normal((1, DIMS)).astype(np.float32))
        one = (
            _seconds(bare, query[0]),
            _seconds(nearest, query, vectors, k),
            _seconds(facts.search, query, k, OWNER),
        )
        if turn >= 20:
            times.append(one)
    facts.close()
    return {
        "bare_us": 1e6 * median(one[0] for one in times),
        "searcher_us": 1e6 * median(one[1] for one in times),
        "store_us": 1e6 * median(one[2] for one in times),
        "searcher_ratio": median(one[1] / one[0] for one in times),
        "store_ratio": median(one[2] / one[0] for one in times),
    }


def _write(folder: Path, rows: int, repeat: int = 7) -> dict[str, float]:
    """Milliseconds for one fact, both stores filled and warm."""
    from mem0.vector_stores.faiss import FAISS

    from inferscale_memory.mem0_adapter.vector_store import Store

    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((rows + repeat + 1, DIMS)).astype(np.float32)
    payloads = [_payload(7, number) for number in range(len(vectors))]
    ids = [f"{number:08d}" for number in range(len(vectors))]
    stores = {
        "ours": Store(str(folder / "write.sqlite"), "facts", DIMS),
        "mem0_faiss": FAISS("facts", str(folder / "faiss"), embedding_model_dims=DIMS),
    }
    found: dict[str, float] = {}
    times: dict[str, list[float]] = {}
    for store in stores.values():
        store.insert(vectors[:rows], payloads[:rows], ids[:rows])
        store.search("", vectors[0], 1, OWNER)
    for row in range(rows, rows + repeat + 1):
        for name, store in stores.items():
            insert = _seconds(_insert, store, row, vectors, payloads, ids)
            delete = _seconds(store.delete, ids[row - rows])
            if row > rows:
                times.setdefault(f"{name}_insert", []).append(insert)
                times.setdefault(f"{name}_delete", []).append(delete)
    for what in ("insert", "delete"):
        for name in stores:
            found[f"{name}_{what}_ms"] = 1e3 * median(times[f"{name}_{what}"])
        found[f"{what}_ratio"] = found[f"mem0_faiss_{what}_ms"] / found[f"ours_{what}_ms"]
    return found


def _insert(store: Any, row: int, vectors: Any, payloads: Any, ids: Any) -> None:
    store.insert(vectors[row : row + 1], payloads[row : row + 1], ids[row : row + 1])


def _open(folder: Path, owners: int, facts_each: int = 100, repeat: int = 9) -> dict[str, float]:
    """Milliseconds from nothing open to the first answer, each time another owner and another connection.
    The operating system has the pages in its cache."""
    path = folder / "open.sqlite"
    draw = np.random.default_rng(0)
    facts = Collection(path, "facts", dims=DIMS)
    began = perf_counter()
    for owner in range(owners):
        _fill(facts, owner, draw.standard_normal((facts_each, DIMS)).astype(np.float32))
    filled = perf_counter() - began
    facts.close()
    query = draw.standard_normal((1, DIMS)).astype(np.float32)
    vector, words = [], []
    for owner in draw.integers(0, owners, repeat).tolist():
        filters = {"user_id": f"user{owner}"}
        began = perf_counter()
        cold = Collection(path, "facts")
        hits = cold.search(query, 10, filters)[0]
        middle = perf_counter()
        cold.search_words("fact about tea", 10, filters)
        words.append(perf_counter() - middle)
        vector.append(middle - began)
        assert len(hits) == 10
        cold.close()
    return {
        "owners": owners,
        "fill_s": filled,
        "file_mb": path.stat().st_size / 1e6,
        "open_and_search_ms": 1e3 * median(vector),
        "worst_ms": 1e3 * max(vector),
        "first_keyword_search_ms": 1e3 * median(words),
    }


def _fill(facts: Collection, owner: int, vectors: Any) -> None:
    payloads = [_payload(owner, number) for number in range(len(vectors))]
    facts.put([f"{owner}-{number}" for number in range(len(vectors))], vectors, payloads)


def _payload(owner: int, number: int) -> dict[str, Any]:
    """What mem0 stores with a fact of ordinary length."""
    return {
        "user_id": f"user{owner}",
        "data": f"Fact number {number} says that somebody likes a walk along the river before breakfast",
        "hash": f"{number:032x}",
        "created_at": "2026-01-01T00:00:00.000000+00:00",
        "updated_at": "2026-01-01T00:00:00.000000+00:00",
        "text_lemmatized": f"fact number {number} say somebody like walk along river breakfast",
    }


def _seconds(work: Callable[..., object], *args: Any) -> float:
    began = perf_counter()
    work(*args)
    return perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
