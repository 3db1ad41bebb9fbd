"""The store: what is stored can be injected, what is deleted is gone, and nothing crosses a namespace."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import sleep, time
from typing import Any, Literal

import langchain_inferscale.expiry as expiry
import langchain_inferscale.stores as stores
import pytest
from langchain.agents import create_agent
from langchain.tools import ToolRuntime
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_inferscale import ChatInferScale, InferScaleStore
from langgraph.func import entrypoint
from langgraph.store.base import InvalidNamespaceError, PutOp
from pydantic import BaseModel

from inferscale_memory import Chat, Memory
from inferscale_memory.errors import ConfigurationError, StoreError
from integrations.langchain.tests.saying import forced, injected, recalled
from tests.memory.watched import WatchedEngine

ADA, BEN = ("memories", "ada"), ("memories", "ben")


class Clock:
    def __init__(self) -> None:
        self.now = time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that goes when it is told to."""
    clock = Clock()
    monkeypatch.setattr(stores, "time", clock)
    monkeypatch.setattr(expiry, "time", clock)
    return clock


@pytest.fixture
def store(memory: Memory) -> InferScaleStore:
    return InferScaleStore(memory, index={"fields": ["text"]})


# -- what is stored is a memory ----------------------------------------------------------------------------------


def test_what_is_stored_is_recalled_and_injected(memory: Memory, store: InferScaleStore) -> None:
    store.put(ADA, "cat", {"text": "My cat is called Miso", "since": 2020})
    store.put(ADA, "safe", {"text": "4711"}, index=False)
    store.put(BEN, "dog", {"text": "My dog is called Rex"})
    memory.flush()
    model = ChatInferScale(memory=memory, user_id=store.user_id(ADA), max_tokens=2)
    answer = model.invoke("What is my cat called?")
    assert injected(answer) == recalled(answer) == {"My cat is called Miso"}


def test_a_namespace_can_belong_to_a_user_of_the_app(memory: Memory) -> None:
    """Then their questions recall what an agent stored for them, beside what was said."""
    store = InferScaleStore(memory, index={"fields": ["text"]}, user_of=lambda namespace: namespace[1])
    store.put(ADA, "cat", {"text": "My cat is called Miso"})
    store.put(("notes", "ada"), "tea", {"text": "I like tea"})
    store.put(BEN, "dog", {"text": "My dog is called Rex"})
    memory.add("I moved to Porto", user_id="ada", infer=False)
    memory.flush()
    answer = ChatInferScale(memory=memory, user_id="ada", max_tokens=2).invoke("What do I like?")
    assert injected(answer) == {"My cat is called Miso", "I like tea", "I moved to Porto"}
    assert [item.key for item in store.search(ADA)] == ["cat"]


def test_a_value_that_changes_beside_its_words_keeps_its_blob(
    memory: Memory, store: InferScaleStore, engine: WatchedEngine
) -> None:
    store.put(ADA, "cat", {"text": "My cat is called Miso", "age": 1})
    memory.flush()
    before = len(engine.encoded_facts)
    store.put(ADA, "cat", {"text": "My cat is called Miso", "age": 2})
    memory.flush()
    assert len(engine.encoded_facts) == before
    item = store.get(ADA, "cat")
    assert item is not None
    assert item.value == {"text": "My cat is called Miso", "age": 2}
    assert item.updated_at > item.created_at


def test_an_item_put_again_says_its_new_words_alone(memory: Memory, store: InferScaleStore) -> None:
    store.put(ADA, "cat", {"text": "My cat is called Miso"})
    store.put(ADA, "cat", {"text": "My cat is called Rex"})
    assert memory.audit("Miso").clean
    (found,) = store.search(ADA, query="Miso")
    assert found.value == {"text": "My cat is called Rex"}


def test_what_is_deleted_is_gone_from_every_file(memory: Memory, store: InferScaleStore) -> None:
    store.put(ADA, "cat", {"text": "My cat is called Miso", "note": "allergic to tuna"})
    store.put(ADA, "safe", {"text": "opens with 4711"}, index=False)
    memory.flush()
    assert not memory.audit("Miso").clean
    for key in ("cat", "safe"):
        store.delete(ADA, key)
        assert store.get(ADA, key) is None
    for words in ("Miso", "allergic to tuna", "4711"):
        assert memory.audit(words).clean
    assert memory.get_all(filters={"user_id": store.user_id(ADA)})["results"] == []
    store.delete(ADA, "cat")


