"""Everything behind the face, wired together once; a face only says when.

It holds no method of mem0's and must never call one: the sync face hands in what mem0 found, and an async
face does the same.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from threading import RLock
from time import monotonic
from typing import Any, Protocol

from inferscale_memory.engine.known_blobs import KnownBlobs, Preambles
from inferscale_memory.errors import StoreError
from inferscale_memory.facts.expiry import is_expired
from inferscale_memory.facts.nearest import Nearest
from inferscale_memory.facts.pinned import Pinned
from inferscale_memory.facts.scope import Scope
from inferscale_memory.facts.text import read_date
from inferscale_memory.facts.whole import Whole
from inferscale_memory.forget.disk_reserve import Reserve
from inferscale_memory.forget.entities import Entities
from inferscale_memory.forget.forget import Forgetting
from inferscale_memory.forget.history import HistoryFile, deletion
from inferscale_memory.forget.outbox import Outbox
from inferscale_memory.forget.qdrant_files import QdrantFiles
from inferscale_memory.journal import NewTurn
from inferscale_memory.mem0_adapter.faiss_store import mended
from inferscale_memory.mem0_adapter.rows import MOST, ids_in, rows_of
from inferscale_memory.memory.config import Settings
from inferscale_memory.memory.opening import check_embedder, check_losses, fact_file, open_files
from inferscale_memory.recall.answer import Answers
from inferscale_memory.recall.freshness import Freshness
from inferscale_memory.recall.prepare import Recall
from inferscale_memory.storage.sqlite import copied_into
from inferscale_memory.write.encoder import Encoder
from inferscale_memory.write.neighbours import Neighbours
from inferscale_memory.write.observer import MirroredStore, Payload, StoreLock, mirrored
from inferscale_memory.write.recovery import Recovery
from inferscale_memory.write.unit_of_work import Batch
from inferscale_memory.write.writer import WritePath

_log = logging.getLogger(__name__)

CHANGE_S, LOOK_S = 1.0, 0.02
"""How long the encoder waits for changes under way when it wants to look at facts: for those of a batch together, and
for each of them at least."""


class Stores(Protocol):
    """What mem0 keeps, as a face has it at any time; opening its entity store may make it."""

    vector_store: Any
    embedding_model: Any
    db: Any

    @property
    def entity_store(self) -> Any: ...


class Core:
    """Journal, engine, encoder, write path and read path of one memory.

    Attributes:
        opening_entities: held while the entity store is opened: two of them on the same files would undo each
            other's work.
    """

    def __init__(self, settings: Settings, stores: Stores) -> None:
        self.injection = settings.injection
        self.engine = settings.engine
        self.folder = settings.folder
        self.reserve = Reserve(self.folder)
        self._files = open_files(settings, self.reserve)
        self.journal = self._files.journal
        self.opening_entities = RLock()
        self._stores = stores
        self._store_lock = StoreLock()
        self.history = HistoryFile(lambda: getattr(stores, "db", None))
        self.entities = Entities(lambda: stores.entity_store)
        at_hand = KnownBlobs()
        self.outbox = Outbox(self.journal, self.engine, at_hand)
        preambles = Preambles(at_hand)
        self.whole = Whole(self.journal, lambda line: self.recall.line_ids(line), self.injection.full_memory_tokens)
        self.pinned = Pinned(self.journal, lambda: stores.vector_store, self.injection.pinned)
        nearest = Nearest(
            self.journal,
            lambda: stores.vector_store,
            lambda: stores.embedding_model,
            self.injection.neighbours,
        )
        neighbours = Neighbours(self.whole, self.pinned, nearest)
        self.encoder = Encoder(
            self.journal,
            self.engine,
            at_hand,
            preambles,
            w=self.injection.context_turns,
            neighbours=neighbours if self.injection.in_company else None,
            check=self._check,
            expire=lambda: self.writes.expire(),
            forget=self.outbox.send,
        )
        self.freshness = Freshness(self.journal)
        self.answers = Answers(self.engine, at_hand, self.freshness.gone, self.outbox.send)
        self.recall = Recall(
            self.journal, self.engine, self.encoder, at_hand, preambles, self.injection, self.held
        )
        forgetting = Forgetting(
            self.journal,
            self.history,
            self.entities,
            QdrantFiles(lambda: stores.vector_store, self._store_lock),
            self.held,
            self.recall.forget_lines,
        )
        self.writes = WritePath(self.journal, self.outbox, self.encoder, forgetting)

    def check_embedder(self, store: Any) -> None:
        """Raises StoreError where the vectors of `store` are another model's."""
        check_embedder(store, getattr(self._stores, "embedding_model", None), self.journal)

    def mirror_facts(self, store: Any) -> Any:
        """The fact store as mem0 is to see it."""
        QdrantFiles.guard(store)
        return mirrored(mended(store), self._store_lock, self.writes)

    def guard_entities(self, store: Any) -> Any:
        """The entity store as mem0 is to see it."""
        QdrantFiles.guard(store)
        return mirrored(mended(store), self._store_lock, None)

    def fill_history(self, manager: Any) -> None:
        """Give mem0 a copy of a history that cannot be written."""
        connection = getattr(manager, "connection", None)
        if self._files.history is not None and isinstance(connection, sqlite3.Connection):
            copied_into(connection, self._files.history)

    @property
    def read_only(self) -> str:
        """Why nothing can be written; empty where it can."""
        file = fact_file(self._stores.vector_store)
        return self._files.why or ("" if file is None else file.read_only)

    def check_writable(self) -> None:
        """Raises StoreError where the memory could only be opened to be read."""
        if self.read_only:
            raise StoreError(
                f"nothing can be stored or deleted: {self.read_only}. Mend that and open the memory again, or pass "
                "another folder"
            )

    def recover(self) -> None:
        """Finish what a crash has cut off, put away what has expired meanwhile, and say what is missing."""
        self.outbox.start()
        store = self._stores.vector_store
        if self.read_only:
            _log.warning(
                "%s: the memory is open for reading alone. To write, mend that, pass another folder, or set "
                "INFERSCALE_HOME",
                self.read_only,
            )
        else:
            with self.reserve.given():
                Recovery(self.journal, self.writes, self.history, self.entities, store).run()
        check_losses(store, self.journal)
        self.writes.expire(resumed=True)

    def ids(self, scope: Scope) -> tuple[str, ...]:
        """Ids of the facts in the store that carry these ids; in an empty scope all. As far as it lists them."""
        return ids_in(self._stores.vector_store, scope.ids or None)

    def delete_many(self, scope: Scope, history: Any) -> None:
        """Delete the facts of a scope at once, where the store can; mem0 deletes them one by one. `history` is mem0's
        own, and gets the events that it would write."""
        store = self._stores.vector_store
        rows = [(str(row.id), row.payload or {}) for row in self._rows(scope)]
        # Those that are damaged or lost are listed by nobody, and are forgotten with the others.
        known = self.journal.facts.in_scopes(lambda key: scope.covers(Scope.read(key)))
        names = list(dict.fromkeys([*(name for name, _ in rows), *known]))
        if not names:
            return
        store.delete_many(names)
        history.batch_add_history([deletion(name, payload) for name, payload in rows])

    def lacks(self, facts: Sequence[str]) -> bool:
        """Whether the store holds not all of these."""
        return any(self.held(name) is None for name in facts)

    def undo(self, batch: Batch, *, said_before: bool) -> None:
        """Take back what a call has stored before the disk was full: it has failed, and the app will make it again."""
        with self.reserve.given():
            for name in batch.expected:
                if self.held(name) is not None:
                    self._stores.vector_store.delete(vector_id=name)
            if not said_before:
                self.journal.turns.redact(turn.number for turn in batch.turns)
            self.journal.intents.finish(batch.begun)

    def _rows(self, scope: Scope) -> list[Any]:
        return rows_of(self._stores.vector_store.list(filters=scope.ids or None, top_k=MOST))

    def expired(self) -> list[str]:
        """Ids of the facts in the store whose time is over."""
        return [str(row.id) for row in self._rows(Scope()) if is_expired(row.payload or {})]

    def blobs_saying(self, text: str) -> list[str]:
        """Keys of the blobs that the engine has of facts that say `text`, or behind a window that does."""
        engine = self.engine.started
        if engine is None:
            return []
        keys: dict[str, list[str]] = {}
        for entry in self.journal.ledger.saying(text):
            keys.setdefault(entry.owner, []).append(entry.key)
        return [key for owner, theirs in keys.items() for key in sorted(engine.at_hand(owner, theirs))]

    def close(self) -> None:
        """Stop encoding, and end the engine if it is ours. The encode under way breaks off with it; that of a caller's
        engine is waited for."""
        self.encoder.stop()
        self.engine.close()
        self.encoder.close()
        self.journal.close()

    def held(self, memory_id: str) -> Payload | None:
        """What the store holds of a fact now; None when it has none of that id."""
        payload: Payload | None = getattr(self._stores.vector_store.get(memory_id), "payload", None)
        return payload

    def _check(self, ids: Sequence[str]) -> list[str]:
        """Bring the journal in step with the store. Returns those at which it could not look, because somebody is
        changing facts for long."""
        store = self._stores.vector_store
        if isinstance(store, MirroredStore):
            until = monotonic() + CHANGE_S
            with self.writes.collected():  # what follows from it comes when no change has to wait for it
                return [name for name in ids if not store.recheck(name, max(LOOK_S, until - monotonic()))]
        found = [(name, self.held(name)) for name in ids]
        self.writes.check([(name, payload) for name, payload in found if payload is not None])
        return []


