"""Old names that still work: those of one release ago warn, and name the new one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from inferscale_memory.errors import ConfigurationError

T = TypeVar("T")


def warn(message: str) -> None:
    """A DeprecationWarning at the line of the nearest caller outside this library."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("inferscale_memory."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DeprecationWarning, stacklevel=level)


def renamed(options: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """`options` under their current names. `names` maps old names to new ones, `where` is the prefix under which
    messages show them.

    Raises:
        ConfigurationError: an option under both names, with different values.
    """
    current, old_names = dict(options), []
    for old, new in names.items():
        if old not in current:
            continue
        value = current.pop(old)
        if new in current and current[new] != value:
            raise ConfigurationError(
                f"{where}{old} is {value!r} and {where}{new} is {current[new]!r}: the first is the old name of the "
                f"second, so pass {where}{new} alone"
            )
        current[new] = value
        old_names.append(f"{where}{old} is now {where}{new}")
    if old_names:
        warn(f"{', '.join(old_names)}: the old name works in this release and goes in the next")
    return current


def one_top_k(top_k: T | None, k: T | None) -> T | None:
    """How many memories a call asks for: `top_k`, which may also be written `k`.

    Raises:
        ConfigurationError: both, with different values.
    """
    if top_k is None or k is None or top_k == k:
        return k if top_k is None else top_k
    raise ConfigurationError(
        f"top_k is {top_k!r} and k is {k!r}: both name the number of memories, so pass top_k alone"
    )


def with_top_k(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with `k`, if it is there, as `top_k`.

    Raises:
        ConfigurationError: both, with different values.
    """
    current = dict(options)
    if "k" in current:
        current["top_k"] = one_top_k(current.get("top_k"), current.pop("k"))
    return current
