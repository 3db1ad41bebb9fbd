"""One call of `add`: mem0's own, or what stands in for it where the model cannot do what mem0 asks of it.

What is more than a model takes at once is extracted in halves, in order, each with what mem0 puts beside it. The halves
are calls of their own among the failed ones before the first of them is made, so a crash in between loses nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from inferscale_memory.errors import StoreError
from inferscale_memory.extraction.engine_llm import EngineLLM
from inferscale_memory.extraction.instructions import TooMuchError
from inferscale_memory.extraction.recording_llm import Attempt, attempt
from inferscale_memory.facts.scope import Scope
from inferscale_memory.journal import NewTurn, Turn
from inferscale_memory.mem0_adapter.private import normalize_expiration_date
from inferscale_memory.memory.core import Core, spoken
from inferscale_memory.storage.sqlite import is_full, trouble
from inferscale_memory.write.failed_adds import (
    RETRIED,
    as_messages,
    middle,
    options_again,
    said_in_part,
    said_in_vain,
)
from inferscale_memory.write.writer import call_under_way

if TYPE_CHECKING:
    from inferscale_memory.memory.operations import Ids, Kind


async def said(
    kind: Kind,
    memory: Any,
    core: Core,
    messages: Any,
    turns: Sequence[NewTurn],
    ids: Ids,
    options: Mapping[str, Any],
) -> Any:
    """mem0's `add` of `messages`, whose turns are `turns`. Where its LLM fails, the call is kept, to be made again."""
    failed, scope = core.journal.failed_adds, Scope.of(ids)
    again: Sequence[Turn] = ()
    covered: Sequence[Sequence[Turn]] = ()
    if options.get("infer") and turns:
        again = await kind.wait.call(said_in_vain, core.journal, scope, turns)
        covered = await kind.wait.call(said_in_part, core.journal, scope, turns)
    saying = core.writes.saying(scope, turns, again)
    try:
        with attempt(memory) as made:
            return await _added(kind, memory, core, made, saying, messages, ids, options)
    except TooMuchError:
        halves = await kind.wait.call(_halved, core, made.turns)
        if not halves:
            raise
    finally:
        for part in covered:
            await kind.wait.call(failed.settle, part)
    results, error = await made_again(kind, memory, core, halves)
    if error is not None:
        raise error
    return {"results": results}


async def made_again(
    kind: Kind, memory: Any, core: Core, numbers: Sequence[int]
) -> tuple[list[Any], Exception | None]:
    """Make these kept calls again, one after the other. Those that fail once more stay; the others do not wait for
    them. Returns all results, and the first error."""
    results, first = list[Any](), None
    for number in numbers:
        done, error = await _again(kind, memory, core, number)
        results += done
        first = first or error
    return results, first


async def _again(kind: Kind, memory: Any, core: Core, number: int) -> tuple[list[Any], Exception | None]:
    failed = core.journal.failed_adds
    with failed.claimed(number) as mine, attempt(memory) as made:
        call = await kind.wait.call(failed.get, number) if mine else None
        if call is None:  # somebody else makes it again, or has
            return [], None
        turns = await kind.wait.call(core.journal.turns.get, call.turns)
        saying = core.writes.saying(Scope.of(call.ids), (), turns)
        options = options_again(call, turns)
        try:
            done = await _added(kind, memory, core, made, saying, as_messages(turns), call.ids, options)
            return done["results"], None
        except TooMuchError as error:
            failure: Exception = error
        except Exception as error:
            if made.failure is None:
                why = f"{type(error).__name__} where the facts were written"
                await kind.wait.call(failed.keep, "", turns, call.ids, call.options, why)
            return [], error
    halves = await kind.wait.call(_halved, core, turns)
    return await made_again(kind, memory, core, halves) if halves else ([], failure)


def _halved(core: Core, turns: Sequence[Turn]) -> list[int]:
    """The two calls that the kept call about `turns` becomes. Empty where it is about one turn, or gone."""
    if len(turns) < 2:
        return []
    return core.journal.failed_adds.split(turns[0], turns[middle(turns)])


async def _added(
    kind: Kind,
    memory: Any,
    core: Core,
    made: Attempt,
    saying: AbstractContextManager[None],
    messages: Any,
    ids: Ids,
    options: Mapping[str, Any],
) -> Any:
    """mem0's `add` within `saying`. Where the disk is full nothing of it is stored."""
    batch = None
    try:
        with told_plainly(memory):
            async with kind.wait.within(saying):
                batch = call_under_way()
                assert batch is not None
                made.turns = tuple(batch.turns)
                result = await _kept(kind, memory, core, made, messages, ids, options)
                if batch.full and await kind.wait.call(core.lacks, batch.expected):
                    raise StoreError("the disk is full: not all facts could be stored")
                return result
    except Exception as error:
        if batch is None or not (batch.full or is_full(error)):
            raise
        kept = core.journal.failed_adds.kept(batch.turns)
        await kind.wait.settle(core.undo, batch, said_before=kept)
        raise StoreError(
            f"the disk of {core.folder} is full, and nothing of this call is stored: free some room, or delete "
            "memories, which needs none"
        ) from error


async def _kept(
    kind: Kind, memory: Any, core: Core, made: Attempt, messages: Any, ids: Ids, options: Mapping[str, Any]
) -> Any:
    """mem0's `add`. Where its LLM fails it the call is kept, to be made again."""
    failed = core.journal.failed_adds
    try:
        result = await _written(kind, memory, made, messages, ids, options)
    except Exception as error:
        if made.failure is None:
            raise
        scope = Scope.of(ids)
        kept = {name: value for name, value in options.items() if name in RETRIED}
        if kept.get("expiration_date") is not None:
            kept["expiration_date"] = normalize_expiration_date(kept["expiration_date"])
        await kind.wait.call(failed.keep, scope.key, made.turns, scope.ids, kept, made.reason)
        seen = made.error(error)
        if seen is error:
            raise
        raise seen from (None if seen is made.failure else made.failure)
    if options.get("infer"):
        await kind.wait.call(failed.settle, made.turns)
        await kind.wait.call(core.writes.said_again, made.texts)
    return result


async def _written(
    kind: Kind, memory: Any, made: Attempt, messages: Any, ids: Ids, options: Mapping[str, Any]
) -> Any:
    """mem0's `add`. Words out of which the engine's model can draw nothing are kept as they are."""

    async def word_for_word() -> Any:
        how = {**options, "infer": False}
        return await kind.wait.result(kind.mem0.add(memory, spoken(messages), **ids, **how))

    procedure = options.get("memory_type") is not None and ids.get("agent_id") is not None
    extracting = options.get("infer") and not procedure
    if extracting and not await kind.wait.call(_extracts, memory):
        return await word_for_word()
    result = await kind.wait.result(kind.mem0.add(memory, messages, **ids, **options))
    return await word_for_word() if made.copied else result


def _extracts(memory: Any) -> bool:
    """Whether the LLM of `memory` is able to extract. Only of our own engine that can be known."""
    llm = vars(memory).get("llm")
    return not isinstance(llm, EngineLLM) or llm.extracts


@contextmanager
def told_plainly(memory: Any) -> Iterator[None]:
    """Errors of mem0's history as ours."""
    try:
        yield
    except sqlite3.ProgrammingError:  # it is closed
        raise
    except sqlite3.Error as error:
        raise trouble(memory.config.history_db_path, error) from error
