"""Whatever is passed to whichever public call: it works, or the error is ours (or mem0's own) and says what to pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from mem0.exceptions import MemoryError as Mem0Error

from inferscale_memory import AsyncMemory, Chat, ConfigurationError, InferScaleError, Injection, Memory
from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.memory.old_chat_names import OldChatNames
from inferscale_memory.memory.session import AsyncChatSession, ChatSession
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, say
from tests.memory.watched import WatchedEngine


class Broken:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def nested_keys(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"AND": [value]}
    return value


BAD: dict[str, Any] = {
    "None": None,
    "-1": -1,
    "huge": 10**400,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "True": True,
    "decimal": Decimal("NaN"),
    "bytes": b"tea",
    "half": "\ud83d",
    "nul": "\0",
    "empty": "",
    "blank": " \n",
    "word": "tea",
    "object": object(),
    "broken": Broken(),
    "class": Broken,
    "[]": [],
    "[None]": [None],
    "[1]": [1],
    "['x']": ["x"],
    "[{}]": [{}],
    "{}": {},
    "{1: 2}": {1: 2},
    "{'x': object}": {"x": object()},
    "{'x': broken}": {"x": Broken()},
    "{'x': half}": {"x\ud83d": "y\ud83d"},
    "set": {1, "a"},
    "deep": nested(5000),
    "deep filter": nested_keys(5000),
    "deep value": {"x": nested(5000)},
    "array": np.zeros(3),
    "numpy": np.int64(2),
    "datetime64": np.datetime64("2024-01-01"),
    "message of a number": [{"role": "user", "content": 5}],
    "message of a role": [{"role": 5, "content": "x"}],
    "parts": [{"role": "user", "content": [None, 5, {"type": "text"}]}],
    "calls": [{"role": "assistant", "tool_calls": 5}, {"role": "user", "content": "x"}],
    "arguments": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9000}}]},
        {"role": "user", "content": "x"},
    ],
    "logic": {"OR": 5},
    "operator": {"user_id": "ada", "x": {"about": 1}},
    "memory": [{"id": "x", "memory": None}],
    "tool": [{"function": {"name": "f", "parameters": {"properties": nested(5000)}}}],
}
"""Values that somebody has passed somewhere; hardly any is right for more than an argument or two."""

KNOWN = (InferScaleError, ValueError, Mem0Error, TimeoutError)
"""Ours, and what mem0 raises for misuse. A UnicodeError is a ValueError too, but out of somebody's depths."""


def refused_or_done(call: Any, name: str) -> None:
    raised: Exception | None = None
    try:
        result = call()
        if isinstance(result, Iterator):
            list(result)
    except Exception as error:
        raised = error
    if raised is None:
        return
    where = f"{name}: {type(raised).__name__}: {raised}"
    if not isinstance(raised, KNOWN) or isinstance(raised, UnicodeError) or not str(raised):
        raise AssertionError(where) from raised


GOOD: dict[str, dict[str, Any]] = {
    "add": {"messages": "I like tea", "infer": False, **ADA},
    "search": {"query": "tea", "filters": ADA},
    "get_all": {"filters": ADA},
    "get": {"memory_id": "00000000-0000-0000-0000-000000000000"},
    "history": {"memory_id": "00000000-0000-0000-0000-000000000000"},
    "update": {"memory_id": "00000000-0000-0000-0000-000000000000", "text": "I like cake"},
    "delete": {"memory_id": "00000000-0000-0000-0000-000000000000"},
    "delete_all": {"user_id": "nobody"},
    "audit": {"text": "tea"},
    "flush": {"timeout": 60},
    "chat": {"messages": "What do I like?", "max_tokens": 1, **ADA},
    "prepare": {"messages": "What do I like?", **ADA},
    "session": ADA,
}
"""For every public call of a memory that takes arguments, such as work."""
WITHOUT_ARGUMENTS = {
    "close",
    "expire",
    "failed_adds",
    "reset",
    "retry_failed",
    "engine",
    "project",
    "from_config",
}
INNER = {"entity_store", "vector_store", "db", "llm"}
NOT_HERE = {("add", "llm"), ("add", "memory_type")}
"""Whatever is passed as `llm` is used; a memory of another type is mem0's to refuse."""


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [Memory, AsyncMemory])
def test_every_public_call_of_a_memory_is_in_the_table(kind: type) -> None:
    assert public(kind) - WITHOUT_ARGUMENTS - INNER == set(GOOD)


def arguments(call: Any) -> list[str]:
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, one in inspect.signature(call).parameters.items() if one.kind not in rest]


@pytest.fixture
def filled(open_face: OpenFace) -> Settled:
    memory = open_face()
    memory.add("I like tea", **ADA, infer=False)
    return memory


@pytest.mark.parametrize("method", sorted(GOOD))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_argument_of_a_memory_reaches_the_depths(filled: Settled, method: str) -> None:
    for name in arguments(getattr(filled.itself, method)):
        if (method, name) in NOT_HERE:
            continue
        for label, value in BAD.items():
            options = {**GOOD[method], name: value}
            refused_or_done(
                lambda options=options: getattr(filled, method)(**options), f"{method}({name}={label})"
            )
    assert filled.chat("What do I like?", **ADA, max_tokens=1).memories


