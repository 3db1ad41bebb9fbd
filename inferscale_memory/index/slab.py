"""The facts of one owner, in memory: vectors, payloads, columns for filters, and words.

All of it is derived from the file and may be thrown away at any time. It must never be written to before the
file has been.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferscale_memory.index.filters import Condition, Mask
from inferscale_memory.index.keywords import Keywords, words_of
from inferscale_memory.index.records import Floats, Hit, OwnerChange, Payload, Row
from inferscale_memory.index.searcher import Searcher, searcher, unit

_MOST_UNUSED = 256
"""So many values of a column that no row has are kept besides as many as it has rows."""
_PER_ROW = 2_400
"""Bytes for a fact besides its vector, keyword index included: measured with payloads of mem0's size."""


class DictColumn:
    """The values of one key, dictionary-encoded: `values[codes[row]]`. Conditions look at values, not rows."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values: list[Any] = []
        self._code_of: dict[Any, int] = {}
        self._rows = len(values)
        self._codes = np.fromiter((self._code(value) for value in values), np.int32, len(values))

    @property
    def codes(self) -> NDArray[np.int32]:
        return self._codes[: self._rows]

    def append(self, value: Any) -> None:
        if self._rows == len(self._codes):
            self._codes = np.resize(self._codes, max(16, 2 * self._rows))
        self._rows += 1
        self._codes[self._rows - 1] = self._code(value)
        self._compact()

    def replace(self, row: int, value: Any) -> None:
        self._codes[row] = self._code(value)
        self._compact()

    def remove(self, row: int) -> None:
        self._rows -= 1
        self._codes[row] = self._codes[self._rows]

    def _compact(self) -> None:
        """Drop values that no row has any more, once they are the most: times of updates are all different."""
        if len(self.values) > 2 * self._rows + _MOST_UNUSED:
            rows = [self.values[code] for code in self.codes.tolist()]
            self.values, self._code_of = [], {}
            self._codes = np.fromiter((self._code(value) for value in rows), np.int32, len(rows))

    def _code(self, value: Any) -> int:
        key = (type(value), repr(value) if isinstance(value, list | dict) else value)  # True is not 1
        code = self._code_of.setdefault(key, len(self.values))
        if code == len(self.values):
            self.values.append(value)
        return code


class Slab:
    """One owner's facts. Row numbers change when a fact is removed; places do not."""

    def __init__(
        self,
        changes: int,
        places: list[int],
        vectors: Floats,
        words: Sequence[tuple[str, Payload]],
    ) -> None:
        self.changes = changes
        self.checked = -1
        self._places = places
        self._row_of = {place: row for row, place in enumerate(places)}
        self._ids = [id for id, _ in words]
        self._payloads = [payload for _, payload in words]
        self._flat = [_is_flat(payload) for payload in self._payloads]
        self._searcher: Searcher = searcher(unit(vectors))
        self._columns: dict[str, DictColumn] = {}
        self._keywords: Keywords | None = None

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """About how much memory this takes."""
        return self._searcher.nbytes + _PER_ROW * len(self)

    def close(self) -> None:
        if self._keywords is not None:
            self._keywords.close()
            self._keywords = None

    def column(self, key: str) -> DictColumn:
        """The values of `key`, None where a fact has none. Kept up to date once it was asked for."""
        if key not in self._columns:
            self._columns[key] = DictColumn([payload.get(key) for payload in self._payloads])
        return self._columns[key]

    # -- reading ---------------------------------------------------------------------------------------------

    def search(self, queries: Floats, k: int, condition: Condition) -> list[list[Hit]]:
        """For each of the unit vectors `[queries, dims]` the `k` nearest facts that meet `condition`."""
        rows, scores = self._searcher.search(queries, k, condition.mask(self))
        return [
            self._hits(mine, theirs)
            for mine, theirs in zip(rows.tolist(), np.minimum(scores, 1.0).tolist(), strict=True)
        ]

    def search_words(self, query: str, k: int, condition: Condition) -> list[Hit]:
        """The `k` facts that meet `condition` and fit the words best."""
        mask = condition.mask(self)
        found = self._words().search(query, k if mask is None else None)
        rows = [(self._row_of[place], score) for place, score in found]
        best = [one for one in rows if mask is None or mask[one[0]]][:k]
        return self._hits([row for row, _ in best], [score for _, score in best])

    def first(self, k: int | None, condition: Condition) -> list[Hit]:
        """The first `k` facts that meet `condition`, oldest first."""
        rows = self._rows(condition.mask(self))
        first = sorted(rows, key=lambda row: self._places[row])[:k]
        return self._hits(first, [None] * len(first))

    def _rows(self, mask: Mask) -> list[int]:
        return list(range(len(self))) if mask is None else np.flatnonzero(mask).tolist()

    def _hits(self, rows: Sequence[int], scores: Sequence[float | None]) -> list[Hit]:
        ids, payloads, flat = self._ids, self._payloads, self._flat
        return [
            Hit(ids[row], score, payloads[row].copy() if flat[row] else _copy(payloads[row]))
            for row, score in zip(rows, scores, strict=True)
        ]

    def _words(self) -> Keywords:
        if self._keywords is None:
            self._keywords = Keywords()
            self._keywords.add(zip(self._places, map(words_of, self._payloads), strict=True))
        return self._keywords

    # -- following the file ----------------------------------------------------------------------------------

    def follow(self, change: OwnerChange) -> None:
        """Do what a transaction did. It must have found the owner as this slab has it."""
        assert change.before == self.changes, "a change was missed"
        assert change.after is not None, "an owner without facts has no slab"
        for place in change.dropped:
            if place in self._row_of:  # not one that came and went within the transaction
                self._remove(place)
        for row in change.put.values():
            self._put(row)
        self.changes = change.after

    def _put(self, new: Row) -> None:
        vector = unit(new.vector[None])[0]
        row = self._row_of.get(new.place)
        if row is None:
            row = self._row_of[new.place] = len(self)
            self._places.append(new.place)
            self._ids.append(new.id)
            self._payloads.append(new.payload)
            self._flat.append(_is_flat(new.payload))
            self._searcher.append(vector)
            for key, column in self._columns.items():
                column.append(new.payload.get(key))
        else:
            if self._keywords is not None:
                self._keywords.remove(new.place, words_of(self._payloads[row]))
            self._payloads[row] = new.payload
            self._flat[row] = _is_flat(new.payload)
            self._searcher.replace(row, vector)
            for key, column in self._columns.items():
                column.replace(row, new.payload.get(key))
        if self._keywords is not None:
            self._keywords.add([(new.place, words_of(new.payload))])

    def _remove(self, place: int) -> None:
        row = self._row_of.pop(place)
        if self._keywords is not None:
            self._keywords.remove(place, words_of(self._payloads[row]))
        self._searcher.remove(row)
        for column in self._columns.values():
            column.remove(row)
        columns: tuple[list[Any], ...] = (self._places, self._ids, self._payloads, self._flat)
        for values in columns:
            last = values.pop()
            if row < len(values):
                values[row] = last
        if row < len(self):
            self._row_of[self._places[row]] = row


def _is_flat(payload: Payload) -> bool:
    """Whether a shallow copy is the receiver's own: copying is most of what a hit costs."""
    return not any(isinstance(value, list | dict) for value in payload.values())


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value
