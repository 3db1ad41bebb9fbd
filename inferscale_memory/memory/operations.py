"""The body of every method, once, for both faces.

A body is a coroutine that is told which face it serves. Facts are written by mem0's own methods alone, called
on mem0's own classes: a body only marks where a call begins and ends, and the mirror on the vector store sees
the rest. An instance without a core (its store is a mock, or it was made without `__init__`) is mem0's
business: then a body must do nothing but call mem0.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import takewhile
from time import perf_counter
from typing import Any

from mem0.exceptions import ValidationError as Mem0ValidationError
from mem0.memory.storage import SQLiteManager

from inferscale_memory.arguments import as_json, refusal
from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.runner import Waiting
from inferscale_memory.errors import ConfigurationError, InferScaleError
from inferscale_memory.facts.expiry import MOMENT, hiding_expired, read_expiration
from inferscale_memory.facts.pinned import LISTED
from inferscale_memory.facts.repeats import once
from inferscale_memory.facts.scope import Scope
from inferscale_memory.facts.search_result import SearchResult
from inferscale_memory.facts.text import read_date
from inferscale_memory.forget.forget import DELETE_ALL, RESET
from inferscale_memory.index.collection import Collection
from inferscale_memory.journal import Intent
from inferscale_memory.mem0_adapter.private import UNSET, build_filters_and_metadata
from inferscale_memory.memory import adding
from inferscale_memory.memory.audit import Audit, audited, files_of
from inferscale_memory.memory.core import new_turns
from inferscale_memory.memory.instance import behind as behind
from inferscale_memory.memory.instance import core_of, never_had_core
from inferscale_memory.prompt import Message
from inferscale_memory.recall.prepare import Messages, Result, conversation, question
from inferscale_memory.recall.results import Prepared, ReplyChunk
from inferscale_memory.write.encoder import Progress

Ids = Mapping[str, str | None]
Filters = Mapping[str, Any]

_FURTHER, _MOST_ROWS = 4, 4096
"""Where memories repeat each other, so many times more are searched for, up to so many."""

# Whether the search under way is for a prompt. A context variable: every task and thread has its own.
_recalling: ContextVar[bool] = ContextVar("inferscale_recall", default=False)


@dataclass(frozen=True, slots=True)
class Kind:
    """Which face.

    Attributes:
        mem0: mem0's class of it, as it was when ours was made: its name may stand for ours later.
        wait: how it waits.
        stream: the answer piece by piece, as this face iterates.
    """

    mem0: Any
    wait: Waiting
    stream: Callable[..., Iterator[ReplyChunk] | AsyncIterator[ReplyChunk]]


# -- writing -------------------------------------------------------------------------------------------------


async def add(
    kind: Kind,
    memory: Any,
    messages: Any,
    ids: Ids,
    metadata: dict[str, Any] | None,
    timestamp: Any,
    **mem0s_own: Any,
) -> Any:
    core = core_of(memory)
    if core is None:
        return await kind.wait.result(
            kind.mem0.add(memory, messages, metadata=metadata, timestamp=timestamp, **ids, **mem0s_own)
        )
    when = _moment(timestamp)
    metadata, mem0s_own["expiration_date"] = _lasting(metadata, mem0s_own.get("expiration_date"))
    if not mem0s_own.get("infer"):
        messages = _worded(messages)
    turns = []
    if isinstance(messages, str | list):  # mem0 refuses what is none
        build_filters_and_metadata(**ids)  # refuses a bad scope before anything is logged
        turns = new_turns(messages, metadata, when)
    if when is not None:
        metadata = {"created_at": when.isoformat(), **(metadata or {})}
    core.check_writable()
    core.reserve.check()
    return await adding.said(kind, memory, core, messages, turns, ids, {"metadata": metadata, **mem0s_own})


async def retry_failed(kind: Kind, memory: Any) -> dict[str, list[Any]]:
    core = behind(memory)
    failed = core.journal.failed_adds
    kept = await kind.wait.call(failed.all)
    results, _ = await adding.made_again(kind, memory, core, [call.number for call in kept])
    return {"results": results, "failed": await kind.wait.call(failed.all)}


async def change(
    kind: Kind, memory: Any, method: str, *args: Any, whole: Intent | None = None, **options: Any
) -> Any:
    """mem0's `update`, `delete`, `delete_all` or `reset`. What they make forgotten is gone everywhere when they
    end. `whole` is what the last two are."""
    core = core_of(memory)
    body = getattr(kind.mem0, method)
    if core is None:
        return await kind.wait.result(body(memory, *args, **options))
    core.check_writable()
    if method == "update":
        core.reserve.check()
    with core.reserve.given(), adding.told_plainly(memory):
        async with kind.wait.within(core.writes.collected(whole)):
            return await kind.wait.result(body(memory, *args, **options))


async def update(
    kind: Kind,
    memory: Any,
    memory_id: str,
    text: str | None,
    metadata: dict[str, Any] | None,
    expiration_date: Any,
    data: str | None,
) -> Any:
    core = core_of(memory)
    if core is not None and expiration_date is not UNSET:
        metadata, expiration_date = _lasting(metadata, expiration_date)
        held = await kind.wait.call(core.held, memory_id) or {}
        if MOMENT in held and MOMENT not in (metadata or {}):  # of the end it had before
            metadata = {**(metadata or {}), MOMENT: None}
    return await change(kind, memory, "update", memory_id, text, metadata, expiration_date, data)


def _lasting(metadata: dict[str, Any] | None, expiration: Any) -> tuple[dict[str, Any] | None, Any]:
    """Metadata with the instant that mem0 would cut to a day, and what is left for mem0."""
    day, moment = read_expiration(expiration)
    return (metadata if moment is None else {**(metadata or {}), MOMENT: moment}), day


async def delete_all(kind: Kind, memory: Any, ids: Ids) -> Any:
    core = core_of(memory)
    try:
        scope = Scope.of(build_filters_and_metadata(**ids)[1])
    except (ValueError, Mem0ValidationError):  # mem0 says so itself
        core = None
    if core is None:
        return await change(kind, memory, "delete_all", **dict[str, Any](ids))
    core.check_writable()
    whole = Intent(DELETE_ALL, scope=scope.key, facts=await kind.wait.call(core.ids, scope))
    with core.reserve.given(), adding.told_plainly(memory):
        async with kind.wait.within(core.writes.collected(whole)):
            if _deletes_as_mem0(kind, memory) and hasattr(memory.vector_store, "delete_many"):
                await kind.wait.call(core.delete_many, scope, memory.db)
            return await kind.wait.result(kind.mem0.delete_all(memory, **ids))


def _deletes_as_mem0(kind: Kind, memory: Any) -> bool:
    """Whether nobody has put something else in the place of how mem0 deletes one fact."""
    own = getattr(memory._delete_memory, "__func__", None)
    return own is kind.mem0._delete_memory and isinstance(memory.db, SQLiteManager)


async def reset(kind: Kind, memory: Any) -> Any:
    """mem0's `reset`. Its sync one leaves the entities when it has not opened their store before, and its async one
    closes an embedded Qdrant before it turns to them, so they go first."""
    core = core_of(memory)
    if core is None:
        return await change(kind, memory, "reset")
    core.check_writable()
    whole = Intent(RESET, facts=await kind.wait.call(core.ids, Scope()))
    await kind.wait.call(core.entities.clear)
    memory._entity_store = None
    return await change(kind, memory, "reset", whole=whole)


async def expire(kind: Kind, memory: Any) -> int:
    expired = await kind.wait.call(behind(memory).expired)
    for number, fact in enumerate(expired):
        try:
            await change(kind, memory, "delete", fact)
        except InferScaleError:
            raise
        except ValueError:  # somebody else was quicker
            expired[number] = ""
    return len([fact for fact in expired if fact])


async def flush(kind: Kind, memory: Any, progress: Progress | None, timeout: float | None) -> None:
    core = behind(memory)
    await kind.wait.call(core.writes.expire)
    await kind.wait.call(core.outbox.retry)
    await kind.wait.call(core.encoder.flush, progress, timeout)


async def audit(kind: Kind, memory: Any, text: str) -> Audit:
    core = behind(memory)
    return await kind.wait.call(audited, core, files_of(core.folder, memory.config), text)


# -- asking --------------------------------------------------------------------------------------------------


async def chat(
    kind: Kind,
    memory: Any,
    messages: Messages,
    ids: Ids,
    *,
    k: int | None,
    stream: bool,
    max_tokens: int,
    inject: bool,
    session: Any,
    filters: Filters | None,
    options: SamplingOptions | None,
    memories: Sequence[Result] | None,
    tools: Sequence[Any] | None,
    tool_choice: str | None,
) -> Any:
    if never_had_core(memory):
        return await kind.wait.result(kind.mem0.chat(memory, messages))  # which mem0 has not
    called = perf_counter()
    options = replace(options or SamplingOptions(), max_tokens=max_tokens)
    if session is not None:
        _refuse_other(session, memory, ids)
        how = {
            "k": k,
            "inject": inject,
            "filters": filters,
            "options": options,
            "memories": memories,
            "tools": tools,
            "tool_choice": tool_choice,
        }
        said = _of_turn(conversation(messages))
        return session.stream(said, **how) if stream else await kind.wait.result(session.chat(said, **how))
    prepared = await prepare(
        kind,
        memory,
        messages,
        ids,
        k=k,
        max_tokens=max_tokens,
        filters=filters,
        memories=memories,
        tools=tools,
        tool_choice=tool_choice,
    )
    answers = behind(memory).answers
    if stream:
        return kind.stream(answers, prepared, options, inject=inject, called=called)
    return await answers.answer(kind.wait, prepared, options, inject=inject, called=called)


def _refuse_other(session: Any, memory: Any, ids: Ids) -> None:
    """A session of another memory, or ids beside one, which has its own."""
    if not isinstance(session, memory._session) or not session.is_of(behind(memory)):
        raise refusal("session", session, "what `session()` of this memory returned")
    given = [name for name, value in ids.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"a question of a session takes no {', '.join(given)}: give ids to `session()`"
        )


def _of_turn(messages: Sequence[Message]) -> Messages:
    """What is new to a session in `messages`: the question at their end, or the results of tools."""
    results = list(takewhile(lambda message: message.get("role") == "tool", reversed(messages)))
    return results[::-1] or question(messages)


async def prepare(
    kind: Kind,
    memory: Any,
    messages: Messages,
    ids: Ids,
    *,
    k: int | None,
    max_tokens: int,
    filters: Filters | None,
    memories: Sequence[Result] | None,
    tools: Sequence[Any] | None,
    tool_choice: str | None,
) -> Prepared:
    core = behind(memory)
    said = conversation(messages)
    text = question(said)
    started = perf_counter()
    if memories is None:
        memories = await search(kind, memory, text, ids, k, filters)
    search_s = perf_counter() - started
    return await kind.wait.call(
        core.recall.prepare,
        said,
        memories,
        Scope.of(ids),
        max_tokens=max_tokens,
        search_s=search_s,
        tools=tools,
        tool_choice=tool_choice,
    )


async def search(
    kind: Kind, memory: Any, text: str, ids: Ids, k: int | None, filters: Filters | None
) -> Sequence[Result]:
    """mem0's own search for a prompt, without its threshold: k memories come if there are k. What has expired is put
    away first, so that a conversation that shows it is composed anew. What several memories say comes once.

    Where the memory is taken whole while it fits, all of it comes, unless the call says which or how many. Pinned
    memories come besides the k, in front; without a scope there are none."""
    core = behind(memory)
    await kind.wait.call(core.writes.expire)
    wanted = {**(filters or {}), **{name: value for name, value in ids.items() if value is not None}}
    if core.whole.budget and k is None and not filters and Scope.of(ids).ids:
        # mem0 lists a number of rows and leaves out what of these has expired: there may be more.
        listing = kind.mem0.get_all(memory, filters=wanted, top_k=core.whole.most_rows, show_expired=True)
        listed = (await kind.wait.result(listing))["results"]
        everything = await kind.wait.call(core.whole.in_order, listed)
        if everything is not None:
            return everything
    pinned = [] if k == 0 else await _pinned(kind, memory, wanted, ids)
    k = core.injection.top_k if k is None else k
    if pinned and not k:
        return pinned
    names, asked = {row["id"] for row in pinned}, k + len(pinned)
    while True:
        nearest = await _nearest(kind, memory, text, wanted, asked)
        # Those that are pinned may be among the nearest, and the k come besides.
        found = once([*pinned, *(row for row in nearest if row["id"] not in names)])
        if len(found) >= k + len(pinned) or len(nearest) < asked or asked >= _MOST_ROWS:
            return found[: k + len(pinned)]
        asked *= _FURTHER  # repeats have left places free


async def _pinned(kind: Kind, memory: Any, wanted: Filters, ids: Ids) -> list[SearchResult]:
    """The memories that stand in front, of those that pass the filters `wanted`."""
    pinned = behind(memory).pinned
    filters = pinned.filters(wanted)
    if filters is None or not Scope.of(ids).ids:
        return []
    # mem0's search takes them as its users write them, its listing not.
    if memory._has_advanced_operators(filters):
        filters = memory._process_metadata_filters(filters)
    listing = kind.mem0.get_all(memory, filters=filters, top_k=LISTED)
    listed = (await kind.wait.result(listing))["results"]
    return await kind.wait.call(pinned.in_order, listed)


async def _nearest(kind: Kind, memory: Any, text: str, wanted: dict[str, Any], k: int) -> Sequence[Result]:
    """The k nearest memories that pass the filters `wanted`."""
    token = _recalling.set(True)
    try:
        found = await kind.wait.result(memory.search(text, filters=wanted, top_k=k, threshold=0.0))
        results: Sequence[Result] = found["results"]
        return results
    finally:
        _recalling.reset(token)


def threshold_of_search(threshold: float | None) -> float | None:
    """What mem0's search is to cut off. Cosines may be negative, and mem0 takes no threshold under 0."""
    return -1.0 if _recalling.get() else threshold