def test_a_crash_between_the_new_words_and_the_old_leaves_one_item(
    memory: Memory, store: InferScaleStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(ADA, "cat", {"text": "My cat is called Miso"})

    def crash(self: Any, ids: Any) -> None:
        raise OSError("the lights went out")

    with monkeypatch.context() as patch:
        patch.setattr(Chat, "forget", crash)
        with pytest.raises(OSError, match="lights"):
            store.put(ADA, "cat", {"text": "My cat is called Rex"})
    assert [item.value for item in store.search(ADA)] == [{"text": "My cat is called Rex"}]
    assert not memory.audit("Miso").clean
    store.sweep_ttl()
    assert memory.audit("Miso").clean
    assert [item.value for item in store.search(ADA)] == [{"text": "My cat is called Rex"}]


def test_many_threads_and_two_stores_write_one_item(memory: Memory) -> None:
    one, two = (InferScaleStore(memory, index={"fields": ["text"]}) for _ in range(2))
    with ThreadPoolExecutor(4) as threads:
        list(
            threads.map(
                lambda number: (one, two)[number % 2].put(ADA, "cat", {"text": f"cat {number}"}), range(24)
            )
        )
    assert len(one.search(ADA)) == 1
    one.put(ADA, "cat", {"text": "the last cat"})
    assert [fact["memory"] for fact in memory.get_all(filters={"user_id": one.user_id(ADA)})["results"]] == [
        "the last cat"
    ]


def test_it_is_there_after_a_restart(open_memory: Callable[..., Memory]) -> None:
    memory = open_memory()
    value = {"text": "Grüße", "list": [1, 2.5, None, {"deep": True}], "empty": {}}
    InferScaleStore(memory).put(ADA, "1", value)
    memory.close()
    store = InferScaleStore(open_memory())
    item = store.get(ADA, "1")
    assert item is not None
    assert item.value == value
    assert store.list_namespaces() == [ADA]


# -- nothing crosses ---------------------------------------------------------------------------------------------

TRICKS: list[tuple[str, ...]] = [
    ("memories/ben",),
    ("memories", "ben", "*"),
    ("memories", "*"),
    ("*",),
    ("*", "ben"),
    ("memories", "%62en"),
    ("memories", "ben "),
    ("memories", "BEN"),
    ("=memories", "ben"),
]


@pytest.mark.parametrize("trick", TRICKS, ids=str)
def test_no_name_reaches_another_namespace(
    memory: Memory, store: InferScaleStore, trick: tuple[str, ...]
) -> None:
    store.put(BEN, "safe", {"text": "My safe opens with 4711"})
    store.put(trick, "mine", {"text": "Nothing to hide"})
    assert store.get(trick, "safe") is None
    for key in ("*", "=safe", "saf*"):
        assert store.get(BEN, key) is None
    assert [item.key for item in store.search(trick, query="safe", limit=100)] == ["mine"]
    assert store.user_id(trick) != store.user_id(BEN)
    answer = ChatInferScale(memory=memory, user_id=store.user_id(trick), max_tokens=2).invoke("The safe?")
    assert recalled(answer) == {"Nothing to hide"}
    store.delete(trick, "safe")
    assert store.get(BEN, "safe") is not None


def test_labels_langgraph_forbids_are_refused_in_batches_too(store: InferScaleStore) -> None:
    with pytest.raises(InvalidNamespaceError):
        store.batch([PutOp(("memories.ada",), "1", {})])


# -- filters -----------------------------------------------------------------------------------------------------


@pytest.fixture
def scored(store: InferScaleStore) -> InferScaleStore:
    for key, value in (
        ("low", {"score": 3, "day": "2024-05-01", "meta": {"kind": "a"}}),
        ("high", {"score": 7.5, "day": "2024-06-01", "meta": {"kind": "b"}, "meta.kind": "literal"}),
        ("text", {"score": "6", "day": None, "meta": {"kind": "a", "deep": {"n": 1}}}),
        ("none", {"meta": "flat"}),
        ("odd", {"score": [9], "day": 5}),
        ("huge", {"score": 10**400}),
    ):
        store.put(ADA, key, value)
    return store


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ({"score": {"$gt": 5}}, {"high", "text", "huge"}),
        ({"score": {"$gte": 3, "$lt": 7.5}}, {"low", "text"}),
        ({"score": {"$lte": "6"}}, {"low", "text"}),
        ({"score": {"$ne": 3}}, {"high", "text", "none", "odd", "huge"}),
        ({"score": {"$gt": float("nan")}}, set()),
        ({"day": {"$gt": "2024-05-15"}}, {"high"}),
        ({"meta.kind": "a"}, {"low", "text"}),
        ({"meta.kind": "literal"}, {"high"}),
        ({"meta.kind": "b"}, set()),
        ({"meta.deep.n": {"$gte": 1}}, {"text"}),
        ({"meta": {"deep": {"n": {"$gte": 1}}}}, {"text"}),
        ({"missing": None}, {"low", "high", "text", "none", "odd", "huge"}),
    ],
    ids=lambda value: repr(sorted(value)) if isinstance(value, set) else repr(value),
)
def test_items_without_a_field_or_of_another_kind_do_not_match_and_break_no_search(
    scored: InferScaleStore, condition: dict[str, Any], found: set[str]
) -> None:
    assert {item.key for item in scored.search(ADA, filter=condition)} == found


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ({"$or": [{"score": 1}, {"score": 2}]}, r"\$or"),
        ({"$and": [{"score": 1}]}, r"\$and"),
        ({"$not": {"score": 1}}, r"\$not"),
        ({"score": {"$in": [1, 2]}}, r"no operator '\$in'"),
        ({"score": {"$gt": 1, "lt": 2}}, "no operator 'lt'"),
        ({"meta": {"deep": {"$like": "a"}}}, r"no operator '\$like'"),
        ({"score": {"$gt": None}}, "a number or a text"),
        ({"score": {"$lt": [1]}}, "a number or a text"),
        ({5: 1}, "is no text"),
        (["score"], "dictionary"),
    ],
    ids=str,
)
def test_a_filter_that_cannot_be_is_an_error_whatever_is_stored(
    store: InferScaleStore, condition: Any, words: str
) -> None:
    with pytest.raises(StoreError, match=words):
        store.search(ADA, filter=condition)


