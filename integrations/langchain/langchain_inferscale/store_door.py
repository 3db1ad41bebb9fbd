"""What a call of the store may be given, read before anything is looked up or written.

Namespaces and keys are names, so half a character in one is refused: repaired, two names could become one. In values
and questions it is repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from langgraph.store.base import (
    GetOp,
    InvalidNamespaceError,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    SearchOp,
    validate_op_namespace,
)

from inferscale_memory.arguments import as_count, as_number, as_plain, as_text, refusal, repaired
from langchain_inferscale.store_match import checked

P = ParamSpec("P")
R = TypeVar("R")


def checks_names(method: Callable[P, R]) -> Callable[P, R]:
    """A method of LangGraph's whose namespaces and keys are checked first: it reads them itself before `batch` does."""
    named = signature(method)

    @wraps(method)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        given = named.bind(*args, **kwargs).arguments
        for name, value in given.items():
            if name in ("namespace", "namespace_prefix") or (
                name in ("prefix", "suffix") and value is not None
            ):
                labels(value)
            elif name == "key":
                key_of(value)
        return method(*args, **kwargs)

    return whole


def ops_in(given: Any) -> list[Op]:
    """Operations that can be carried out.

    Raises:
        InvalidNamespaceError: labels that LangGraph does not allow, or that no file holds.
        StoreError: a filter that cannot be.
        ConfigurationError: any other argument that cannot be.
        ValueError: an operation that LangGraph does not have.
    """
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise refusal("ops", given, "a list of LangGraph's operations")
    return [_op(op) for op in given]


def _op(op: Any) -> Op:
    if isinstance(op, GetOp):
        read: Op = op._replace(namespace=labels(op.namespace), key=key_of(op.key))
    elif isinstance(op, PutOp):
        read = _put(op)
    elif isinstance(op, SearchOp):
        read = op._replace(
            namespace_prefix=labels(op.namespace_prefix),
            query=None if op.query is None else as_text(op.query, "query"),
            filter=dict(checked(op.filter)),
            limit=as_count(op.limit, "limit"),
            offset=as_count(op.offset, "offset"),
        )
    elif isinstance(op, ListNamespacesOp):
        read = op._replace(
            match_conditions=tuple(
                MatchCondition(condition.match_type, labels(condition.path))
                for condition in op.match_conditions or ()
            ),
            max_depth=None if op.max_depth is None else as_count(op.max_depth, "max_depth"),
            limit=as_count(op.limit, "limit"),
            offset=as_count(op.offset, "offset"),
        )
    else:
        raise ValueError(f"Unknown operation type: {type(op)}")
    validate_op_namespace(read)
    return read


def _put(op: PutOp) -> PutOp:
    if op.value is not None and not isinstance(op.value, Mapping):
        raise refusal("value", op.value, "a dictionary, or None to delete the item")
    if not op.namespace:
        raise InvalidNamespaceError("Namespace cannot be empty.")
    index: Any = op.index
    if index is not None and index is not False and not _is_list_of_texts(index):
        raise refusal("index", index, 'a list of paths such as "text" or "tags[*]", False, or None')
    return op._replace(
        namespace=labels(op.namespace),
        key=key_of(op.key),
        value=None if op.value is None else as_plain(dict(op.value), "value"),
        ttl=None if op.ttl is None else as_number(op.ttl, "ttl", least=0),
    )


def labels(namespace: Any) -> tuple[str, ...]:
    """A namespace as a tuple of labels. Raises InvalidNamespaceError, as LangGraph does."""
    if not _is_list_of_texts(namespace):
        shown = str(refusal("a namespace", namespace, "a tuple of texts"))
        raise InvalidNamespaceError(shown)
    for label in namespace:
        if repaired(label) != label:
            raise InvalidNamespaceError(f"a label holds half a character, which no file does: {label!r}")
    return tuple(namespace)


def key_of(key: Any) -> str:
    """A key as text. Raises ConfigurationError where it is no name."""
    if isinstance(key, bool) or not isinstance(key, str | int | UUID):
        raise refusal("key", key, "text")
    text = str(key)
    if repaired(text) != text:
        raise refusal(
            "key", text, "text of whole characters: half of one cannot be stored, and is not repaired"
        )
    return text


def ttl_in(given: Any) -> Any:
    """LangGraph's configuration of times to live. Raises ConfigurationError on what it does not have."""
    if given is None:
        return None
    known = ("refresh_on_read", "default_ttl", "sweep_interval_minutes", "sweep_max_items")
    if not isinstance(given, Mapping) or set(given) - set(known):
        raise refusal("ttl", given, f"a dictionary of {', '.join(known)}")
    for name in ("default_ttl", "sweep_interval_minutes"):
        if given.get(name) is not None:
            as_number(given[name], f"ttl[{name!r}]", least=0)
    return given


def user_of_in(given: Any) -> Any:
    """Raises ConfigurationError on what cannot be called."""
    if given is not None and not callable(given):
        raise refusal(
            "user_of", given, "a function from a namespace to a user, such as lambda labels: labels[1]"
        )
    return given


def user_in(user: Any, namespace: tuple[str, ...]) -> str:
    """What an app's `user_of` has said. Raises ConfigurationError where it names nobody."""
    if not isinstance(user, str) or not user.strip() or repaired(user) != user:
        raise refusal(f"what user_of returns for {namespace!r}", user, "the text of a user_id")
    return user


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
