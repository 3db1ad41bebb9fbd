"""LangGraph's long-term store on a memory: what an agent stores is a fact, and can be injected.

It must never hand one namespace's items to another, nor keep a word of what was deleted or replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import RLock
from time import time, time_ns
from typing import Any, Literal

from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    InvalidNamespaceError,
    Item,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
)

from inferscale_memory import Chat
from inferscale_memory.errors import ConfigurationError
from langchain_inferscale.copying import Shared
from langchain_inferscale.store_door import checks_names, labels, ops_in, ttl_in, user_in, user_of_in
from langchain_inferscale.store_match import holds, listed, pinned
from langchain_inferscale.store_rows import (
    Namespace,
    Stored,
    below,
    exactly,
    hidden_user,
    name_of,
    read_rows,
    texts_of,
    value_of,
)

_MOST = 1_000_000
"""Rows of a store that are looked through."""


class InferScaleStore(Shared, BaseStore):
    """Items by namespace and key, searched by what they mean, forgotten when they are deleted.

    A namespace is a user of the memory: by default its whole tuple, encoded (`user_id` tells which), so that no two
    share anything. What is indexed of an item is a fact of that user: `ChatInferScale(memory=memory,
    user_id=store.user_id(("memories", "ada")))` recalls and injects it.

    Items are kept as LangGraph's `InMemoryStore` keeps them, except that a value must be JSON, that `created_at` stays
    when an item is put again, that a namespace without items is none, and that an item is not found by words it had
    before.
    """

    supports_ttl = True
    _shared = ("_chat", "_writing")

    def __init__(
        self,
        memory: Any,
        *,
        index: IndexConfig | Mapping[str, Any] | Literal[False] | None = None,
        ttl: TTLConfig | None = None,
        user_of: Callable[[Namespace], str] | None = None,
    ) -> None:
        """
        Args:
            memory: a `Memory` or `AsyncMemory`, open; it stays the caller's.
            index: `{"fields": [...]}`, the parts of a value that are indexed, by default all of it as one text
                (`["$"]`); False for no search and no injection. The memory embeds: `embed` and `dims` are refused.
            ttl: LangGraph's configuration of times to live. What has expired is never returned; it is deleted by
                `sweep_ttl`, which `sweep_interval_minutes` has a later call do.
            user_of: which user of the memory a namespace belongs to, such as `lambda namespace: namespace[1]`. Then
                questions of that user recall all of theirs; the store itself keeps namespaces apart all the same.

        Raises:
            ConfigurationError: a memory that is none, or an index that cannot be.
        """
        if memory is None:
            raise ConfigurationError("InferScaleStore has no memory: pass a Memory or an AsyncMemory")
        self._chat = Chat(memory=memory)
        self._fields = _fields(index)
        self.ttl_config = ttl_in(ttl)
        self._user_of = user_of_in(user_of) or name_of
        self._writing = RLock()
        self._last = 0
        self._swept = time()

    def user_id(self, namespace: Namespace) -> str:
        """The user of the memory whom what is indexed in `namespace` belongs to."""
        named = labels(namespace)
        if not named:
            raise InvalidNamespaceError("the empty namespace holds no items, and belongs to nobody")
        return user_in(self._user_of(named), named)

    # -- LangGraph's two ways in -----------------------------------------------------------------------------

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Carry out operations: first everything that reads, then everything that writes, of several writings of one
        item the last.

        Raises:
            InvalidNamespaceError: labels that LangGraph does not allow.
            StoreError: a value that is no JSON, a filter that cannot be.
            ConfigurationError: any other argument that cannot be.
        """
        asked = ops_in(ops)
        self._sweep_if_due()
        results: list[Result] = []
        puts: dict[tuple[Namespace, str], PutOp] = {}
        for op in asked:
            if isinstance(op, PutOp):
                puts[op.namespace, op.key] = op
                results.append(None)
            elif isinstance(op, GetOp):
                results.append(self._get(op))
            elif isinstance(op, SearchOp):
                results.append(self._search(op))
            else:
                kept = self._items(below(pinned(op)))
                results.append(listed(list(dict.fromkeys(stored.namespace for stored in kept)), op))
        ready = [(op, None if op.value is None else value_of(op)) for op in puts.values()]
        with self._writing:
            for op, value in ready:
                self._put(op, value)
        return results

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """See `batch`; in a thread, since mem0's stores block."""
        return await asyncio.to_thread(self.batch, ops_in(ops))

    get, aget = checks_names(BaseStore.get), checks_names(BaseStore.aget)
    put, aput = checks_names(BaseStore.put), checks_names(BaseStore.aput)
    delete, adelete = checks_names(BaseStore.delete), checks_names(BaseStore.adelete)
    search, asearch = checks_names(BaseStore.search), checks_names(BaseStore.asearch)
    list_namespaces = checks_names(BaseStore.list_namespaces)
    alist_namespaces = checks_names(BaseStore.alist_namespaces)

    def sweep_ttl(self) -> int:
        """Delete every item whose time is over, as a deletion does, and what a crash has left of items that were
        replaced; how many items they were."""
        with self._writing:
            self._swept = time()
            items, left = read_rows(self._rows(below(())))
            over = [stored for stored in items if stored.over]
            self._chat.forget([*left, *(name for stored in over for name in stored.rows)])
            return len(over)

    # -- reading ---------------------------------------------------------------------------------------------

    def _get(self, op: GetOp) -> Item | None:
        for stored in self._items(exactly(op.namespace, op.key)):
            if op.refresh_ttl:
                self._refresh([stored])
            return stored.item()
        return None

    def _search(self, op: SearchOp) -> list[SearchItem]:
        where = below(tuple(op.namespace_prefix))
        items = [stored for stored in self._items(where) if holds(op.filter or {}, stored.value)]
        if op.query and self._fields is not None and items:
            found = self._ranked(op, where, items)
        else:
            found = [(stored, None) for stored in items[op.offset : op.offset + op.limit]]
        if op.refresh_ttl:
            self._refresh([stored for stored, _ in found])
        return [stored.found(score) for stored, score in found]

    def _ranked(
        self, op: SearchOp, where: Mapping[str, Any], items: Sequence[Stored]
    ) -> list[tuple[Stored, float | None]]:
        """The page of `items` that is asked for, nearest first. An item's score is that of its nearest text. As in
        LangGraph's store, those without an indexed text fill up a page that is not full."""
        memory = self._chat.open_memory
        near = memory.embedding_model.embed(op.query, "search")
        hits = memory.vector_store.search(query=op.query, vectors=near, top_k=_MOST, filters=dict(where))
        scores = {str(hit.id): float(hit.score) for hit in hits}
        ranked: list[tuple[Stored, float | None]] = []
        unranked: list[tuple[Stored, float | None]] = []
        for stored in items:
            of_rows = [scores[name] for name in stored.rows if name in scores]
            if stored.indexed and of_rows:
                ranked.append((stored, max(of_rows)))
            else:
                unranked.append((stored, None))
        ranked.sort(key=lambda pair: -round(pair[1] or 0.0, 6))  # stable: equally near ones in their order
        page = ranked[op.offset : op.offset + op.limit]
        return page + unranked[: max(0, op.limit - len(page))]

    def _items(self, where: Mapping[str, Any]) -> list[Stored]:
        return [stored for stored in read_rows(self._rows(where))[0] if not stored.over]

    def _rows(self, where: Mapping[str, Any]) -> list[Any]:
        rows = self._chat.open_memory.vector_store.list(filters=dict(where), top_k=_MOST)
        if rows and isinstance(rows, list | tuple) and isinstance(rows[0], list | tuple):
            rows = rows[0]  # mem0's stores wrap them in various ways
        return list(rows or ())

    # -- writing ---------------------------------------------------------------------------------------------

    def _put(self, op: PutOp, value: dict[str, Any] | None) -> None:
        known, left = read_rows(self._rows(exactly(op.namespace, op.key)))
        old = next(iter(known), None)
        gone = [*left, *(name for stored in known for name in stored.rows)]
        if value is None:
            self._chat.forget(gone)
            return
        texts = texts_of(op, value, self._fields)
        now = self._now()
        made = now if old is None or old.over else old.made
        rows = {} if old is None else old.rows
        new = Stored(tuple(op.namespace), op.key, value, rows, bool(texts), made, now).lasting(op.ttl, time())
        same = old is not None and old.texts == set(texts or [op.key]) and old.indexed == new.indexed
        if same and not known[0].over:
            self._rewrite(new)  # its facts say the same, and their blobs hold
            self._chat.forget(left)
            return
        user = self.user_id(op.namespace) if texts else hidden_user(tuple(op.namespace))
        ids = {"user_id": user, "agent_id": str(exactly(op.namespace)["agent_id"])}
        facts = [{"role": "user", "content": text} for text in texts or [op.key]]
        # First the new, then the old: after a crash between the two the later one counts, and nothing is lost.
        self._chat.remember(facts, ids, infer=False, metadata=new.metadata, expiration_date=new.ends)
        self._chat.forget(gone)

    def _refresh(self, items: Sequence[Stored]) -> None:
        """Their time begins anew, unless they were deleted or replaced meanwhile."""
        for stored in items:
            if stored.ttl is not None:
                with self._writing:
                    known, _ = read_rows(self._rows(exactly(stored.namespace, stored.key)))
                    if known and known[0].written == stored.written:
                        self._rewrite(stored.lasting(stored.ttl, time()))

    def _rewrite(self, stored: Stored) -> None:
        """Other metadata for facts whose words stay."""
        store = self._chat.open_memory.vector_store
        for name, payload in stored.rows.items():
            store.update(name, vector=None, payload={**payload, **stored.payload})

    def _now(self) -> int:
        """Nanoseconds since the epoch, later than ever before."""
        self._last = max(self._last + 1, time_ns())
        return self._last

    def _sweep_if_due(self) -> None:
        minutes = (self.ttl_config or {}).get("sweep_interval_minutes")
        if minutes is not None and time() - self._swept >= 60 * minutes:
            self.sweep_ttl()


def _fields(index: Any) -> list[str] | None:
    if index is False:
        return None
    if index is None:
        return ["$"]
    if not isinstance(index, Mapping) or set(index) - {"fields"}:
        raise ConfigurationError(
            'index is {"fields": [...]}, or False: the memory embeds, so choose its embedder where it is made'
        )
    fields = index.get("fields")
    if fields is None:
        return ["$"]
    if isinstance(fields, str) or not all(isinstance(field, str) for field in fields):
        raise ConfigurationError('index["fields"] is a list of paths, such as ["text", "tags[*]"]')
    return list(fields)
