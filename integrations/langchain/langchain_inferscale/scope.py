"""Whose memories a call is about: from its arguments, from its config, or from the object's constructor.

The nearer word wins, id by id: an argument (`bind(user_id=...)`), then `config["configurable"]`, then the constructor.
It must never guess: an id that is there and empty is an error, not the absence of one, or the memories of whomever
the constructor names would be shown to a stranger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from pydantic import AfterValidator, BeforeValidator

from inferscale_memory.arguments import as_id, refusal
from inferscale_memory.errors import ConfigurationError

IDS = ("user_id", "agent_id", "run_id")
Ids = dict[str, str]

DEFAULT_KEYS: dict[str, str] = {name: name for name in IDS}
"""Which key of `config["configurable"]` says which id. `thread_id` says none: a new thread is to know the old ones."""


def read_ids(given: Mapping[str, Any], keys: Mapping[str, str] = DEFAULT_KEYS) -> Ids:
    """The ids in `given`, which has them under `keys` (id -> key). Raises ConfigurationError on an empty one."""
    found = {}
    for name, key in keys.items():
        value = given.get(key)
        if value is None:
            continue
        text = as_id(value, key).strip()
        if not text:
            raise ConfigurationError(
                f"{key} is empty: pass the {name} whose memories are meant, or leave it out"
            )
        found[name] = text
    return found


def ids_of_config(config: RunnableConfig | None, keys: Mapping[str, str] = DEFAULT_KEYS) -> Ids:
    """The ids in `config["configurable"]`. Without a config it is that of the graph or chain that is running."""
    return read_ids(ensure_config(config).get("configurable") or {}, keys)


def checked_keys(keys: Mapping[str, str]) -> dict[str, str]:
    """`keys` as an option. Raises ConfigurationError on ids that do not exist."""
    if not isinstance(keys, Mapping) or not all(isinstance(key, str) for key in keys.values()):
        raise refusal("scope_keys", keys, 'a dictionary from an id to a key, such as {"user_id": "user_id"}')
    unknown = sorted(map(str, set(keys) - set(IDS)))
    if unknown:
        raise ConfigurationError(f"scope_keys names {', '.join(unknown)}: the ids are {', '.join(IDS)}")
    return dict(keys)


Id = Annotated[str | None, BeforeValidator(lambda value: read_ids({"id": value}, {"id": "id"}).get("id"))]
"""An id as a field of an object: trimmed, and never empty."""
Keys = Annotated[dict[str, str], AfterValidator(checked_keys)]
"""`scope_keys` as a field."""


def demanded(ids: Ids, what: str) -> Ids:
    """`ids`, of which there must be one. Raises ConfigurationError that names the ways to say it."""
    if not ids:
        raise ConfigurationError(
            f"{what} has a memory, and nothing says whose memories are meant. Name a user_id, agent_id or run_id in "
            f"one of three ways: in the constructor, {what}(user_id=...); for one call, .bind(user_id=...) or as an "
            "argument; or in the config, {'configurable': {'user_id': ...}}."
        )
    return ids