# -- time to live ------------------------------------------------------------------------------------------------


def test_an_item_expires_and_reading_it_begins_its_time_anew(memory: Memory, clock: Clock) -> None:
    store = InferScaleStore(memory, ttl={"default_ttl": 10, "refresh_on_read": True})
    store.put(ADA, "read", {"text": "a"})
    store.put(ADA, "found", {"text": "b"})
    store.put(ADA, "unread", {"text": "c"})
    store.put(ADA, "kept", {"text": "d"}, ttl=None)
    clock.now += 9 * 60
    assert store.get(ADA, "read") is not None
    assert [item.key for item in store.search(ADA, filter={"text": "b"})] == ["found"]
    assert store.get(ADA, "unread", refresh_ttl=False) is not None
    clock.now += 2 * 60
    assert {item.key for item in store.search(ADA, refresh_ttl=False)} == {"read", "found", "kept"}
    clock.now += 10 * 60
    assert {item.key for item in store.search(ADA)} == {"kept"}
    assert store.list_namespaces() == [ADA]


def test_what_has_expired_is_injected_nowhere_and_swept_from_every_file(memory: Memory, clock: Clock) -> None:
    store = InferScaleStore(memory, index={"fields": ["text"]}, ttl={"sweep_interval_minutes": 5})
    store.put(ADA, "cat", {"text": "My cat is called Miso"}, ttl=1)
    model = ChatInferScale(memory=memory, user_id=store.user_id(ADA), max_tokens=2)
    assert recalled(model.invoke("?")) == {"My cat is called Miso"}
    clock.now += 61
    assert recalled(model.invoke("?")) == set()
    assert not memory.audit("Miso").clean
    clock.now += 5 * 60
    store.get(ADA, "another")
    assert memory.audit("Miso").clean
    assert store.sweep_ttl() == 0


def test_an_expired_key_is_free_again(memory: Memory, clock: Clock) -> None:
    store = InferScaleStore(memory, ttl={"default_ttl": 1})
    store.put(ADA, "cat", {"text": "Miso"})
    clock.now += 61
    store.put(ADA, "cat", {"text": "Miso"})
    assert store.get(ADA, "cat") is not None


def test_what_has_expired_is_in_no_prompt_of_the_memory_itself(memory: Memory) -> None:
    """Without a sweep, by the memory's own clock; an item that is put again lives again."""
    store = InferScaleStore(memory, index={"fields": ["text"]})
    ids = {"user_id": store.user_id(ADA)}

    def told() -> set[str]:
        return {known.text for known in memory.prepare("Which cat?", **ids).memories}

    store.put(ADA, "cat", {"text": "My cat is called Miso"}, ttl=0.02)
    assert told() == {"My cat is called Miso"}
    sleep(1.3)
    assert told() == set()
    store.put(ADA, "cat", {"text": "My cat is called Miso"}, ttl=0.02)
    store.put(ADA, "cat", {"text": "My cat is called Miso"}, ttl=None)
    sleep(1.3)
    assert told() == {"My cat is called Miso"}


