"""How an item of a LangGraph store lies in a memory, and how it is read from there.

An item is one fact for every text that is indexed of it (mostly one), and each of them carries the whole item as
metadata: its namespace, key, value, times. An item of which nothing is indexed is one fact of a user of its own, whom
no question recalls, and says its key alone. It must never give two namespaces one name, nor an item words it has not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from langgraph.store.base import Item, PutOp, SearchItem, get_text_at_path, tokenize_path

from inferscale_memory.errors import StoreError
from langchain_inferscale.expiry import EXPIRES, is_over

Namespace = tuple[str, ...]
Fields = Sequence[str]

_PATH, _LABEL, _KEY, _VALUE, _INDEXED = "lg_path", "lg_label_{}", "lg_key", "lg_value", "lg_indexed"
_LAST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_MADE, _WRITTEN, _TTL = "lg_made", "lg_written", "lg_ttl"
_DEPTH_PINNED = 2
_SPEAKER = "Note"


def name_of(namespace: Namespace) -> str:
    """A name that no other namespace has: its labels, percent-encoded, joined by slashes."""
    return "/".join(quote(label, safe="") for label in namespace)


def hidden_user(namespace: Namespace) -> str:
    """Whom the items belong to that nothing is indexed of."""
    return f"store-kept:{name_of(namespace)}"


def agent_of(namespace: Namespace) -> str:
    """mem0's agent of an item: the first two labels. All that begin with them is found by it without looking at what
    others have stored."""
    return f"store:{name_of(namespace[:_DEPTH_PINNED])}"


def below(prefix: Namespace) -> dict[str, Any]:
    """mem0's filters for all items of namespaces that begin with `prefix`. A value begins with an equals sign, so that
    none is taken for a wildcard or a date."""
    labels = {_LABEL.format(depth): f"={label}" for depth, label in enumerate(prefix)}
    if len(prefix) < _DEPTH_PINNED:
        return {_PATH: "*", **labels}
    return {"agent_id": agent_of(prefix), **labels}


def exactly(namespace: Namespace, key: str | None = None) -> dict[str, Any]:
    """mem0's filters for the items of one namespace, or for one of them."""
    named = {} if key is None else {_KEY: f"={key}"}
    return {"agent_id": agent_of(namespace), _PATH: f"={name_of(namespace)}", **named}


@dataclass(frozen=True, slots=True)
class Stored:
    """An item as it lies in the memory.

    Attributes:
        rows: id -> payload of its facts.
        made, written: when it was first and last put: nanoseconds since the epoch, no two alike.
        ttl: minutes it lives from when it is last read or written; None for ever.
        expires: seconds since the epoch.
    """

    namespace: Namespace
    key: str
    value: dict[str, Any]
    rows: Mapping[str, Mapping[str, Any]]
    indexed: bool
    made: int
    written: int
    ttl: float | None = None
    expires: float | None = None

    @property
    def texts(self) -> set[str]:
        """What its facts say."""
        return {str(payload.get("data")) for payload in self.rows.values()}

    @property
    def over(self) -> bool:
        return is_over({EXPIRES: self.expires})

    def lasting(self, ttl: float | None, now: float) -> Stored:
        """The same, to live for `ttl` minutes from `now`."""
        return replace(self, ttl=ttl, expires=None if ttl is None else now + 60 * ttl)

    @property
    def ends(self) -> datetime | None:
        """When its time is over: the expiration date of its facts. None for ever, and past the end of the calendar."""
        if self.expires is None or self.expires >= _LAST:
            return None
        return datetime.fromtimestamp(self.expires, UTC)

    @property
    def payload(self) -> dict[str, Any]:
        """What is rewritten in the payloads of its facts: its metadata, and when they expire, as the memory's `add`
        writes it."""
        ends = self.ends
        day, moment = (None, None) if ends is None else (ends.date().isoformat(), ends.isoformat())
        return {**self.metadata, "expiration_date": day, "expiration_time": moment}

    @property
    def metadata(self) -> dict[str, Any]:
        """What its facts carry of it."""
        labels = {_LABEL.format(depth): f"={label}" for depth, label in enumerate(self.namespace)}
        return {
            _PATH: f"={name_of(self.namespace)}",
            **labels,
            _KEY: f"={self.key}",
            _VALUE: json.dumps([list(self.namespace), self.value], ensure_ascii=False),
            _INDEXED: self.indexed,
            _MADE: self.made,
            _WRITTEN: self.written,
            _TTL: self.ttl,
            EXPIRES: self.expires,
            "speaker": _SPEAKER,
        }

    def item(self) -> Item:
        return Item(**self._parts)

    def found(self, score: float | None) -> SearchItem:
        return SearchItem(**self._parts, score=score)

    @property
    def _parts(self) -> dict[str, Any]:
        return {
            "namespace": self.namespace,
            "key": self.key,
            "value": dict(self.value),
            "created_at": _moment(self.made),
            "updated_at": _moment(self.written),
        }


def _moment(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)


def read_rows(rows: Iterable[Any]) -> tuple[list[Stored], list[str]]:
    """The items in the rows of a vector store, in the order in which they were first put, those of one namespace
    together. And the ids of facts that a later writing has replaced, and a crash has left."""
    versions: dict[tuple[Namespace, str], dict[int, Stored]] = {}
    for row in rows:
        payload = row.payload or {}
        if _VALUE not in payload:
            continue
        namespace, value = json.loads(payload[_VALUE])
        stored = Stored(
            tuple(namespace),
            str(payload[_KEY]).removeprefix("="),
            value,
            {str(row.id): payload},
            bool(payload[_INDEXED]),
            int(payload[_MADE]),
            int(payload[_WRITTEN]),
            payload.get(_TTL),
            payload.get(EXPIRES),
        )
        known = versions.setdefault((stored.namespace, stored.key), {})
        before = known.get(stored.written)
        known[stored.written] = (
            stored if before is None else replace(before, rows={**before.rows, **stored.rows})
        )
    items, left = [], []
    for written in versions.values():
        last = max(written)
        items.append(written.pop(last))
        left += [name for stored in written.values() for name in stored.rows]
    first: dict[Namespace, int] = {}
    for stored in items:
        first[stored.namespace] = min(stored.made, first.get(stored.namespace, stored.made))
    items.sort(key=lambda stored: (first[stored.namespace], stored.made))
    return items, left


def value_of(op: PutOp) -> dict[str, Any]:
    """The value of an item to be put. Raises StoreError where JSON cannot hold it."""
    value = dict(op.value or {})
    try:
        held: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the value of {op.key!r} is no JSON ({error}): store texts, numbers, lists, dictionaries"
        ) from error
    return held


def texts_of(op: PutOp, value: Mapping[str, Any], fields: Fields | None) -> list[str]:
    """What is to be indexed of an item; each becomes a fact. `fields` are the store's own, None where it has no
    index."""
    if fields is None or op.index is False:
        return []
    texts: list[str] = []
    for path in fields if op.index is None else op.index:
        texts += get_text_at_path(dict(value), "$" if path == "$" else tokenize_path(path))
    return list(dict.fromkeys(text for text in texts if text.strip()))
