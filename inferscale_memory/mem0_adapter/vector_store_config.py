"""The store's options, as mem0 wants them: a pydantic model that can be copied and dumped."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from inferscale_memory.index.collection import CACHE_BYTES


class StoreConfig(BaseModel):
    """Options of `{"vector_store": {"provider": "inferscale", "config": {...}}}`.

    Attributes:
        path: the file.
        collection_name: any number of them share a file.
        embedding_model_dims: the length of the vectors; where it is not given, the first one decides.
        searcher: how vectors are compared; "exact" is the one way there is.
        cache_bytes: about how much memory the facts of the owners asked for last may take.
    """

    model_config = ConfigDict(extra="forbid")

    path: str
    collection_name: str = "mem0"
    embedding_model_dims: int | None = Field(default=None, gt=0)
    searcher: Literal["exact"] = "exact"
    cache_bytes: int = Field(default=CACHE_BYTES, ge=0)