@pytest.mark.parametrize("method", ["chat", "stream"])
def test_no_argument_of_a_session_reaches_the_depths(filled: Settled, method: str) -> None:
    session = filled.itself.session(**ADA)
    settled = Settled(session, filled._run)
    good = {"text": "What do I like?", "max_tokens": 1}
    assert public(ChatSession) == public(AsyncChatSession) == {"chat", "stream", "recompose", "is_of"}
    for name in arguments(getattr(session, method)):
        for label, value in BAD.items():
            options = {**good, name: value}
            refused_or_done(
                lambda options=options: getattr(settled, method)(**options), f"{method}({name}={label})"
            )
    assert settled.chat("What do I like?", max_tokens=1).text is not None


CHAT = {
    "recall": {"messages": "What do I like?", "ids": ADA},
    "is_current": {"memories": []},
    "prepare": {"messages": "What do I like?", "ids": ADA},
    "answer": {"prepared": None, "options": SamplingOptions(max_tokens=1)},
    "stream": {"prepared": None, "options": SamplingOptions(max_tokens=1)},
    "remember": {"messages": "I like tea", "ids": ADA, "infer": False},
    "forget": {"memory_ids": []},
    "fingerprint": {"ids": ADA},
}


@pytest.mark.parametrize("method", sorted(CHAT))
def test_no_argument_of_a_chat_reaches_the_depths(memory: Memory, method: str) -> None:
    say(memory, "I like tea")
    chat = Chat(memory=memory)
    calls = {name for name in public(Chat) if callable(getattr(Chat, name))} - public(OldChatNames)
    assert calls - {"close"} == {*CHAT, *(f"a{name}" for name in CHAT)}
    good = dict(CHAT[method])
    if "prepared" in good:
        good["prepared"] = chat.prepare("What do I like?", ADA, max_tokens=1)
    for name in arguments(getattr(chat, method)):
        for label, value in BAD.items():
            options = {**good, name: value}
            refused_or_done(
                lambda options=options: getattr(chat, method)(**options), f"{method}({name}={label})"
            )


def test_no_option_of_injection_reaches_the_depths() -> None:
    for field in fields(Injection):
        for label, value in BAD.items():
            refused_or_done(
                lambda field=field, value=value: Injection(**{field.name: value}), f"{field.name}={label}"
            )
    for label, value in BAD.items():
        refused_or_done(lambda value=value: Injection.read(value), label)


@pytest.mark.parametrize("name", ["injection", "folder", "blobs", "vector_store", "llm", "embedder", None])
def test_no_configuration_reaches_the_depths(
    open_memory: OpenMemory,
    engine: WatchedEngine,
    name: str | None,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    usual = {"None", "{}", "empty", "half", "nul"}  # a default, or a folder of that name
    for label, value in BAD.items():
        if label in usual or (name == "folder" and isinstance(value, str)):
            continue
        config = value if name is None else {"engine": engine, "folder": tmp_path / "m", name: value}
        with pytest.raises((ConfigurationError, ValueError)) as raised:
            Memory.from_config(config).close()
        assert not isinstance(raised.value, UnicodeError), label
    with pytest.raises(ConfigurationError, match="an empty one makes a local memory"):
        Memory.from_config(None)  # type: ignore[arg-type]


def test_an_error_names_argument_value_and_remedy(memory: Memory) -> None:
    for call, says in (
        (lambda: memory.add([None], **ADA), r"messages\[0\] must be a message such as .* not None"),
        (lambda: memory.add(["text"], **ADA), r"messages\[0\] must be a message"),
        (
            lambda: memory.add([{"role": "user", "content": 5}], **ADA),
            r"messages\[0\]\['content'\] must be text, or a list of parts, not 5",
        ),
        (lambda: memory.chat(None, **ADA), "messages must be a question"),  # type: ignore[arg-type,call-overload]
        (lambda: memory.chat("x", **ADA, max_tokens=None), "max_tokens must be a whole number"),  # type: ignore[arg-type,call-overload]
        (lambda: memory.chat("x", **ADA, k="3"), "k must be a whole number of at least 0, not '3'"),  # type: ignore[arg-type,call-overload]
        (lambda: memory.get_all(filters=ADA, top_k=None), "top_k must be a whole number"),
        (lambda: memory.add("x", **ADA, metadata={"a": nested(5000)}), "nested more than 64 levels"),
        (lambda: memory.add("x", **ADA, metadata={"a": object()}), r"metadata\['a'\] must be text, a number"),
        (lambda: memory.update("x", ""), "text must be text with words in it"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            call()


def test_good_values_of_other_libraries_are_taken(memory: Memory) -> None:
    say(memory, "I like tea", "I like cake")
    prepared = memory.prepare("What do I like?", **ADA, k=np.int64(1), max_tokens=np.int32(5))
    assert len(prepared.memories) == 1
    assert len(memory.get_all(filters=ADA, top_k=np.int64(1))["results"]) == 1
    assert memory.search("tea", filters=ADA, threshold=np.float32(0.0), top_k=np.uint8(1))["results"]
    assert Injection(top_k=np.int64(3)).top_k == 3


@pytest.mark.parametrize("blank", ["", " \n"])
def test_an_update_to_nothing_is_refused_and_changes_nothing(memory: Memory, blank: str) -> None:
    [name] = say(memory, "I like tea")
    for call in (
        lambda: memory.update(name, blank),
        lambda: memory.update(name, text=blank),
        lambda: memory.update(name, data=blank),
    ):
        with pytest.raises(ConfigurationError, match="words in it"):
            call()
    assert memory.get(name)["memory"] == "I like tea"


def test_blank_messages_become_no_memories(filled: Settled) -> None:
    said = [{"role": "user", "content": text} for text in ("", "I like cake", " \n")]
    assert [one["memory"] for one in filled.add(said, **ADA, infer=False)["results"]] == ["I like cake"]
    assert filled.add(" ", **ADA, infer=False) == {"results": []}
