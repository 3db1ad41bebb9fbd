"""By which model the vectors of a collection were made, how long they are, and how far embedding them anew has come.

Vectors of two models say nothing about each other, so a collection is refused to any model but its own. One without
facts takes every model and every length.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from inferscale_memory.errors import StoreError


@dataclass(frozen=True, slots=True)
class Reembedding:
    """Embedding under way: every fact up to `place` has a vector of `model`, of `dims` numbers."""

    model: str
    dims: int
    place: int


class Embedded:
    """The row of one collection in `collections`, through a connection that is handed in."""

    def __init__(self, path: Path, collection: str) -> None:
        self._path = path
        self._collection = collection

    def settled(
        self, db: sqlite3.Connection, dims: int | None, *, write: bool = True, fixed: bool = False
    ) -> int | None:
        """The length of the collection's vectors. The collection is made once that is known; while it is empty another
        length may take its place, unless it is `fixed`.

        Raises:
            StoreError: it holds vectors of another length.
        """
        known = self.dims(db)
        if known is None or (dims is not None and known != dims and not fixed and self._is_empty(db)):
            if dims is not None and write:
                db.execute(
                    "INSERT INTO collections (name, dims) VALUES (?, ?)"
                    " ON CONFLICT (name) DO UPDATE SET dims = excluded.dims, model = NULL",
                    (self._collection, dims),
                )
            return dims
        if dims is not None and known != dims:
            model = self.model(db)
            raise StoreError(
                f"the collection {self._collection!r} in {self._path} holds vectors of {known} numbers"
                f"{f' by {model!r}' if model else ''}, not {dims}: use the embedder it was written with, another "
                "collection_name, or embed it anew with `inferscale migrate --reembed CONFIG.json`"
            )
        return known

    def dims(self, db: sqlite3.Connection) -> int | None:
        row = db.execute("SELECT dims FROM collections WHERE name = ?", (self._collection,)).fetchone()
        return None if row is None else int(row[0])

    def model(self, db: sqlite3.Connection) -> str | None:
        """The name of the model; None where nobody has said it yet."""
        if db.execute("PRAGMA user_version").fetchone()[0] < 2:
            return None
        row = db.execute("SELECT model FROM collections WHERE name = ?", (self._collection,)).fetchone()
        return None if row is None else row[0]

    def clear(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM collections WHERE name = ?", (self._collection,))
        db.execute("DELETE FROM reembedding WHERE collection = ?", (self._collection,))

    def claim(self, db: sqlite3.Connection, model: str, *, write: bool = True) -> None:
        """Note that the vectors are `model`'s from now on.

        Raises:
            StoreError: they are another model's.
        """
        under_way = self.under_way(db)
        if under_way is not None:
            raise StoreError(
                f"the facts in {self._path} are being embedded anew by {under_way.model!r}: finish that with "
                "`inferscale migrate --reembed CONFIG.json`"
            )
        known = self.model(db)
        if known not in (None, model) and not self._is_empty(db):
            raise StoreError(
                f"the facts in {self._path} were embedded by {known!r}, not by {model!r}, whose vectors cannot be "
                f"compared with theirs: use {known!r}, or embed them anew with `inferscale migrate --reembed "
                "CONFIG.json`"
            )
        if known != model and write:
            db.execute("UPDATE collections SET model = ? WHERE name = ?", (model, self._collection))

    def under_way(self, db: sqlite3.Connection) -> Reembedding | None:
        if db.execute("PRAGMA user_version").fetchone()[0] < 2:
            return None
        query = "SELECT model, dims, place FROM reembedding WHERE collection = ?"
        row = db.execute(query, (self._collection,)).fetchone()
        return None if row is None else Reembedding(*row)

    def begin(self, db: sqlite3.Connection, model: str, dims: int) -> Reembedding:
        """Embedding by `model` begins, or goes on where it was."""
        under_way = self.under_way(db)
        if under_way is not None and (under_way.model, under_way.dims) == (model, dims):
            return under_way
        values = (self._collection, model, dims)
        db.execute("INSERT OR REPLACE INTO reembedding VALUES (?, ?, ?, -1)", values)
        return Reembedding(model, dims, -1)

    def advance(self, db: sqlite3.Connection, place: int) -> None:
        """Every fact up to `place` is done."""
        db.execute("UPDATE reembedding SET place = ? WHERE collection = ?", (place, self._collection))

    def finish(self, db: sqlite3.Connection, done: Reembedding) -> None:
        """All are done."""
        db.execute(
            "INSERT INTO collections (name, dims, model) VALUES (?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET dims = excluded.dims, model = excluded.model",
            (self._collection, done.dims, done.model),
        )
        db.execute("DELETE FROM reembedding WHERE collection = ?", (self._collection,))

    def _is_empty(self, db: sqlite3.Connection) -> bool:
        query = "SELECT 1 FROM owners WHERE collection = ? LIMIT 1"
        return db.execute(query, (self._collection,)).fetchone() is None
