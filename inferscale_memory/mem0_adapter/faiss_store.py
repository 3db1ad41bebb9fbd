"""mem0's FAISS store without the faults its users report.

mem0's filters after it has taken top-k, so that somebody with few facts finds none of them; knows no operators, and
finds nothing where one stands; loses a fact whose update fails; and only logs that a change did not reach the disk.
Files and scores stay mem0's. What is not mended: the two files are written one after the other, so a kill in between
leaves a store that mem0 cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from inferscale_memory.index import filters as conditions
from inferscale_memory.index.slab import DictColumn

_MODULE = "mem0.vector_stores.faiss"


def mended(store: Any) -> Any:
    """`store`, mended in place where it is mem0's FAISS store itself; anything else as it is."""
    if type(store).__module__ == _MODULE and type(store).__name__ == "FAISS":
        store.__class__ = _kind()
    return store


class _Payloads:
    """Payloads as the table that conditions are evaluated on."""

    def __init__(self, payloads: Sequence[Mapping[str, Any]]) -> None:
        self._payloads = payloads

    def __len__(self) -> int:
        return len(self._payloads)

    def column(self, key: str) -> DictColumn:
        return DictColumn([payload.get(key) for payload in self._payloads])


def _meeting(filters: Mapping[str, Any] | None, payloads: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the payloads that meet mem0's filters. A list of values, as mem0's store takes it, is any of them.

    Raises StoreError on an operator that does not exist.
    """
    read = {key: {"in": value} if _is_values(key, value) else value for key, value in (filters or {}).items()}
    mask = conditions.read(read).mask(_Payloads(payloads))
    return list(range(len(payloads))) if mask is None else np.flatnonzero(mask).tolist()


def _is_values(key: str, value: Any) -> bool:
    return isinstance(value, list) and not key.startswith("$") and key not in ("AND", "OR", "NOT")


@cache
def _kind() -> Any:
    """The class. mem0's module imports faiss, which nobody else here has to wait for."""
    import faiss
    from mem0.vector_stores.faiss import FAISS, OutputData

    class MendedFAISS(FAISS):  # type: ignore[misc]  # mem0 has no types
        index: Any
        docstore: Any
        index_to_id: Any

        def insert(self, *args: Any, **options: Any) -> Any:
            with self._whole():
                return super().insert(*args, **options)

        def delete(self, vector_id: str) -> Any:
            with self._whole():
                return super().delete(vector_id)

        def update(self, vector_id: str, vector: Any = None, payload: Any = None) -> Any:
            with self._whole():
                return super().update(vector_id, vector, payload)

        def search(
            self, query: str, vectors: Any, top_k: int = 5, filters: Mapping[str, Any] | None = None
        ) -> Any:
            if self.index is None or not filters:
                return super().search(query, vectors, top_k, None)
            places = [place for place, name in self.index_to_id.items() if name in self.docstore]
            found = _meeting(filters, [self.docstore[self.index_to_id[place]] for place in places])
            if not found:
                return []
            queries = np.array(vectors, dtype=np.float32).reshape(-1, self.index.d)[:1]
            if self._should_normalize():
                faiss.normalize_L2(queries)
            among = faiss.IDSelectorBatch(np.array([places[row] for row in found], dtype=np.int64))
            chosen: Any = faiss.SearchParameters(sel=among)  # type: ignore[call-arg]  # its stub knows no sel
            scores, rows = self.index.search(queries, min(top_k, len(found)), params=chosen)
            return self._parse_output(scores[0], rows[0], top_k)

        def list(self, filters: Mapping[str, Any] | None = None, top_k: int | None = 100) -> Any:
            if self.index is None:
                return [[]]
            items = [*self.docstore.items()]
            rows = _meeting(filters, [payload for _, payload in items])[:top_k]
            return [[OutputData(id=items[row][0], score=None, payload=items[row][1].copy()) for row in rows]]

        def _save(self) -> None:
            """As mem0 does it, and an error where it does not reach the disk."""
            if not self.path or self.index is None:
                return
            folder = Path(self.path)
            folder.mkdir(parents=True, exist_ok=True)
            faiss.write_index(self.index, str(folder / f"{self.collection_name}.faiss"))
            named = {str(place): name for place, name in self.index_to_id.items()}
            with (folder / f"{self.collection_name}.json").open("w", encoding="utf-8") as file:
                json.dump({"docstore": self.docstore, "index_to_id": named}, file, indent=2)

        @contextmanager
        def _whole(self) -> Iterator[None]:
            """A change that happens, or does not: whoever raises within it finds the store as it was."""
            if self.__dict__.get("_changing") or self.index is None:  # an update is a delete and an insert
                yield
                return
            kept = (faiss.clone_index(self.index), dict(self.docstore), dict(self.index_to_id))
            self._changing = True
            try:
                yield
            except BaseException:
                self.index, self.docstore, self.index_to_id = kept
                self._save()
                raise
            finally:
                self._changing = False

    return MendedFAISS
