"""A retriever of memories: mem0's search as LangChain's documents, each with its score.

It needs no engine: what it finds may go to any model. It must never search without a scope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from pydantic import Field, PrivateAttr, model_validator

from inferscale_memory.arguments import as_count, as_mapping, as_text
from inferscale_memory.deprecation import one_top_k, with_top_k
from inferscale_memory.errors import ConfigurationError
from langchain_inferscale.behind import Behind
from langchain_inferscale.copying import picklable, sharing
from langchain_inferscale.expiry import living
from langchain_inferscale.scope import (
    DEFAULT_KEYS,
    IDS,
    Id,
    Ids,
    Keys,
    demanded,
    ids_of_config,
    read_ids,
)

_NAME = "InferScaleRetriever"


class InferScaleRetriever(BaseRetriever):
    """The `top_k` memories of a scope that are nearest to a query, best first. The scope is said as `ChatInferScale`
    takes it: as arguments of the call, in `config["configurable"]`, or in the constructor.

    A document's `page_content` is what the memory says, its `id` mem0's; its metadata has `score`, the ids of its
    scope, dates, and what the app stored with it.
    """

    memory: Any = Field(exclude=True, repr=False)
    """A `Memory` or `AsyncMemory`, which stays the caller's, or the configuration of one."""
    user_id: Id = None
    agent_id: Id = None
    run_id: Id = None
    scope_keys: Keys = Field(default_factory=lambda: dict(DEFAULT_KEYS))
    """Which key of `config["configurable"]` says which id."""
    top_k: int = Field(default=5, ge=1)
    """How many memories a query returns; `k` is short for it."""
    filters: dict[str, Any] | None = None
    """mem0's filters, beyond the ids."""

    _opened: Behind | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        return with_top_k(given) if isinstance(given, Mapping) else given

    @property
    def k(self) -> int:
        """The same as `top_k`."""
        return self.top_k

    @k.setter
    def k(self, top_k: int) -> None:
        self.top_k = top_k

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.memory is None:
            raise ConfigurationError(
                f"{_NAME} has no memory: pass a Memory, an AsyncMemory or a configuration"
            )
        self._opened = Behind(None, self.memory, None)

    @property
    def _behind(self) -> Behind:
        if self._opened is None or not self._opened.is_over(None, self.memory, None):
            self._opened = Behind(None, self.memory, None)
        return self._opened

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy over the same memory."""
        return super().__deepcopy__(sharing((self.memory, self._opened), memo))

    def __getstate__(self) -> dict[Any, Any]:
        """Everything but what is open. Raises CopyError over an open memory."""
        picklable(_NAME, self.memory)
        state = super().__getstate__()
        return {**state, "__pydantic_private__": {**(state["__pydantic_private__"] or {}), "_opened": None}}

    def close(self) -> None:
        """Close the memory, where it was opened here."""
        self._behind.close()

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        return super().invoke(as_text(input, "query"), config, **self._settled(config, kwargs))

    async def ainvoke(
        self, input: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        return await super().ainvoke(as_text(input, "query"), config, **self._settled(config, kwargs))

    def _settled(self, config: RunnableConfig | None, given: Mapping[str, Any]) -> dict[str, Any]:
        own = read_ids({name: getattr(self, name) for name in IDS})
        rest = {name: value for name, value in given.items() if name not in IDS}
        unknown = sorted(set(rest) - {"top_k", "k", "filters"})
        if unknown:
            raise ConfigurationError(f"{_NAME} takes no {', '.join(unknown)}")
        return {**rest, "scope": {**own, **ids_of_config(config, self.scope_keys), **read_ids(given)}}

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        scope: Ids | None = None,
        top_k: int | None = None,
        k: int | None = None,
        filters: Mapping[str, Any] | None = None,
    ) -> list[Document]:
        asked = self._asked(scope, one_top_k(top_k, k), filters)
        return [_document(found) for found in living(self._behind.chat.recall(query, **asked))]

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        scope: Ids | None = None,
        top_k: int | None = None,
        k: int | None = None,
        filters: Mapping[str, Any] | None = None,
    ) -> list[Document]:
        asked = self._asked(scope, one_top_k(top_k, k), filters)
        return [_document(found) for found in living(await self._behind.chat.arecall(query, **asked))]

    def _asked(self, scope: Ids | None, top_k: int | None, filters: Mapping[str, Any] | None) -> dict[str, Any]:
        filters = self.filters if filters is None else filters
        return {
            "ids": demanded(scope or {}, _NAME),
            "top_k": self.top_k if top_k is None else as_count(top_k, "top_k"),
            "filters": None if filters is None else as_mapping(filters, "filters"),
        }


def _document(found: Mapping[str, Any]) -> Document:
    told = {
        name: value
        for name, value in found.items()
        if name not in ("id", "memory", "metadata", "hash") and value is not None
    }
    return Document(
        id=str(found["id"]), page_content=found["memory"], metadata={**(found.get("metadata") or {}), **told}
    )
