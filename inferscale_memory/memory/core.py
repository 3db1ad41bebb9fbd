"""Everything behind the face, wired together once; a face only says when.

It holds no method of mem0's and must never call one: the sync face hands in what mem0 found, and an async
face does the same.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from inferscale_memory.errors import ConfigurationError
from inferscale_memory.journal import Journal, NewTurn
from inferscale_memory.memory.at_hand import AtHand, Preambles
from inferscale_memory.memory.config import Settings
from inferscale_memory.memory.encoder import Encoder
from inferscale_memory.memory.mirror import StoreLock, mirrored
from inferscale_memory.memory.plan import fact_words
from inferscale_memory.memory.recall import Recall
from inferscale_memory.memory.words import read_date
from inferscale_memory.memory.writing import WritePath

Payload = Mapping[str, Any]


class Core:
    """Journal, engine, encoder, write path and read path of one memory.

    Args:
        settings: the memory's configuration.
        payload: what the vector store holds of a fact now; None when it has none of that id.
    """

    def __init__(self, settings: Settings, payload: Callable[[str], Payload | None]) -> None:
        self.injection = settings.injection
        self.engine = settings.engine
        self.journal = _open_journal(settings)
        self._payload = payload
        self._store_lock = StoreLock()
        at_hand = AtHand()
        preambles = Preambles(at_hand)
        self.encoder = Encoder(
            self.journal, self.engine, at_hand, preambles, w=self.injection.w, check=self._check
        )
        self.writes = WritePath(self.journal, self.engine, self.encoder, at_hand)
        self.recall = Recall(self.journal, self.engine, self.encoder, at_hand, preambles, self.injection)

    def mirror_facts(self, store: Any) -> Any:
        """The fact store as mem0 is to see it."""
        return mirrored(store, self._store_lock, self.writes)

    def guard_entities(self, store: Any) -> Any:
        """The entity store as mem0 is to see it."""
        return mirrored(store, self._store_lock, None)

    def wordings(self, ids: Sequence[str]) -> dict[str, str]:
        """Id -> digest of the line it has now, of those that exist."""
        return {name: fact_words(fact).digest for name, fact in self.journal.facts(ids).items()}

    def close(self) -> None:
        """Stop encoding, and end the engine if it is ours."""
        self.encoder.close()
        self.engine.close()
        self.journal.close()

    def _check(self, ids: Sequence[str]) -> None:
        found = [(name, self._payload(name)) for name in ids]
        self.writes.check([(name, payload) for name, payload in found if payload is not None])


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


def _text(content: Any) -> str:
    """The words of a message as mem0 joins them."""
    if isinstance(content, list | tuple):
        parts = (
            part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"
        )
        return " ".join(str(part) for part in parts)
    return content if isinstance(content, str) else ""


def _open_journal(settings: Settings) -> Journal:
    path = settings.folder / "journal.sqlite"
    try:
        return Journal(path)
    except (sqlite3.Error, OSError) as error:
        raise ConfigurationError(
            f"the journal {path} cannot be opened ({error}): pass another folder, or move that file away"
        ) from error
