"""Every public call with arguments that cannot be: an error of ours or of the framework, that names what was wrong;
half an emoji in a text costs no conversation, and "*" is a name like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_inferscale import (
    ChatInferScale,
    InferScaleMemoryMiddleware,
    InferScaleRetriever,
    InferScaleStore,
)
from langgraph.store.base import GetOp, InvalidNamespaceError, PutOp, SearchOp
from pydantic import ValidationError

from inferscale_memory import Memory
from inferscale_memory.errors import InferScaleError
from integrations.langchain.tests.saying import FACTS, SECRET, recalled
from tests.memory.watched import WatchedEngine

EXPECTED = (InferScaleError, ValidationError, InvalidNamespaceError)
HALF = "\ud83d"
PLACE = ("notes", "ada")
ITEM = {"text": "A cat called Miso"}


def deep(levels: int = 5000) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for _ in range(levels):
        nested = {"a": nested}
    return nested


def deep_list(levels: int = 5000) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


NOTHINGS: dict[str, Any] = {
    "nothing": None,
    "a number": 5,
    "a negative": -1,
    "a flag": True,
    "a fraction": 1.5,
    "no number": float("nan"),
    "empty": "",
    "blank": " ",
    "half an emoji": HALF,
    "bytes": b"x",
    "a list": [],
    "a list of nothing": [None],
    "a dictionary": {"a": 1},
    "an object": object(),
    "deep": deep(),
    "deep lists": deep_list(),
    "a text": "3",
    "a large number": 2**70,
}
NAMES = "a number, a negative, a large number, blank, a text"  # what a name may be
CASES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    # what is called, and the values it takes
    "ChatInferScale(memory)": (lambda m, v: ChatInferScale(memory=v), "nothing, a dictionary, deep"),
    "ChatInferScale(user_id)": (
        lambda m, v: ChatInferScale(user_id=v),
        "nothing, a number, a negative, a large number, a text",
    ),
    "ChatInferScale(scope_keys)": (lambda m, v: ChatInferScale(scope_keys=v), ""),
    "ChatInferScale(k)": (
        lambda m, v: ChatInferScale(k=v),
        "nothing, a number, a flag, a text, a large number",
    ),
    "ChatInferScale(stop)": (lambda m, v: ChatInferScale(stop=v), "nothing, a list"),
    "InferScaleRetriever(memory)": (
        lambda m, v: InferScaleRetriever(memory=v),
        "a dictionary, deep",
    ),
    "InferScaleRetriever(user_id)": (
        lambda m, v: InferScaleRetriever(memory=m, user_id=v),
        "nothing, a number, a negative, a large number, a text",
    ),
    "InferScaleMemoryMiddleware(memory)": (lambda m, v: InferScaleMemoryMiddleware(v), ""),
    "InferScaleMemoryMiddleware(user_id)": (
        lambda m, v: InferScaleMemoryMiddleware(m, user_id=v),
        "nothing, a number, a negative, a large number, a text",
    ),
    "InferScaleMemoryMiddleware(scope_keys)": (lambda m, v: InferScaleMemoryMiddleware(m, scope_keys=v), ""),
    "InferScaleMemoryMiddleware(k)": (
        lambda m, v: InferScaleMemoryMiddleware(m, k=v),
        "nothing, a number, a large number",
    ),
    "InferScaleMemoryMiddleware(filters)": (
        lambda m, v: InferScaleMemoryMiddleware(m, filters=v),
        "nothing, a dictionary",
    ),
    "InferScaleMemoryMiddleware(write)": (lambda m, v: InferScaleMemoryMiddleware(m, write=v), "a flag"),
    "InferScaleMemoryMiddleware(infer)": (lambda m, v: InferScaleMemoryMiddleware(m, infer=v), "a flag"),
    "InferScaleMemoryMiddleware(recall_timeout)": (
        lambda m, v: InferScaleMemoryMiddleware(m, recall_timeout=v),
        "a number, a fraction, a large number",
    ),
    "InferScaleMemoryMiddleware(heading)": (
        lambda m, v: InferScaleMemoryMiddleware(m, heading=v),
        "empty, blank, half an emoji, a text",
    ),
    "InferScaleStore(memory)": (lambda m, v: InferScaleStore(v), ""),
    "InferScaleStore(index)": (lambda m, v: InferScaleStore(m, index=v), "nothing"),
    "InferScaleStore(ttl)": (lambda m, v: InferScaleStore(m, ttl=v), "nothing"),
    "InferScaleStore(user_of)": (lambda m, v: InferScaleStore(m, user_of=v), "nothing"),
    "user_of returns": (
        lambda m, v: InferScaleStore(m, user_of=lambda labels: v).put(PLACE, str(id(v)), ITEM),
        "a text",
    ),
    "store.put(namespace)": (lambda m, v: InferScaleStore(m).put(v, "1", ITEM), ""),
    "store.put(label)": (lambda m, v: InferScaleStore(m).put((v,), "1", ITEM), "blank, a text"),
    "store.put(key)": (
        lambda m, v: InferScaleStore(m).put(PLACE, v, ITEM),
        NAMES + ", empty",
    ),
    "store.put(value)": (lambda m, v: InferScaleStore(m).put(PLACE, "1", v), "nothing, a dictionary"),
    "store.put(a value in it)": (
        lambda m, v: InferScaleStore(m).put(PLACE, "1", {"x": v}),
        "nothing, a number, a negative, a flag, a fraction, no number, empty, blank, half an emoji, a list, "
        "a list of nothing, a dictionary, a text, a large number",
    ),
    "store.put(index)": (lambda m, v: InferScaleStore(m).put(PLACE, "1", ITEM, index=v), "nothing, a list"),
    "store.put(ttl)": (
        lambda m, v: InferScaleStore(m).put(PLACE, "1", ITEM, ttl=v),
        "nothing, a number, a fraction, a large number",
    ),
    "store.get(namespace)": (lambda m, v: InferScaleStore(m).get(v, "1"), "a list"),
    "store.get(key)": (lambda m, v: InferScaleStore(m).get(PLACE, v), NAMES + ", empty"),
    "store.aget(key)": (
        lambda m, v: asyncio.run(_awaited(lambda: InferScaleStore(m).aget(PLACE, v))),
        NAMES + ", empty",
    ),
    "store.delete(key)": (lambda m, v: InferScaleStore(m).delete(PLACE, v), NAMES + ", empty"),
    "store.search(prefix)": (lambda m, v: InferScaleStore(m).search(v), "a list"),
    "store.search(query)": (
        lambda m, v: InferScaleStore(m).search(PLACE, query=v),
        "nothing, empty, blank, half an emoji, a text",
    ),
    "store.search(filter)": (
        lambda m, v: InferScaleStore(m).search(PLACE, filter=v),
        "nothing, a dictionary",
    ),
    "store.search(limit)": (
        lambda m, v: InferScaleStore(m).search(PLACE, limit=v),
        "a number, a large number",
    ),
    "store.search(offset)": (
        lambda m, v: InferScaleStore(m).search(PLACE, offset=v, query="cat"),
        "a number, a large number",
    ),
    "store.list_namespaces(prefix)": (
        lambda m, v: InferScaleStore(m).list_namespaces(prefix=v),
        "nothing, a list",
    ),
    "store.list_namespaces(max_depth)": (
        lambda m, v: InferScaleStore(m).list_namespaces(max_depth=v),
        "nothing, a number, a large number",
    ),
    "store.list_namespaces(limit)": (
        lambda m, v: InferScaleStore(m).list_namespaces(limit=v),
        "a number, a large number",
    ),
    "store.batch": (
        lambda m, v: InferScaleStore(m).batch(v),
        "a list",
    ),
    "store.batch(GetOp)": (lambda m, v: InferScaleStore(m).batch([GetOp(PLACE, v)]), NAMES + ", empty"),
    "store.batch(PutOp)": (lambda m, v: InferScaleStore(m).batch([PutOp(v, "1", ITEM)]), ""),
    "store.batch(SearchOp)": (
        lambda m, v: InferScaleStore(m).batch([SearchOp(PLACE, limit=v)]),
        "a number, a large number",
    ),
    "store.user_id": (lambda m, v: InferScaleStore(m).user_id(v), ""),
    "model.invoke(user_id)": (
        lambda m, v: ChatInferScale(memory=m, max_tokens=1, user_id="ada").invoke("Cat?", user_id=v),
        "nothing, a number, a negative, a large number, a text",
    ),
    "model.invoke(configurable)": (
        lambda m, v: ChatInferScale(memory=m, max_tokens=1, user_id="ada").invoke(
            "Cat?", {"configurable": {"user_id": v}}
        ),
        "nothing, a number, a negative, a large number, a text",
    ),
    "model.invoke(k)": (
        lambda m, v: ChatInferScale(memory=m, max_tokens=1, user_id="ada").invoke("Cat?", k=v),
        "nothing, a number",
    ),
    "model.invoke(scope)": (
        lambda m, v: ChatInferScale(memory=m, max_tokens=1, user_id="ada").invoke("Cat?", scope=v),
        "a dictionary, deep",
    ),
    "model.invoke(memories)": (
        lambda m, v: ChatInferScale(memory=m, max_tokens=1, user_id="ada").invoke("Cat?", memories=v),
        "nothing, a list",
    ),
    "model.invoke(stop)": (
        lambda m, v: ChatInferScale(memory=m, max_tokens=1, user_id="ada").invoke("Cat?", stop=v),
        "nothing, a list, blank, half an emoji, a text, empty",
    ),
    "model.invoke(response_format)": (
        lambda m, v: ChatInferScale(memory=m, max_tokens=1, user_id="ada").invoke("Cat?", response_format=v),
        "nothing",
    ),
    "model.bind_tools": (lambda m, v: ChatInferScale(memory=m).bind_tools(v), "a list"),
    "model.bind_tools(tool_choice)": (
        lambda m, v: ChatInferScale(memory=m).bind_tools(
            [{"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}],
            tool_choice=v,
        ),
        "nothing, a flag",
    ),
    "model.get_num_tokens": (
        lambda m, v: ChatInferScale(memory=m).get_num_tokens(v),
        "empty, blank, half an emoji, a text",
    ),
    "retriever.invoke": (
        lambda m, v: InferScaleRetriever(memory=m, user_id="ada").invoke(v),
        "half an emoji, a text",
    ),
    "retriever.invoke(k)": (
        lambda m, v: InferScaleRetriever(memory=m, user_id="ada").invoke("Cat?", k=v),
        "nothing, a number",
    ),
    "retriever.invoke(user_id)": (
        lambda m, v: InferScaleRetriever(memory=m, user_id="ada").invoke("Cat?", user_id=v),
        "nothing, a number, a negative, a large number, a text",
    ),
}
EITHER_WAY = {  # another part of the library decides these
    "model.invoke(k)": ["a large number", "a flag"],
    "retriever.invoke(k)": ["a large number"],
    "model.invoke(scope)": ["a dictionary", "deep"],
    "model.invoke(stop)": ["empty"],
    "ChatInferScale(memory)": ["a dictionary", "deep"],
    "InferScaleRetriever(memory)": ["a dictionary", "deep"],
    "store.search(limit)": [],
}


async def _awaited(call: Callable[[], Any]) -> Any:
    return await call()


def _kind(call: str) -> str:
    return call.split("(")[0].split(".")[0]


@pytest.mark.parametrize("kind", dict.fromkeys(_kind(call) for call in CASES))
def test_what_cannot_be_is_an_error_that_says_so(memory: Memory, kind: str) -> None:
    wrong = []
    for call, (work, taken) in CASES.items():
        if _kind(call) != kind:
            continue
        for name, value in NOTHINGS.items():
            if name in EITHER_WAY.get(call, ()):
                continue
            refused = _refused(lambda work=work, value=value: work(memory, value))
            if refused is (name in taken.split(", ")):
                wrong.append((call, name, "refused" if refused else "taken"))
    assert not wrong


def _refused(work: Callable[[], Any]) -> bool:
    """Whether `work` raises an error that says what is wrong. Any other error is the test's."""
    try:
        work()
    except EXPECTED as error:
        return bool(str(error).strip())
    except ValueError as error:  # mem0's own, and the frameworks'
        if type(error) is not ValueError or len(str(error)) < 10:
            raise
        return True
    return False