# -- in an agent -------------------------------------------------------------------------------------------------


def test_an_agents_tools_use_it(memory: Memory, store: InferScaleStore) -> None:
    @tool
    def remember_name(runtime: ToolRuntime) -> str:
        """Remember the user's name."""
        assert runtime.store is not None
        runtime.store.put(ADA, "name", {"text": "My name is Ada"})
        return "done"

    model = ChatInferScale(memory=memory, user_id=store.user_id(ADA), max_tokens=60)
    agent = create_agent(model, tools=[remember_name], middleware=[forced("remember_name")], store=store)
    agent.invoke({"messages": [HumanMessage("I am Ada")]})
    assert [item.value for item in store.search(ADA, query="name")] == [{"text": "My name is Ada"}]
    memory.flush()
    assert injected(model.invoke("Who am I?")) == {"My name is Ada"}


def test_langmems_tools_use_it(memory: Memory) -> None:
    langmem = pytest.importorskip("langmem")
    store = InferScaleStore(memory, index={"fields": ["content"]})
    manage = langmem.create_manage_memory_tool(namespace=("memories", "{langgraph_user_id}"))
    search = langmem.create_search_memory_tool(
        namespace=("memories", "{langgraph_user_id}"), response_format="content_and_artifact"
    )

    @entrypoint(store=store)
    def work(call: dict[str, Any]) -> Any:
        if "query" in call:
            return [item.value for item in search.invoke({**_call("search_memory"), "args": call}).artifact]
        return manage.invoke(call)

    ada, ben = ({"configurable": {"langgraph_user_id": user}} for user in ("ada", "ben"))
    work.invoke({"content": "Ada plays the oboe"}, ada)
    work.invoke({"content": "Ben opens the safe with 4711"}, ben)
    assert work.invoke({"query": "Who plays?"}, ada) == [{"content": "Ada plays the oboe"}]
    key = store.search(ADA)[0].key
    work.invoke({"content": "Ada plays the horn", "action": "update", "id": key}, ada)
    memory.flush()
    model = ChatInferScale(memory=memory, user_id=store.user_id(ADA), max_tokens=2)
    assert injected(model.invoke("What does Ada play?")) == {"Ada plays the horn"}
    work.invoke({"action": "delete", "id": key}, ada)
    assert memory.audit("plays the").clean


class Likes(BaseModel):
    """What a user likes to drink."""

    drink: Literal["tea", "coffee"]


class Eager(ChatInferScale):
    """Must note a drink: a random model would call nothing."""

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **kwargs: Any) -> Any:
        named = [convert_to_openai_tool(each)["function"]["name"] for each in tools]
        return super().bind_tools(tools, tool_choice="Likes" if "Likes" in named else "none", **kwargs)


def test_langmems_manager_draws_memories_into_it(memory: Memory, engine: WatchedEngine) -> None:
    langmem = pytest.importorskip("langmem")
    store = InferScaleStore(memory)
    manager = langmem.create_memory_store_manager(
        Eager(engine=engine, max_tokens=100),
        namespace=("memories", "{langgraph_user_id}"),
        store=store,
        schemas=[Likes],
    )
    said = {"messages": [{"role": "user", "content": "I like tea"}]}
    manager.invoke(said, {"configurable": {"langgraph_user_id": "ada"}})
    (item,) = store.search(ADA)
    assert item.value["kind"] == "Likes"
    assert item.value["content"]["drink"] in ("tea", "coffee")
    assert store.search(BEN) == []


def _call(name: str) -> dict[str, Any]:
    return {"name": name, "id": "1", "type": "tool_call"}


# -- bad input ---------------------------------------------------------------------------------------------------


def test_what_cannot_be(memory: Memory, store: InferScaleStore) -> None:
    for options, words in (
        ({"index": {"embed": len, "dims": 3}}, "the memory embeds"),
        ({"index": {"fields": "text"}}, "list of paths"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            InferScaleStore(memory, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has no memory"):
        InferScaleStore(None)
    with pytest.raises(StoreError, match="no JSON"):
        store.batch([PutOp(ADA, "1", {"text": "kept"}), PutOp(ADA, "2", {"text": object()})])
    assert store.search(ADA) == []  # a batch is refused whole
    store.put(ADA, "1", {"text": "kept"})
    with pytest.raises(StoreError, match=r"\$like"):
        store.search(ADA, filter={"text": {"$like": "k%"}})
    with pytest.raises(ValueError, match="Unknown operation"):
        store.batch(["get"])  # type: ignore[list-item]
