"""The door of the faces: what every public method does with its arguments before anything is read or written.

A method is `checked`: each argument is passed through the check that its name has here, so that the same argument is
read in the same way wherever it is taken. A public method whose arguments have none cannot be made. What mem0 itself
refuses stays mem0's to refuse, in its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, iscoroutinefunction, signature
from typing import Any, TypeVar, cast

from inferscale_memory.arguments import (
    as_count,
    as_flag,
    as_id,
    as_json,
    as_mapping,
    as_number,
    as_plain,
    as_text,
    as_words,
    check_keys,
    optional,
    refusal,
    repaired,
)
from inferscale_memory.deprecation import one_top_k
from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.facts.filters import as_filters
from inferscale_memory.facts.scope import IDS
from inferscale_memory.facts.search_result import SearchResult, placement_of
from inferscale_memory.mem0_adapter.private import validate_and_trim_entity_id
from inferscale_memory.memory.instance import core_of
from inferscale_memory.recall.results import Prepared

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[Any, str], Any]

_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_MOST = 2**31 - 1
"""Of memories that are asked for, and of tokens: stores and engines count in C."""


def checked(**own: Check) -> Callable[[F], F]:
    """A decorator: the method, of a face or of what stands on one, with its arguments checked. A check in `own` goes
    before the one that the argument's name has."""
    return lambda method: _checked(method, own, lambda itself: True)


def at_face(method: F, **own: Check) -> F:
    """The same for a method of a face. An instance without a real store (mem0's tests make such) is not checked: it
    behaves as mem0's."""
    return _checked(method, own, lambda itself: core_of(itself) is not None)


def at_chat(method: F) -> F:
    """The same where `messages` are a conversation."""
    return at_face(method, messages=as_conversation)


def at_update(method: F) -> F:
    """The same where `text` may be left out."""
    return at_face(method, text=optional(as_words))


