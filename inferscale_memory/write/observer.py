"""The one way in: a decorator around mem0's vector store that sees every write of a fact.

mem0 writes facts nowhere else, whichever of its paths it takes. The decorator changes nothing that mem0 can see: it
forwards every attribute, has a keyword search only where the store has one, and is wrapped around real stores only.
Filters pass through it too, and their ids become literal: several stores take an id of "*" for a wildcard. Stores that
lie in this process are called by one thread at a time: mem0's are not safe otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import RLock
from typing import Any, Protocol

from mem0.vector_stores.base import VectorStoreBase

from inferscale_memory.facts.expiry import living
from inferscale_memory.facts.filters import literal
from inferscale_memory.mem0_adapter.rows import ids_in, rows_of
from inferscale_memory.sharing import Shared

Payload = Mapping[str, Any]

Rows = Sequence[tuple[str, Payload]]
"""Ids and payloads of facts."""

_TOGETHER = 256
"""So many facts are deleted in one go."""
_UNSAFE_PROVIDERS = ("FAISS", "ChromaDB")


class Mirror(Protocol):
    """Is told what is about to happen to facts, and what happened, after the store has done it."""

    def at_work(self) -> AbstractContextManager[None]:
        """What is told within the block is one change."""

    def expect(self, ids: Sequence[str]) -> None:
        """Facts with these ids are about to be written."""

    def losing(self, fact: str, held: Callable[[], Payload | None], becomes: Payload | None) -> None:
        """A fact is about to get another payload, or none. `held` reads the one it has."""

    def losing_many(self, rows: Rows) -> None:
        """These facts, with the payloads they have, are about to go."""

    def losing_everything(self, ids: Callable[[], Sequence[str]]) -> None:
        """All facts are about to go. `ids` names them."""

    def shown(self, rows: Rows) -> None:
        """A search has found these facts."""

    def written(self, rows: Rows) -> None: ...
    def failed(self, error: Exception) -> None:
        """Facts could not be written."""

    def updated(self, fact: str, payload: Mapping[str, Any]) -> None: ...
    def deleted(self, ids: Sequence[str]) -> None: ...
    def cleared(self) -> None:
        """All facts are gone."""


class _Deaf:
    """The mirror of a store that holds no facts."""

    def at_work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def expect(self, ids: Sequence[str]) -> None: ...
    def losing(self, fact: str, held: Callable[[], Payload | None], becomes: Payload | None) -> None: ...
    def losing_many(self, rows: Rows) -> None: ...
    def losing_everything(self, ids: Callable[[], Sequence[str]]) -> None: ...
    def shown(self, rows: Rows) -> None: ...
    def written(self, rows: Rows) -> None: ...
    def failed(self, error: Exception) -> None: ...
    def updated(self, fact: str, payload: Mapping[str, Any]) -> None: ...
    def deleted(self, ids: Sequence[str]) -> None: ...
    def cleared(self) -> None: ...


class _Nothing(AbstractContextManager[None]):
    def __exit__(self, *raised: object) -> None:
        return None


class StoreLock:
    """What the stores of one memory are called under: a lock where they lie in this process, else nothing.

    mem0's entity store may share the client of the fact store, so the first store decides for both.
    """

    def __init__(self) -> None:
        self.held: AbstractContextManager[Any] | None = None

    def settle(self, store: Any) -> None:
        if self.held is None:
            kinds = {kind.__name__ for kind in type(store).__mro__}
            unsafe = getattr(store, "is_local", False) or not kinds.isdisjoint(_UNSAFE_PROVIDERS)
            self.held = RLock() if unsafe else _Nothing()

    def __enter__(self) -> None:
        assert self.held is not None, "settle() comes first"
        self.held.__enter__()

    def __exit__(self, *raised: Any) -> None:
        assert self.held is not None, "settle() comes first"
        self.held.__exit__(*raised)


def mirrored(store: Any, lock: StoreLock, mirror: Mirror | None) -> Any:
    """`store` behind `lock`, its writes told to `mirror`. Whatever is no vector store, or is wrapped, stays
    as it is."""
    # Not isinstance: a mock of one says that it is one.
    if not issubclass(type(store), VectorStoreBase) or isinstance(store, MirroredStore):
        return store
    lock.settle(store)
    has_keywords = type(store).keyword_search is not VectorStoreBase.keyword_search
    wrap = _KeywordStore if has_keywords else MirroredStore
    return wrap(store, lock, mirror or _Deaf())


class MirroredStore(Shared, VectorStoreBase):  # type: ignore[misc]  # mem0 has no types
    """A vector store and its mirror.

    Updates and deletes of one memory happen one after the other, so that the mirror sees them in the store's
    order.
    """

    _OWN = ("_inner", "_lock", "_mirror", "_order")

    def __init__(self, inner: Any, lock: StoreLock, mirror: Mirror) -> None:
        self._inner = inner
        self._lock = lock
        self._mirror = mirror
        self._order = RLock()

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:  # copying asks for it before it exists
            raise AttributeError(name)
        found = getattr(self._inner, name)
        return self._delete_many if name == "delete_many" else found

    def __setattr__(self, name: str, value: Any) -> None:
        """What an app sets on its store is the store's. Its methods are covered by those here: set in its place
        they would go unseen, so they are set here, as on any object."""
        own = name in self._OWN or hasattr(type(self), name)
        object.__setattr__(self if own else self._inner, name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self if name in self.__dict__ else self._inner, name)

    # -- writes ----------------------------------------------------------------------------------------------

    def insert(
        self,
        vectors: Any,
        payloads: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[str] | None = None,
    ) -> Any:
        rows = list(zip(ids, payloads, strict=True)) if ids is not None and payloads is not None else []
        with self._mirror.at_work():
            self._mirror.expect([fact for fact, _ in rows])
            try:
                with self._lock:
                    done = self._inner.insert(vectors=vectors, payloads=payloads, ids=ids)
                self._mirror.written(rows)
            except Exception as error:  # mem0 does not hand on every error
                self._mirror.failed(error)
                raise
        return done

    def update(self, vector_id: str, vector: Any = None, payload: Mapping[str, Any] | None = None) -> Any:
        with self._order, self._mirror.at_work():
            if payload is not None:
                self._mirror.losing(vector_id, partial(self._held, vector_id), payload)
            with self._lock:
                done = self._inner.update(vector_id, vector=vector, payload=payload)
                if payload is not None and "data" not in payload:  # some stores merge: what do they hold now?
                    payload = getattr(self._inner.get(vector_id), "payload", None)
            if payload is not None:
                self._mirror.updated(vector_id, payload)
            return done

    def delete(self, vector_id: str) -> Any:
        with self._order, self._mirror.at_work():
            self._mirror.losing(vector_id, partial(self._held, vector_id), None)
            with self._lock:
                done = self._inner.delete(vector_id)
            self._mirror.deleted([vector_id])
            return done

    def _delete_many(self, vector_ids: Sequence[str]) -> Any:
        """Where the store deletes many facts in one go."""
        with self._order, self._mirror.at_work():
            ids = [str(fact) for fact in vector_ids]
            done = None
            for start in range(0, len(ids), _TOGETHER):  # what one transaction writes must fit on a full disk
                some = ids[start : start + _TOGETHER]
                held = [(fact, payload) for fact in some if (payload := self._held(fact)) is not None]
                self._mirror.losing_many(held)
                with self._lock:
                    done = self._inner.delete_many(some)
                self._mirror.deleted(some)
            return done

    def delete_col(self) -> Any:
        return self._clear("delete_col")

    def reset(self) -> Any:
        return self._clear("reset")

    def _clear(self, method: str) -> Any:
        with self._order, self._mirror.at_work():
            self._mirror.losing_everything(self._ids)
            with self._lock:
                done = getattr(self._inner, method)()
            self._mirror.cleared()
            return done

    def recheck(self, fact: str, timeout: float) -> bool:
        """Tell the mirror what the store holds of a fact now, between two changes of it. False where a change takes
        longer than `timeout` seconds: whoever makes it may be waiting for the caller."""
        if not self._order.acquire(timeout=timeout):
            return False
        try:
            if (payload := self._held(fact)) is not None:
                self._mirror.updated(fact, payload)
            return True
        finally:
            self._order.release()

    def _ids(self) -> tuple[str, ...]:
        with self._lock:
            return ids_in(self._inner)

    def _held(self, fact: str) -> Payload | None:
        with self._lock:
            payload: Payload | None = getattr(self._inner.get(fact), "payload", None)
            return payload

    # -- the rest --------------------------------------------------------------------------------------------

    def create_col(self, *args: Any, **options: Any) -> Any:
        with self._lock:
            return self._inner.create_col(*args, **options)

    def search(self, *args: Any, **options: Any) -> Any:
        args, options = _literally(args, options, place=3)
        with self._lock:
            found = self._inner.search(*args, **options)
        self._mirror.shown([(str(row.id), getattr(row, "payload", None) or {}) for row in rows_of(found)])
        return living(found)

    def search_batch(self, *args: Any, **options: Any) -> Any:
        args, options = _literally(args, options, place=3)
        with self._lock:
            return self._inner.search_batch(*args, **options)

    def get(self, *args: Any, **options: Any) -> Any:
        with self._lock:
            return self._inner.get(*args, **options)

    def list(self, *args: Any, **options: Any) -> Any:
        args, options = _literally(args, options, place=0)
        with self._lock:
            found = self._inner.list(*args, **options)
        return living(found)

    def list_cols(self) -> Any:
        with self._lock:
            return self._inner.list_cols()

    def col_info(self) -> Any:
        with self._lock:
            return self._inner.col_info()


class _KeywordStore(MirroredStore):
    """Where the store has a keyword search of its own: mem0 asks the class."""

    def keyword_search(self, *args: Any, **options: Any) -> Any:
        args, options = _literally(args, options, place=2)
        with self._lock:
            return self._inner.keyword_search(*args, **options)


def _literally(
    args: tuple[Any, ...], options: dict[str, Any], *, place: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with literal ids in its filters, which may stand at `place`."""
    if "filters" in options:
        return args, {**options, "filters": literal(options["filters"])}
    if len(args) > place:
        return (*args[:place], literal(args[place]), *args[place + 1 :]), options
    return args, options