def new_turns(messages: Any, metadata: Payload | None, timestamp: Any) -> list[NewTurn]:
    """The turns of a call to `add`, dated by the app's `date`, else by `timestamp`, else now. System messages
    are instructions, not turns; what has no text is none either."""
    dated = dict(metadata or {})
    when = datetime.now(UTC) if timestamp is None else read_date(timestamp)
    if dated.get("date"):
        when = read_date(dated["date"])
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    turns = []
    for message in [messages] if isinstance(messages, Mapping) else messages:
        if not isinstance(message, Mapping) or message.get("role") in (None, "system"):
            continue
        text = _text(message.get("content"))
        if text:
            role = str(message["role"])
            speaker = message.get("name") or dated.get("speaker") or role.capitalize()
            turns.append(NewTurn(role, str(speaker), text, when))
    return turns


def spoken(messages: Any) -> Any:
    """Those of the messages that an extraction reads: what the user and the assistant said in words. What mem0 refuses
    is left to it."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif isinstance(messages, Mapping):
        messages = [messages]
    elif not isinstance(messages, list):
        return messages
    return [message for message in messages if not isinstance(message, Mapping) or _is_spoken(message)]


def _is_spoken(message: Mapping[str, Any]) -> bool:
    return message.get("role") in ("user", "assistant") and bool(_text(message.get("content")).strip())


def _text(content: Any) -> str:
    """The words of a message as mem0 joins them."""
    if isinstance(content, list | tuple):
        parts = (
            part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"
        )
        return " ".join(str(part) for part in parts)
    return content if isinstance(content, str) else ""
