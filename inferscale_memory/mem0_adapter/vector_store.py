"""The store as mem0 sees it: `{"vector_store": {"provider": "inferscale"}}`.

It only translates mem0's calls. The parameter names are mem0's, which passes them by name.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from mem0.vector_stores.base import VectorStoreBase

from inferscale_memory.index.collection import CACHE_BYTES, Collection, Filters
from inferscale_memory.index.records import Hit


class Store(VectorStoreBase):  # type: ignore[misc]  # mem0 has no types
    """mem0's vector store over one `Collection`."""

    def __init__(
        self,
        path: str,
        collection_name: str = "mem0",
        embedding_model_dims: int | None = None,
        searcher: str = "exact",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """See `StoreConfig`. Raises StoreError."""
        self.collection_name = collection_name
        self.embedding_model_dims = embedding_model_dims
        self.client = Collection(path, collection_name, dims=embedding_model_dims, cache_bytes=cache_bytes)

    def close(self) -> None:
        """Close the file. mem0 calls `client.close()`, which is the same."""
        self.client.close()

    def create_col(self, name: str, vector_size: int, distance: str = "cosine") -> None:
        """Collections are made when they are opened and when they are first written to."""

    def insert(
        self,
        vectors: Sequence[Any],
        payloads: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        """Write facts in one transaction. An id that is known is replaced, so trying again does no harm."""
        known = [str(uuid4()) for _ in vectors] if ids is None else [str(id) for id in ids]
        self.client.put(known, vectors, [{} for _ in vectors] if payloads is None else payloads)

    def search(self, query: str, vectors: Any, top_k: int = 5, filters: Filters = None) -> Sequence[Hit]:
        """The facts nearest to a vector. The score is the cosine."""
        return self.client.search([vectors], top_k, filters)[0]

    def search_batch(
        self, queries: Sequence[str], vectors_list: Sequence[Any], top_k: int = 1, filters: Filters = None
    ) -> Sequence[Sequence[Hit]]:
        """The facts nearest to each of many vectors, in one pass."""
        return self.client.search(vectors_list, top_k, filters) if len(vectors_list) else []

    def keyword_search(self, query: str, top_k: int = 5, filters: Filters = None) -> Sequence[Hit] | None:
        """The facts that fit the words of `query` best. The score is BM25's, not bounded, larger is better.
        None where SQLite has no FTS5: mem0 then goes by vectors alone."""
        try:
            return self.client.search_words(query, top_k, filters)
        except sqlite3.OperationalError as error:
            if "no such module: fts5" in str(error):
                return None
            raise

    def delete(self, vector_id: str) -> None:
        """Delete a fact; its bytes are gone from the disk when this returns."""
        self.client.delete([str(vector_id)])

    def delete_many(self, vector_ids: Sequence[str]) -> None:
        """Delete facts in one transaction."""
        self.client.delete([str(id) for id in vector_ids])

    def update(self, vector_id: str, vector: Any = None, payload: Mapping[str, Any] | None = None) -> None:
        """Give a fact another vector, another payload, or both. Raises StoreError if it does not exist."""
        self.client.update(str(vector_id), vector, payload)

    def get(self, vector_id: str) -> Hit | None:
        """A fact; None where there is none."""
        return self.client.get(str(vector_id))

    def list(self, filters: Filters = None, top_k: int | None = None) -> Sequence[Sequence[Hit]]:
        """Facts that match, oldest first, as the only element of a list: mem0 expects that."""
        return [self.client.first(top_k, filters)]

    def list_cols(self) -> Sequence[str]:
        """The names of the collections in the file."""
        return self.client.file.collections()

    def delete_col(self) -> None:
        """Delete the collection and all its facts."""
        self.client.clear()

    def col_info(self) -> dict[str, Any]:
        """What the collection is and holds."""
        file = self.client.file
        return {
            "name": self.collection_name,
            "path": str(file.path),
            "dims": file.dims,
            "count": file.count(),
        }

    def reset(self) -> None:
        """Empty the collection."""
        self.client.clear()