# -- half an emoji -----------------------------------------------------------------------------------------------


def test_half_an_emoji_in_a_message_or_a_call_is_answered(
    model: ChatInferScale, engine: WatchedEngine
) -> None:
    call = AIMessage("", tool_calls=[{"name": "look", "args": {"at": f"a {HALF}", HALF: 1}, "id": "1"}])
    messages = [
        SystemMessage(f"Be {HALF}"),
        HumanMessage(f"Look {HALF}"),
        call,
        ToolMessage(HALF, tool_call_id="1"),
    ]
    for each in (model, ChatInferScale(engine=engine, max_tokens=2)):
        assert each.invoke(messages, {"configurable": {"user_id": "ada"}}).content
        assert "\ufffd" in model.chat.engine.tokenizer.decode(engine.asked[-1][0].ids)


def test_half_an_emoji_in_an_item_is_stored_as_a_replacement_character(memory: Memory) -> None:
    store = InferScaleStore(memory)
    store.put(PLACE, "1", {"text": f"cat {HALF}", f"{HALF}": [HALF]})
    item = store.get(PLACE, "1")
    assert item is not None
    assert item.value == {"text": "cat \ufffd", "\ufffd": ["\ufffd"]}
    assert [found.key for found in store.search(PLACE, query=f"cat {HALF}")] == ["1"]


