"""The rows of the journal as values. Nothing here touches a database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime


def instant(when: datetime) -> str:
    """An instant as text whose order is that of time. `when` has a time zone."""
    return when.astimezone(UTC).isoformat(timespec="microseconds")


def to_iso(when: datetime | None) -> str | None:
    """A time as the journal stores it."""
    return None if when is None else when.isoformat()


def from_iso(text: str | None) -> datetime | None:
    """The reverse of `to_iso`; None also for a damaged text."""
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class NewTurn:
    """One message about to be logged.

    Attributes:
        role: "user", "assistant" or whatever the app calls it.
        speaker: who is shown as its author; "" for nobody.
        text: the message.
        when: when it was said; None for undated.
    """

    role: str
    speaker: str
    text: str
    when: datetime | None


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the log.

    Attributes:
        number: its name in this journal.
        ordinal: its place in its scope, from 0; never used twice.
        session: number of the first turn of its session.
        text: None once it was forgotten.
    """

    number: int
    ordinal: int
    session: int
    role: str
    speaker: str
    text: str | None
    when: datetime | None


@dataclass(frozen=True, slots=True)
class Fact:
    """One memory item as the journal knows it.

    Attributes:
        fact: mem0's id.
        owner: whose it is.
        scope: every id it carries, as one string: windows never cross it.
        tag: name under which an engine knows text of this fact.
        text, speaker, when: what its line in a prompt says.
        session: number of the session's first turn; None for a fact without a conversation.
        turns: numbers of the turns it came from.
        verbatim: whether it is word for word the one turn it came from.
        expires: when its time is over, as `instant` writes it; None when it never is.
    """

    fact: str
    owner: str
    scope: str
    tag: str
    text: str
    speaker: str
    when: datetime | None
    session: int | None = None
    turns: tuple[int, ...] = ()
    verbatim: bool = False
    expires: str | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """What stood before a fact while it was prefilled: facts as they were worded, and turns by number.

    Attributes:
        blobs: keys of those facts' blobs that were injected instead of prefilling them. What these were made of is in
            the new blob too.
    """

    facts: tuple[Fact, ...] = ()
    turns: tuple[int, ...] = ()
    blobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The blob of one fact under one model.

    Attributes:
        fingerprint: of the model that made it.
        key, tokens: as the engine computed them.
        line: digest of the line it was made of; another line needs another blob.
        chained: whether it was made behind all facts before it, in the order in which they were written.
    """

    fact: str
    owner: str
    fingerprint: str
    key: str
    tokens: int
    line: str
    chained: bool = False


@dataclass(frozen=True, slots=True)
class Intent:
    """Something that was begun, so that it can be finished after a crash.

    Attributes:
        kind: "add", "delete", "update", "delete_all", "reset", or "scrub" when nothing but that is left.
        fact: id of the fact that is to be deleted or updated.
        scope: whose facts are added or deleted.
        words: what is to be forgotten: the fact's text, then the texts of the turns it came from.
        turns: numbers of the turns that are being added.
        facts: ids of the facts that the store had when everything of a scope was to be deleted.
    """

    kind: str
    fact: str = ""
    scope: str = ""
    words: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def says_something(self) -> bool:
        """An empty fact stands in everything, and forgetting it must take nothing along."""
        return bool(self.words and self.words[0].strip())
