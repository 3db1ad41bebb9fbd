"""Calls as mem0 0.1 and 1.x took them, turned into those of mem0 2.

One place for both faces. An old call gets one DeprecationWarning, at the line that made it, with the new form
in it; values are never shown. It must change nothing about a call that mem0 2 takes, and nothing at all where
there is no real store: there mem0 answers as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

from inferscale_memory.arguments import optional, refusal
from inferscale_memory.deprecation import warn
from inferscale_memory.facts.filters import as_filters
from inferscale_memory.facts.scope import IDS
from inferscale_memory.memory.argument_checks import as_scope_id
from inferscale_memory.memory.instance import core_of

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class OldForm:
    """What a method once took.

    Attributes:
        takes: its first argument, which is where it was.
        positional: what could follow it by position. Beyond these mem0's versions disagreed.
        ids_in_filters: ids were arguments, and are keys of `filters` now.
        limit: how many results there were by default, as `limit`, which is `top_k` now.
        gone: keywords that mem0 2 has nothing for.
    """

    takes: tuple[str, ...]
    positional: tuple[str, ...]
    ids_in_filters: bool = False
    limit: int | None = None
    gone: tuple[str, ...] = ()


OLD_FORMS = {
    "add": OldForm(("messages",), (*IDS, "metadata"), gone=("filters",)),
    "search": OldForm(("query",), (*IDS, "limit", "filters", "threshold"), ids_in_filters=True, limit=100),
    "get_all": OldForm((), (*IDS, "limit"), ids_in_filters=True, limit=100),
}

_SHAPES: dict[Any, Callable[[Any], Any]] = {
    "v1.0": lambda result: result["results"],
    "v1.1": lambda result: result,
}


def accepts_old_calls(method: F) -> F:
    """A method, sync or async, that takes its old forms too. Its signature stays mem0 2's."""
    form, name = OLD_FORMS[method.__name__], method.__name__

    def read(memory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> _Call:
        # Without a core there is no real store: the instance behaves as mem0's.
        return _Call(args, options) if core_of(memory) is None else _read(name, form, args, options)

    if iscoroutinefunction(method):

        @wraps(method)
        async def acall(self: Any, *args: Any, **options: Any) -> Any:
            new = read(self, args, options)
            return new.shape(await method(self, *new.args, **new.options))

        return cast(F, acall)

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        new = read(self, args, options)
        return new.shape(method(self, *new.args, **new.options))

    return cast(F, call)


# -- inside --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """A call as mem0 2 takes it, and what its caller wants to see of the result."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    shape: Callable[[Any], Any] = field(default=lambda result: result)


def _read(name: str, form: OldForm, args: tuple[Any, ...], options: dict[str, Any]) -> _Call:
    """Raises TypeError and ValueError on what no version took."""
    own = len(form.takes)
    given, options = args[own:], dict(options)
    old = [f"{word} by position" for word in form.positional[: len(given)]]
    for word, value in zip(form.positional, given, strict=False):
        if word in options:
            raise TypeError(f"{name}() got multiple values for argument {word!r}")
        if value is not None:
            options[word] = value
    if len(given) > len(form.positional):
        known = ", ".join((*form.takes, *form.positional))
        raise TypeError(f"{name}() takes {known} by position, in mem0's old order: name the others")
    old += [f"{word}=" for word in _old_words(form) if word in options and f"{word} by position" not in old]
    call = _Call(args[:own], options)
    if not old:
        return call
    for word in form.gone:
        options.pop(word, None)
    wants = options.pop("output_format", "v1.1") or "v1.1"
    if not isinstance(wants, str) or wants not in _SHAPES:
        raise refusal("output_format", wants, " or ".join(_SHAPES))
    call.shape = _SHAPES[wants]
    if form.limit is not None:
        _move_limit(name, form, options)
    if form.ids_in_filters:
        _move_ids(name, options)
    warn(f"mem0 2 has no {', '.join(old)} in {name}(): write {_new_form(name, form, options, wants)}")
    return call


def _old_words(form: OldForm) -> tuple[str, ...]:
    ids = IDS if form.ids_in_filters else ()
    return (*ids, *(("limit",) if form.limit is not None else ()), *form.gone, "output_format")


def _move_limit(name: str, form: OldForm, options: dict[str, Any]) -> None:
    limit, known = options.pop("limit", None), "top_k" in options
    if limit is None and not known and any(word in options for word in IDS):
        limit = form.limit  # what an app that calls it the old way counts on
    if limit is None:
        return
    if known and options["top_k"] != limit:
        raise ValueError(f"{name}() got limit={limit!r} and top_k={options['top_k']!r}: pass top_k alone")
    options["top_k"] = limit


def _move_ids(name: str, options: dict[str, Any]) -> None:
    ids = {word: options.pop(word) for word in IDS if word in options}
    ids = {word: as_scope_id(value, word) for word, value in ids.items() if value is not None}
    if not ids:
        return
    filters = optional(as_filters)(options.get("filters"), "filters") or {}
    for word, value in ids.items():
        if filters.get(word, value) != value:
            raise ValueError(
                f"{name}() got one {word} as a keyword and another in filters: pass filters alone"
            )
    options["filters"] = {**filters, **ids}


def _new_form(name: str, form: OldForm, options: Mapping[str, Any], wants: str) -> str:
    parts = list(form.takes)
    for word, value in sorted(options.items(), key=lambda option: option[0] != "filters"):
        if word == "filters" and isinstance(value, Mapping):
            value = ", ".join(f"{key!r}: ..." for key in value)
            parts.append(f"filters={{{value}}}")
        elif word not in form.takes:
            parts.append(f"{word}={value}" if word == "top_k" else f"{word}=...")
    return f"{name}({', '.join(parts)})" + ("['results']" if wants == "v1.0" else "")
