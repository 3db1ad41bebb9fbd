"""Configurations as mem0 0.1 and 1.x took them, turned into those of mem0 2, with a DeprecationWarning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferscale_memory.deprecation import warn

# Keys of a configuration: what they are called now, or None where mem0 2 has nothing for them.
OLD_OPTIONS = {
    "custom_fact_extraction_prompt": "custom_instructions",
    "custom_prompt": "custom_instructions",
    "custom_update_memory_prompt": None,
    "graph_store": None,
}


def current_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration dictionary with today's keys. `config` stays as it is."""
    options, said = dict(config), []
    for old, new in OLD_OPTIONS.items():
        if old not in options:
            continue
        value = options.pop(old)
        if new is None:
            said.append(f"{old} has no effect in mem0 2: leave it out")
        else:
            said.append(f"{old} is {new} in mem0 2: rename it")
            if options.get(new) is None:
                options[new] = value
    if said:
        warn("; ".join(said))
    return options
