"""The one door through which an app's text, ids and options come in.

Every public call passes what it was given through here before anything is written or sent. What can be repaired is
repaired; everything else is a `ConfigurationError` that names the argument, what it was, and what it should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from inferscale_memory.errors import ConfigurationError

MAX_DEPTH = 64
"""Most levels of lists and dictionaries in metadata, a filter, a schema or a tool's arguments."""

_SHOWN = 60


def refusal(name: str, value: object, expected: str) -> ConfigurationError:
    """The error for an argument that cannot be taken: `name` must be `expected`, not `value`."""
    try:
        shown = repr(value)
    except Exception:  # a broken __repr__ of the app's own class, or one that recurses too deep
        shown = f"a {type(value).__name__}"
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return ConfigurationError(f"{name} must be {expected}, not {shown.encode(errors='replace').decode()}")


def repaired(text: str) -> str:
    """`text` with every lone surrogate replaced by U+FFFD, since no file, database or tokenizer takes one.

    JSON that was cut in the middle of an emoji holds such half characters.
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        # A pair of halves that stand beside each other is one character again.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def as_text(value: object, name: str) -> str:
    """A string, repaired. Raises ConfigurationError for anything else."""
    if not isinstance(value, str):
        raise refusal(name, value, "text")
    return repaired(value)


def as_words(value: object, name: str) -> str:
    """A string with more than white space in it, repaired."""
    text = as_text(value, name)
    if not text.strip():
        raise refusal(name, value, "text with words in it")
    return text


def as_count(value: object, name: str, *, least: int = 0, most: int | None = None) -> int:
    """A whole number between `least` and `most`. Numbers of other libraries (numpy's) are taken, booleans are not."""
    expected = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise refusal(name, value, expected)
    number = int(value.__index__())
    if number < least or (most is not None and number > most):
        raise refusal(name, value, expected)
    return number


def as_number(value: object, name: str, *, least: float | None = None, most: float | None = None) -> float:
    """A finite number between `least` and `most`."""
    bounds = " ".join(
        part
        for part in (
            "" if least is None else f"of at least {least:g}",
            "" if most is None else f"and at most {most:g}" if least is not None else f"of at most {most:g}",
        )
        if part
    )
    expected = f"a number {bounds}".strip()
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise refusal(name, value, expected)
    number = float(value)
    if not isfinite(number) or (least is not None and number < least) or (most is not None and number > most):
        raise refusal(name, value, expected)
    return number


def as_plain(value: Any, name: str, *, depth: int = MAX_DEPTH) -> Any:
    """A value with all text in it repaired: strings, keys and items of dictionaries, lists and tuples, at any level.
    Everything else is returned as it is.

    Raises:
        ConfigurationError: it is nested more than `depth` levels deep.
    """
    if isinstance(value, str):
        return repaired(value)
    if isinstance(value, Mapping):
        _check_depth(depth, name)
        return {
            as_plain(key, name, depth=depth - 1): as_plain(item, name, depth=depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | range):
        _check_depth(depth, name)
        items = [as_plain(item, name, depth=depth - 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _check_depth(left: int, name: str) -> None:
    if left <= 0:
        raise ConfigurationError(f"{name} is nested more than {MAX_DEPTH} levels deep: flatten it")