def _checked(method: F, own: Mapping[str, Check], has_door: Callable[[Any], bool]) -> F:
    form = signature(method)
    names = [name for name, parameter in form.parameters.items() if parameter.kind not in _REST][1:]
    takes_both = {"top_k", "k"} <= set(names)  # as our own methods do; mem0 checks the top_k of its methods itself
    own = {**({"top_k": CHECKS["k"]} if takes_both else {}), **own}
    checks = {name: own.get(name) or CHECKS[name] for name in names}

    def read(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not args or not has_door(args[0]):
            return args, options
        try:
            bound = form.bind(*args, **options)
        except TypeError:  # Python's own words are better
            return args, options
        for name, check in checks.items():
            if name in bound.arguments:
                bound.arguments[name] = check(bound.arguments[name], name)
        if takes_both and "k" in bound.arguments:
            bound.arguments["top_k"] = one_top_k(bound.arguments.get("top_k"), bound.arguments.pop("k"))
        return bound.args, bound.kwargs

    if iscoroutinefunction(method):

        @wraps(method)
        async def acall(*args: Any, **options: Any) -> Any:
            args, options = read(args, options)
            return await method(*args, **options)

        return cast(F, acall)

    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        args, options = read(args, options)
        return method(*args, **options)

    return cast(F, call)


# -- what is said --------------------------------------------------------------------------------------------


def as_messages(value: Any, name: str) -> Any:
    """Messages of `add`: text, one message, or a list of them, with all text repaired. Other types are mem0's to
    refuse."""
    if isinstance(value, str):
        return repaired(value)
    if isinstance(value, Mapping):
        return [_message(value, name)]
    if isinstance(value, list):
        return [_message(message, f"{name}[{at}]") for at, message in enumerate(value)]
    return value


def as_conversation(value: Any, name: str) -> Any:
    """A question, or messages that end with one."""
    if isinstance(value, str):
        return repaired(value)
    if isinstance(value, Mapping):
        return [_message(value, name)]
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | range):
        raise refusal(name, value, "a question, or a list of messages that ends with one")
    return [_message(message, f"{name}[{at}]") for at, message in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise refusal(name, value, 'a message such as {"role": "user", "content": "..."}')
    message: dict[str, Any] = as_plain(as_mapping(value, name), name)
    for key in ("role", "name"):
        optional(as_text)(message.get(key), f"{name}[{key!r}]")
    content = message.get("content")
    if isinstance(content, list | tuple):
        message["content"] = [_part(part, f"{name}['content'][{at}]") for at, part in enumerate(content)]
    elif content is not None and not isinstance(content, str | Mapping):
        raise refusal(f"{name}['content']", content, "text, or a list of parts")
    return message


def _part(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    part = as_mapping(value, name)
    if part.get("type") == "text":
        as_text(part.get("text"), f"{name}['text']")
    return part


# -- who, and which ------------------------------------------------------------------------------------------


def as_scope_id(value: Any, name: str) -> str | None:
    """An id as mem0 takes it: None for not given; blank ones and those with white space within are its to refuse."""
    if value is None:
        return None
    text: str = validate_and_trim_entity_id(as_id(value, name), name)
    return text


def as_ids(value: Any, name: str) -> dict[str, str | None]:
    """Ids by name."""
    ids = as_mapping(value, name)
    check_keys(ids, IDS, name)
    return {key: as_scope_id(one, key) for key, one in ids.items()}


def as_memory_id(value: Any, name: str) -> str:
    """The id of a memory."""
    return as_text(as_json(value, name), name)


def _memory_ids(value: Any, name: str) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise refusal(name, value, "a list of ids of memories")
    return [as_memory_id(one, f"{name}[{at}]") for at, one in enumerate(value)]


def as_memories(value: Any, name: str) -> list[SearchResult]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise refusal(name, value, "a list of what `search` found")
    found: list[SearchResult] = []
    for at, one in enumerate(value):
        memory = as_mapping(one, f"{name}[{at}]")
        as_memory_id(memory.get("id"), f"{name}[{at}]['id']")
        as_text(memory.get("memory"), f"{name}[{at}]['memory']")
        optional(as_number)(memory.get("score"), f"{name}[{at}]['score']")
        optional(as_mapping)(memory.get("metadata"), f"{name}[{at}]['metadata']")
        found.append(SearchResult(as_plain(memory, f"{name}[{at}]"), placement_of(one)))
    return found


# -- how -----------------------------------------------------------------------------------------------------


def _metadata(value: Any, name: str) -> Any:
    metadata: dict[str, Any] = as_json(as_mapping(value, name), name)
    return metadata


def _k(value: Any, name: str) -> int:
    return min(as_count(value, name), _MOST)


def as_room(value: Any, name: str) -> int:
    """Most tokens of an answer."""
    return min(as_count(value, name, least=1), _MOST)


def _mem0s_count(value: Any, name: str) -> Any:
    """A count that mem0 checks, except for None and huge ones."""
    negative = isinstance(value, int) and value < 0
    return value if negative or isinstance(value, bool | str | float) else _k(value, name)


def _mem0s_threshold(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | str) or not hasattr(value, "__float__"):
        return value
    return as_number(value, name)


def _mem0s_text(value: Any, name: str) -> Any:
    """Text that mem0 checks."""
    return repaired(value) if isinstance(value, str) else value


def _as_is(value: Any, name: str) -> Any:
    return value


def an(kind: type, what: str) -> Check:
    """The check of an object of ours, which is `what`."""

    def check(value: Any, name: str) -> Any:
        if not isinstance(value, kind):
            raise refusal(name, value, what)
        return value

    return check


def _tools(value: Any, name: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise refusal(name, value, "a list of tools")
    return [
        as_json(tool, f"{name}[{at}]") if isinstance(tool, Mapping) else tool for at, tool in enumerate(value)
    ]


def _called(value: Any, name: str) -> Any:
    if not callable(value):
        raise refusal(name, value, "a function of two numbers")
    return value


CHECKS: dict[str, Check] = {
    **dict.fromkeys(IDS, as_scope_id),
    "ids": as_ids,
    "messages": as_messages,
    "query": _mem0s_text,
    "text": as_words,
    "data": optional(as_words),
    "system": optional(as_text),
    "prompt": optional(as_text),
    "memory_id": as_memory_id,
    "memory_ids": _memory_ids,
    "memories": optional(as_memories),
    "prepared": an(Prepared, "what `prepare` returns"),
    "metadata": optional(_metadata),
    "filters": optional(as_filters),
    "timestamp": _as_is,  # read where it is taken
    "expiration_date": _as_is,  # mem0's
    "memory_type": _as_is,  # mem0's
    "reference_date": _as_is,  # mem0's
    "llm": _as_is,
    "session": _as_is,  # has a check of its own
    "k": optional(_k),
    "top_k": _mem0s_count,
    "threshold": _mem0s_threshold,
    "max_tokens": as_room,
    "options": optional(an(SamplingOptions, "a SamplingOptions")),
    "tools": optional(_tools),
    "tool_choice": optional(as_text),
    "timeout": optional(lambda value, name: as_number(value, name, least=0)),
    "progress": optional(_called),
    "search_s": lambda value, name: as_number(value, name, least=0),
    **dict.fromkeys(("infer", "rerank", "explain", "show_expired", "stream", "inject", "sticky"), as_flag),
}
"""How each argument is read, by its name."""
