"""Whose a fact is. The owner decides keys, salts and what may be injected; nothing crosses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from urllib.parse import quote, unquote

IDS = ("user_id", "agent_id", "run_id")
MOST = 512
"""Characters of the longest owner."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The ids a fact carries, or a question is asked for. At least one is set in a valid scope."""

    user_id: str | None = None
    agent_id: str | None = None
    run_id: str | None = None

    @classmethod
    def of(cls, ids: Mapping[str, Any]) -> Scope:
        """The scope among `ids` (arguments, filters or a payload), trimmed as mem0 does."""
        found = {name: str(ids[name]).strip() for name in IDS if ids.get(name) is not None}
        return cls(**{name: value for name, value in found.items() if value})

    @classmethod
    def read(cls, key: str) -> Scope:
        """The scope of a `key`, ours or mem0's, whose ids stand in another order."""
        pairs = (part.partition("=") for part in key.split("&"))
        return cls.of({name: unquote(value) for name, _, value in pairs if name in IDS})

    @property
    def ids(self) -> dict[str, str]:
        """Those that are set."""
        return {name: value for name in IDS if (value := getattr(self, name)) is not None}

    @property
    def owner(self) -> str:
        """`user:`, `agent:` or `run:` and the first id that is set; the kind keeps a user apart from an agent
        of the same name, and from the public owner. Empty in an empty scope."""
        return next(iter(self.owners), "")

    @property
    def owners(self) -> list[str]:
        """Everybody who may be shown what carries these ids, when they ask without the other ids."""
        return [_owner(name.removesuffix("_id"), value) for name, value in self.ids.items()]

    def covers(self, other: Scope) -> bool:
        """Whether `other` carries every id of this one: mem0's filters find it then."""
        return self.ids.items() <= other.ids.items()

    @property
    def key(self) -> str:
        """All ids as one string: windows never cross it."""
        return "&".join(f"{name}={quote(value, safe='')}" for name, value in self.ids.items())


def _owner(kind: str, name: str) -> str:
    """A name longer than the connector takes stands by its digest, with a sign before it that no other owner has."""
    owner = f"{kind}:{name}"
    return owner if len(owner) <= MOST else f"{kind}#{blake2b(name.encode(), digest_size=32).hexdigest()}"


def fact_tag(owner: str, fact: str) -> str:
    """The name under which an engine knows the text of a fact; it gives neither away."""
    return blake2b(f"{owner}\0{fact}".encode(), digest_size=12).hexdigest()


def turn_tag(owner: str, turn: int) -> str:
    """The same for a turn that no fact was drawn from."""
    return fact_tag(owner, f"turn {turn}")


def said_tag(owner: str) -> str:
    """The name under which an engine knows whatever mem0 shows it of what `owner` said or has in memory: the
    prompts of extraction. They are hardly ever asked twice, so forgetting any fact evicts them all."""
    return fact_tag(owner, "")
