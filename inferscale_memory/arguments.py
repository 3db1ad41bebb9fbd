"""The one door through which an app's text, ids and options come in.

Every public call passes what it was given through here before anything is written or sent. What can be repaired is
repaired; everything else is a `ConfigurationError` that names the argument, what it was, and what it should be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from difflib import get_close_matches
from enum import Enum
from math import isfinite
from os import PathLike, fspath
from typing import Any
from uuid import UUID

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
    expected = (
        f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    )
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise refusal(name, value, expected)
    try:
        number = int(value.__index__())
    except TypeError as error:  # an array of numpy has the method, and no answer
        raise refusal(name, value, expected) from error
    if number < least or (most is not None and number > most):
        raise refusal(name, value, expected)
    return number


def as_flag(value: object, name: str) -> bool:
    """True or False. numpy's are taken, and 1 and 0; words are not, because "no" counts as true."""
    if isinstance(value, bool):
        return value
    plain = _from_numpy(value)
    if isinstance(plain, bool | int) and plain in (0, 1):
        return bool(plain)
    raise refusal(name, value, "True or False")


def as_id(value: object, name: str) -> str:
    """The text of an id. Numbers that are whole, UUIDs and other ids with a text of their own are taken, as mem0 takes
    them; what only has a text by accident (a list, a dictionary, a boolean, bytes) is not.

    An id is never repaired: two users whose ids differ in half a character would become one.
    """
    expected = "an id: text, a whole number or a UUID"
    value = _from_numpy(value)
    if isinstance(value, Enum) and not isinstance(value, str):
        value = value.value
    if isinstance(value, bool | float | complex | Decimal | bytes | bytearray | date | time) or callable(value):
        raise refusal(name, value, expected)
    if not isinstance(value, str):
        nameless = type(value).__str__ in (object.__str__, BaseException.__str__)  # its text is its address
        if isinstance(value, Collection) or (nameless and not isinstance(value, int)):
            raise refusal(name, value, expected)
        try:
            value = str(value)
        except Exception as error:  # whatever a class of the app's raises; a number of 5,000 digits
            raise refusal(name, value, expected) from error
    text = str.__str__(value)
    if repaired(text) != text:
        raise refusal(name, text, "an id of whole characters: half of one cannot be stored, and is not repaired")
    if "\0" in text:
        raise refusal(name, text, "an id without NUL characters, which databases cut it off at")
    return text


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
    try:
        number = float(value)
    except (ArithmeticError, TypeError, ValueError) as error:  # 10**400, an array, a signalling NaN
        raise refusal(name, value, expected) from error
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


def as_json(value: Any, name: str, *, depth: int = MAX_DEPTH) -> Any:
    """A value as JSON has it, and as every store keeps it: text (repaired), numbers, booleans, None, lists, and
    dictionaries with text as keys.

    What is usual in apps and is no JSON becomes what it says: numbers and arrays of numpy, dates and times (ISO),
    UUIDs, paths, decimals, members of an Enum, tuples and sets. Stored values and the operands of filters are both
    read here, so that a fact is found by the value that it was stored with.

    Raises:
        ConfigurationError: any other object, or more than `depth` levels of lists and dictionaries.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return as_json(value.value, name, depth=depth)
    if isinstance(value, str):
        return repaired(str.__str__(value))
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        _check_depth(depth, name)
        for key in value:
            if not isinstance(key, str):
                raise refusal(f"a key of {name}", key, "text")
        return {repaired(key): as_json(item, _inside(name, key), depth=depth - 1) for key, item in value.items()}
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, PathLike):
        return as_json(fspath(value), name, depth=depth)
    if isinstance(value, set | frozenset):
        items = [as_json(item, name, depth=depth - 1) for item in value]
        try:
            return sorted(items)
        except TypeError:  # of several kinds
            return sorted(items, key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        _check_depth(depth, name)
        return [as_json(item, _inside(name, at), depth=depth - 1) for at, item in enumerate(value)]
    plain = _from_numpy(value)
    if plain is value:
        raise refusal(name, value, "text, a number, a boolean, a date, or lists and dictionaries of these")
    return as_json(plain, name, depth=depth)


def as_mapping(value: object, name: str) -> dict[str, Any]:
    """A dictionary with text as keys; a copy. Its values are returned as they are."""
    if not isinstance(value, Mapping):
        raise refusal(name, value, "a dictionary")
    for key in value:
        if not isinstance(key, str):
            raise refusal(f"a key of {name}", key, "text")
    return dict(value)


def check_keys(given: Collection[str], known: Collection[str], name: str) -> None:
    """Raises ConfigurationError for a key that `name` does not have, with the key that was probably meant."""
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return
    wrong = repaired(unknown[0])
    close = get_close_matches(wrong, known, n=1)
    remedy = f"did you mean {close[0]!r}?" if close else "leave it out."
    raise ConfigurationError(f"{name} has no {wrong!r}: {remedy} It knows {', '.join(sorted(known))}")


def optional(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """`check`, for an argument that may be None."""
    return lambda value, name: None if value is None else check(value, name)


def _inside(name: str, key: object) -> str:
    """The name of an item of `name`; short, however deep it is."""
    return name if len(name) > _SHOWN else f"{name}[{repaired(repr(key))}]"


def _from_numpy(value: Any) -> Any:
    """What a scalar or an array of numpy is in Python; anything else as it is. numpy is not imported for it."""
    if not type(value).__module__.startswith("numpy"):
        return value
    if type(value).__name__ == "datetime64":  # whose own Python value is a bare number for nanoseconds
        return str(value)
    plain = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(plain, bytes) else plain


def _check_depth(left: int, name: str) -> None:
    if left <= 0:
        raise ConfigurationError(f"{name} is nested more than {MAX_DEPTH} levels deep: flatten it")