# -- "*" is a name -----------------------------------------------------------------------------------------------


def test_a_star_names_one_user_and_nobody_else(filled: Memory) -> None:
    filled.add("I am called star", user_id="*", infer=False)
    own = {"I am called star"}
    model = ChatInferScale(memory=filled, max_tokens=2, user_id="*")
    assert recalled(model.invoke("Who am I?")) == own
    assert recalled(ChatInferScale(memory=filled, max_tokens=2).invoke("Who am I?", user_id="*")) == own
    retriever = InferScaleRetriever(memory=filled, user_id="*")
    assert {document.page_content for document in retriever.invoke("Who am I?")} == own
    middleware = InferScaleMemoryMiddleware(filled, user_id="*")
    assert {found["memory"] for found in middleware._chat.recall("Who am I?", {"user_id": "*"})} == own


def test_a_star_in_a_namespace_or_key_is_that_label_alone(filled: Memory) -> None:
    store = InferScaleStore(filled, user_of=lambda labels: labels[1])
    store.put(PLACE, "1", {"text": FACTS[0]})
    store.put(("notes", "*"), "*", {"text": "I am called star"})
    assert [item.key for item in store.search(("notes", "*"))] == ["*"]
    assert store.get(PLACE, "*") is None
    store.delete(("notes", "*"), "*")
    assert store.get(PLACE, "1") is not None
    assert SECRET in {fact["memory"] for fact in filled.get_all(filters={"user_id": "ben"})["results"]}


# -- after close -------------------------------------------------------------------------------------------------


def test_after_the_memory_is_closed_every_call_says_that_it_is(memory: Memory) -> None:
    model = ChatInferScale(memory=memory, user_id="ada", max_tokens=1)
    retriever = InferScaleRetriever(memory=memory, user_id="ada")
    store = InferScaleStore(memory)
    store.put(PLACE, "1", ITEM)
    memory.close()
    calls: list[Callable[[], Any]] = [
        lambda: model.invoke("Cat?"),
        lambda: list(model.stream("Cat?")),
        lambda: asyncio.run(model.ainvoke("Cat?")),
        lambda: model.get_num_tokens("Cat?"),
        lambda: retriever.invoke("Cat?"),
        lambda: store.get(PLACE, "1"),
        lambda: store.put(PLACE, "1", ITEM),
        lambda: store.put(PLACE, "2", ITEM),
        lambda: store.delete(PLACE, "1"),
        lambda: store.search(PLACE, query="cat"),
        lambda: store.list_namespaces(),
        lambda: store.sweep_ttl(),
        lambda: asyncio.run(store.asearch(PLACE)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
