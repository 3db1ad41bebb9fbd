"""The vectors of a collection made anew by another model, in place, batch by batch.

Every batch is one transaction that also notes how far it has come, so it may be interrupted anywhere and goes on where
it was. Until all is done nobody can search: vectors of two models say nothing about each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from inferscale_memory.errors import StoreError
from inferscale_memory.index.body import DamagedBodyError
from inferscale_memory.index.embedder import Reembedding
from inferscale_memory.index.file import FactFile
from inferscale_memory.index.records import Floats, to_json
from inferscale_memory.index.schema import SHIFT
from inferscale_memory.index.searcher import unit

Embed = Callable[[Sequence[str]], Sequence[Any]]
Step = Callable[[int], None]
"""Told how many more facts are done with."""

_NEXT = f"""
SELECT place, body FROM facts
WHERE place > ? AND place >> {SHIFT} IN (SELECT number FROM owners WHERE collection = ?) ORDER BY place LIMIT ?
"""


def reembed(file: FactFile, model: str, embed: Embed, *, batch: int, step: Step = lambda done: None) -> int:
    """Embed every fact of `file`'s collection anew by `embed`, which is `model`'s; how many were embedded now.

    Raises:
        StoreError: the file cannot be written, or the vectors cannot be taken.
    """
    done = 0
    with file._change() as db:
        known, under_way = file.embedded.model(db), file.embedded.under_way(db)
    if under_way is None and known == model:
        return 0
    if under_way is not None and under_way.model != model:
        under_way = None
    place = -1 if under_way is None else under_way.place
    if place >= 0:
        with file._snapshot() as db:
            query = f"SELECT count(*) FROM facts WHERE place <= ? AND place >> {SHIFT} IN"
            owners = " (SELECT number FROM owners WHERE collection = ?)"
            step(int(db.execute(query + owners, (place, file.collection)).fetchone()[0]))
    while True:
        with file._snapshot() as db:
            rows = db.execute(_NEXT, (place, file.collection, batch)).fetchall()
        if not rows:
            break
        facts = []
        for at, body in rows:
            try:
                _, id, payload = file._layout.unpack(body)
            except DamagedBodyError:  # it stays left out
                continue
            facts.append((at, body, id, payload))
        vectors = _matrix(embed([str(payload.get("data") or "") for *_, payload in facts])) if facts else None
        if vectors is not None and len(vectors) != len(facts):
            raise StoreError(
                f"the embedder gave {len(vectors)} vectors for {len(facts)} texts: look at its service"
            )
        place = rows[-1][0]
        with file._change() as db:
            if vectors is not None:
                under_way = file.embedded.begin(db, model, vectors.shape[1])
                for (at, body, id, payload), vector in zip(facts, vectors, strict=True):
                    anew = file._layout.pack(vector, to_json(id, payload))
                    db.execute("UPDATE facts SET body = ? WHERE place = ? AND body = ?", (anew, at, body))
                touched = {(at >> SHIFT,) for at, *_ in facts}
                db.executemany("UPDATE owners SET changes = changes + 1 WHERE number = ?", touched)
                file.embedded.advance(db, place)
        done += len(facts)
        step(len(rows))
    with file._change() as db:
        if under_way is not None:
            file.embedded.finish(db, Reembedding(model, under_way.dims, place))
        elif file.embedded.dims(db) is not None:
            file.embedded.claim(db, model)
    file._scrub()
    return done


def _matrix(vectors: Sequence[Any]) -> Floats:
    matrix = np.ascontiguousarray(vectors, dtype=np.float32)
    if matrix.ndim != 2 or not matrix.shape[1]:
        raise StoreError(
            f"the embedder's vectors have the shape {matrix.shape[1:]}: a vector is a list of numbers"
        )
    unit(matrix)  # refuses what cannot be compared
    return matrix