def hiding(memory: Any, show_expired: bool) -> tuple[AbstractContextManager[None], bool]:
    """Within the block the store itself leaves out what has expired, unless that is to be shown; and what mem0 is to be
    told, which counts days alone."""
    if core_of(memory) is None:
        return nullcontext(), show_expired
    return hiding_expired(not show_expired), True


# -- lifetime ------------------------------------------------------------------------------------------------


def recover(memory: Any) -> None:
    """Finish what a crash has cut off, before anybody sees the memory."""
    core = core_of(memory)
    if core is not None:
        core.recover()


def close(kind: Kind, memory: Any) -> None:
    if never_had_core(memory):
        kind.mem0.close(memory)
        return
    core = vars(memory).get("_core")
    if core is not None:
        core.encoder.stop()
        memory._core = None  # from now on every call raises ClosedError
        core.close()
        close_stores(memory)
        history = vars(memory).get("db")
        if history is not None:
            history.close()
            vars(memory)["db"] = None  # as mem0 leaves it


def close_stores(memory: Any) -> None:
    """mem0 leaves both open, and an embedded Qdrant locked."""
    for name in ("vector_store", "_entity_store"):
        store = memory.__dict__.get(name)
        if getattr(store, "is_local", False) or isinstance(getattr(store, "client", None), Collection):
            store.client.close()


def _worded(messages: Any) -> Any:
    """Messages that are kept word for word, without the blank ones: they would become blank memories."""
    if isinstance(messages, str):
        return messages if messages.strip() else []
    if not isinstance(messages, list):
        return messages
    return [message for message in messages if not _is_blank(message.get("content"))]


def _is_blank(content: Any) -> bool:
    return isinstance(content, str) and not content.strip()


def _moment(timestamp: Any) -> Any:
    """`timestamp` as a datetime. Raises ConfigurationError when it is none: a wrong date would go unnoticed."""
    if timestamp is None or isinstance(timestamp, datetime):
        return timestamp
    expected = "a moment: a datetime, seconds since the epoch, or ISO text"
    try:
        read = as_json(timestamp, "timestamp")
        when = None if isinstance(read, list | dict) else read_date(read)
    except ConfigurationError as error:
        raise refusal("timestamp", timestamp, expected) from error
    if when is None:
        raise refusal("timestamp", timestamp, expected)
    return when
