"""From a source into a memory of ours, so that it can be interrupted anywhere and begun again.

A fact keeps its id, its words, its dates and whatever else mem0 stored with it; only its vector is made anew, by the
memory's own embedder. What is there already is left; of two versions of one fact the later one stays. It must never
delete anything, and never ask a model for anything but vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from itertools import islice
from typing import Any

from mem0.utils.lemmatization import lemmatize_for_bm25

from inferscale_memory.commands.migrate.source import Row, Source
from inferscale_memory.facts.text import read_date
from inferscale_memory.memory import Memory
from inferscale_memory.memory.instance import core_of

Step = Callable[[int], None]
"""Told how many more facts are done with."""


@dataclass(slots=True)
class Counts:
    """What became of the facts of the source.

    Attributes:
        copied: those that the memory did not have.
        updated: those it had in an earlier version.
        present: those it had as they are.
        newer: those it had in a later version, which stayed.
        wordless: rows without a text; they are no facts, and are left where they are.
        forgotten: those that were deleted from the memory; they do not come back.
        missing: ids that the memory does not have after all.
        events: of histories that were taken along.
        entities: that were taken along, which search finds facts by.
    """

    copied: int = 0
    updated: int = 0
    present: int = 0
    newer: int = 0
    wordless: int = 0
    forgotten: int = 0
    events: int = 0
    entities: int = 0
    missing: list[str] = field(default_factory=list)

    @property
    def facts(self) -> int:
        return self.copied + self.updated + self.present + self.newer


def copy(source: Source, memory: Memory, *, batch: int, step: Step = lambda done: None) -> Counts:
    """Copy everything, and then look whether it is there."""
    counts = Counts()
    events = source.history()
    told = _with_history(memory)
    ids: list[str] = []
    for rows in _batches(source.facts(), batch):
        facts = [(name, _completed(payload)) for name, payload in rows if payload.get("data")]
        counts.wordless += len(rows) - len(facts)
        facts, banned = _without_forgotten(memory, facts)
        counts.forgotten += banned
        _copy_facts(memory, facts, counts)
        for name, _ in facts:
            if name in events and name not in told:
                memory.db.batch_add_history(events[name])
                counts.events += len(events[name])
        ids += [name for name, _ in facts]
        step(len(rows))
    for rows in _batches(source.entities(), batch):
        counts.entities += _copy_entities(memory, [row for row in rows if row[1].get("data")])
    counts.missing = [name for name in ids if memory.vector_store.get(name) is None]
    return counts


def _without_forgotten(memory: Memory, facts: Sequence[Row]) -> tuple[list[Row], int]:
    """The facts that may be copied, and how many may not."""
    core = core_of(memory)
    banned = core.journal.facts.tombstones(name for name, _ in facts) if core is not None else set()
    return [row for row in facts if row[0] not in banned], len(banned)


def _copy_facts(memory: Memory, facts: Sequence[Row], counts: Counts) -> None:
    new, changed = list[Row](), list[Row]()
    for name, payload in facts:
        known = _known(memory.vector_store, name)
        if known is None:
            new.append((name, payload))
        elif all(known.get(key) == value for key, value in payload.items()):
            counts.present += 1
        elif _moment(known) > _moment(payload):
            counts.newer += 1
        else:
            changed.append((name, payload))
    _insert(memory, memory.vector_store, new)
    for (name, payload), vector in zip(changed, _vectors(memory, changed), strict=True):
        memory.vector_store.update(name, vector=vector, payload=payload)
    counts.copied += len(new)
    counts.updated += len(changed)


def _copy_entities(memory: Memory, entities: Sequence[Row]) -> int:
    """Those that the memory has keep their links and get those of the source."""
    store = memory.entity_store
    new, done = list[Row](), 0
    for name, payload in entities:
        known = _known(store, name)
        if known is None:
            new.append((name, payload))
            continue
        links = set(known.get("linked_memory_ids") or ())
        if not links.issuperset(payload.get("linked_memory_ids") or ()):
            links.update(payload["linked_memory_ids"])
            store.update(name, vector=None, payload={**known, "linked_memory_ids": sorted(links)})
            done += 1
    _insert(memory, store, new)
    return done + len(new)


def _insert(memory: Memory, store: Any, rows: Sequence[Row]) -> None:
    if rows:
        store.insert(
            vectors=_vectors(memory, rows),
            payloads=[payload for _, payload in rows],
            ids=[name for name, _ in rows],
        )


def _vectors(memory: Memory, rows: Sequence[Row]) -> list[Any]:
    return (
        list(memory.embedding_model.embed_batch([payload["data"] for _, payload in rows], "add"))
        if rows
        else []
    )


def _known(store: Any, name: str) -> Mapping[str, Any] | None:
    found = store.get(name)
    return None if found is None else dict(found.payload or {})


def _completed(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A payload with what earlier versions of mem0 did not write."""
    text = payload["data"]
    found = dict(payload)
    found.setdefault("hash", hashlib.md5(text.encode()).hexdigest())
    if "text_lemmatized" not in found:
        found["text_lemmatized"] = lemmatize_for_bm25(text)
    return found


def _moment(payload: Mapping[str, Any]) -> float:
    """When it was last written; before everything where nobody knows."""
    when = read_date(payload.get("updated_at") or payload.get("created_at"))
    if when is None:
        return float("-inf")
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _with_history(memory: Memory) -> set[str]:
    """Ids of the facts that have a history in the memory."""
    with memory.db._lock:
        return {str(row[0]) for row in memory.db.connection.execute("SELECT DISTINCT memory_id FROM history")}


def _batches(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    left = iter(rows)
    while batch := list(islice(left, size)):
        yield batch
