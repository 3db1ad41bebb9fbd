"""mem0's own tests will be run with our faces under mem0's names. This imitates how they make and treat
instances: patched factories, mocks for stores and models, bare instances, private methods, attributes.

Everything here runs twice, with mem0's classes and with ours, in a home without models and without a network.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock, create_autospec, patch

import mem0
import pytest
from mem0.configs.base import MemoryConfig
from mem0.exceptions import LLMError, VectorStoreError
from mem0.exceptions import ValidationError as Mem0ValidationError
from mem0.memory import main as memory_main
from mem0.vector_stores.base import VectorStoreBase

from inferscale_memory import fetch
from inferscale_memory.memory import AsyncMemory, Memory
from tests.memory.as_mem0 import ours_as_mem0s

ADA = {"user_id": "ada"}


@pytest.fixture(params=["mem0's", "ours"], autouse=True)
def names(request: pytest.FixtureRequest) -> Iterator[str]:
    with ours_as_mem0s() if request.param == "ours" else nullcontext():
        yield str(request.param)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is there, and nothing may be fetched."""
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(fetch, "fetch", lambda asset: pytest.fail(f"{asset.name} was fetched"))
    return tmp_path / "home"


@pytest.fixture
def store() -> MagicMock:
    store = MagicMock()
    store.search.return_value = []
    store.keyword_search.return_value = None
    return store


@pytest.fixture
def llm() -> MagicMock:
    return MagicMock()


@pytest.fixture
def embedder() -> MagicMock:
    embedder = MagicMock()
    embedder.embed.return_value = [0.1, 0.2, 0.3]
    embedder.embed_batch.side_effect = lambda texts, action=None: [[0.1, 0.2, 0.3] for _ in texts]
    return embedder


@pytest.fixture
def factories(store: MagicMock, llm: MagicMock, embedder: MagicMock) -> Iterator[SimpleNamespace]:
    with (
        patch("mem0.utils.factory.EmbedderFactory.create", return_value=embedder) as embedders,
        patch("mem0.utils.factory.VectorStoreFactory.create", return_value=store) as stores,
        patch("mem0.utils.factory.LlmFactory.create", return_value=llm) as llms,
        patch("mem0.memory.main.SQLiteManager") as databases,
        patch("mem0.memory.main.capture_event") as events,
    ):
        yield SimpleNamespace(
            embedders=embedders, stores=stores, llms=llms, databases=databases, events=events
        )


@pytest.fixture
def memory(factories: SimpleNamespace) -> Any:
    return memory_main.Memory(MemoryConfig())


@pytest.fixture
def async_memory(factories: SimpleNamespace) -> Any:
    return memory_main.AsyncMemory(MemoryConfig())


def found(name: str, score: float = 0.9, **payload: Any) -> SimpleNamespace:
    return SimpleNamespace(id=name, score=score, payload={"data": name, **payload})


def test_the_names_are_whose_they_should_be(names: str) -> None:
    ours = names == "ours"
    for module in (mem0, memory_main):
        assert (module.Memory is Memory, module.AsyncMemory is AsyncMemory) == (ours, ours)
    assert issubclass(mem0.Memory, memory_main.MemoryBase)


class TestMaking:
    @pytest.mark.parametrize("name", ["Memory", "AsyncMemory"])
    @pytest.mark.parametrize("config", [None, "object"])
    def test_with_patched_factories_nothing_else_is_needed(
        self, factories: SimpleNamespace, home: Path, name: str, config: Any, store: MagicMock
    ) -> None:
        face = getattr(mem0, name)
        memory = face() if config is None else face(MemoryConfig())
        assert memory.vector_store is store
        assert memory._entity_store is None
        assert memory.llm is factories.llms.return_value
        assert memory.db is factories.databases.return_value
        assert factories.stores.call_count == 1
        assert memory.collection_name == "mem0"
        assert memory.api_version == "v1.1"
        assert memory.reranker is None
        assert not (home / "journal.sqlite").exists(), "no journal without a real store"

    @pytest.mark.parametrize("name", ["Memory", "AsyncMemory"])
    def test_the_factory_classes_may_be_patched_too(self, name: str) -> None:
        with (
            patch("mem0.memory.main.EmbedderFactory") as embedders,
            patch("mem0.memory.main.VectorStoreFactory") as stores,
            patch("mem0.memory.main.LlmFactory") as llms,
        ):
            memory = getattr(memory_main, name)(MemoryConfig())
        assert memory.embedding_model is embedders.create.return_value
        assert memory.vector_store is stores.create.return_value
        assert memory.llm is llms.create.return_value

    @pytest.mark.parametrize("name", ["Memory", "AsyncMemory"])
    @pytest.mark.parametrize(
        "mock", [lambda: MagicMock(spec=VectorStoreBase), lambda: create_autospec(VectorStoreBase)]
    )
    def test_a_mock_that_says_it_is_a_store_is_a_mock(
        self, factories: SimpleNamespace, home: Path, name: str, mock: Any
    ) -> None:
        factories.stores.return_value = mock()
        assert getattr(mem0, name)().vector_store is factories.stores.return_value
        assert not (home / "journal.sqlite").exists()

    @pytest.mark.parametrize("name", ["Memory", "AsyncMemory"])
    def test_the_entity_store_of_a_stand_in_is_its_own(self, names: str, name: str) -> None:
        stand_in = SimpleNamespace(_entity_store="its own")
        assert getattr(mem0, name).entity_store.fget(stand_in) == "its own"

    @pytest.mark.parametrize("name", ["Memory", "AsyncMemory"])
    def test_a_mock_may_be_the_configuration(self, factories: SimpleNamespace, name: str) -> None:
        config = MagicMock()
        config.reranker = None
        memory = getattr(mem0, name)(config)
        assert memory.config is config

    @pytest.mark.parametrize("name", ["Memory", "AsyncMemory"])
    def test_a_reranker_is_made(self, factories: SimpleNamespace, name: str) -> None:
        with patch("mem0.memory.main.RerankerFactory.create") as rerankers:
            config = MemoryConfig(reranker={"provider": "cohere", "config": {"api_key": "none"}})
            assert getattr(mem0, name)(config).reranker is rerankers.return_value

    @pytest.mark.parametrize("name", ["Memory", "AsyncMemory"])
    def test_telemetry_has_its_own_store_and_only_when_it_is_on(
        self, factories: SimpleNamespace, name: str
    ) -> None:
        with patch("mem0.memory.main.MEM0_TELEMETRY", True):
            memory = getattr(mem0, name)(MemoryConfig())
        assert factories.stores.call_count == 2
        assert memory._telemetry_vector_store is factories.stores.return_value
        factories.events.assert_called_once()
        assert factories.events.call_args.args[:2] == ("mem0.init", memory)

    def test_from_config_hands_its_parts_to_the_factories(self, factories: SimpleNamespace) -> None:
        config = {
            "vector_store": {
                "provider": "qdrant",
                "config": {"collection_name": "x", "host": "h", "port": 1},
            },
            "llm": {"provider": "openai", "config": {"model": "m"}},
            "embedder": {"provider": "openai", "config": {"model": "e"}},
            "custom_instructions": "Only tea.",
        }
        memory = mem0.Memory.from_config(config)
        assert memory.collection_name == "x"
        assert memory.custom_instructions == "Only tea."
        assert factories.llms.call_args.args == ("openai", {"model": "m"})
        assert factories.embedders.call_args.args[:2] == ("openai", {"model": "e"})

    @pytest.mark.parametrize("name", ["Memory", "AsyncMemory"])
    def test_a_bad_configuration_is_pydantics_error(self, name: str) -> None:
        from pydantic import ValidationError

        with pytest.raises(ValidationError):
            getattr(mem0, name).from_config({"embedder": {"provider": "nonsense", "config": {}}})

    def test_init_may_be_patched_away(self) -> None:
        with patch.object(memory_main.Memory, "__init__", return_value=None):
            memory = mem0.Memory()
        memory.get = MagicMock(return_value={"memory": "x"})
        assert memory.get("1") == {"memory": "x"}


class TestAttributes:
    def test_parts_may_be_replaced(self, memory: Any) -> None:
        for name in ("vector_store", "_entity_store", "llm", "embedding_model", "db", "config", "reranker"):
            stand_in = MagicMock()
            setattr(memory, name, stand_in)
            assert getattr(memory, name) is stand_in

    def test_methods_may_be_replaced(self, memory: Any) -> None:
        memory._add_to_vector_store = Mock(return_value=[{"memory": "x", "event": "ADD"}])
        messages = [{"role": "user", "content": "hello"}]
        assert memory.add(messages=messages, user_id="ada") == {"results": [{"memory": "x", "event": "ADD"}]}
        memory._add_to_vector_store.assert_called_once_with(messages, ADA, ADA, True, prompt=None)
        with patch.object(memory, "_search_vector_store", return_value=[{"id": "1"}]) as search:
            assert memory.search("tea", filters=ADA) == {"results": [{"id": "1"}]}
        search.assert_called_once_with("tea", ADA, 20, 0.1, explain=False, show_expired=False)

    def test_the_entity_store_is_made_on_first_use(self, memory: Any, factories: SimpleNamespace) -> None:
        assert memory.entity_store is factories.stores.return_value
        assert factories.stores.call_args.args[1].collection_name == "mem0_entities"

    def test_a_bare_instance_has_no_attributes(self) -> None:
        for name in ("Memory", "AsyncMemory"):
            bare = getattr(memory_main, name).__new__(getattr(memory_main, name))
            for attribute in ("vector_store", "_entity_store", "llm"):
                assert not hasattr(bare, attribute)
            bare._entity_store = None
            assert bare._entity_store is None
            bare.db = MagicMock()
            bare.close()
            assert bare.db is None

    def test_specs_know_every_method(self) -> None:
        mock = MagicMock(spec=memory_main.AsyncMemory)
        assert isinstance(mock.add, AsyncMock)
        assert isinstance(mock.search, AsyncMock)
        assert isinstance(mock, mem0.AsyncMemory)
        assert not isinstance(MagicMock(spec=memory_main.Memory).add, AsyncMock)

    def test_signatures(self) -> None:
        for name in ("add", "search", "get_all"):
            kinds = [p.kind for p in inspect.signature(getattr(mem0.Memory, name)).parameters.values()]
            assert inspect.Parameter.VAR_POSITIONAL not in kinds
        assert "llm" in inspect.signature(mem0.AsyncMemory.add).parameters

    def test_the_project_stays(self, memory: Any) -> None:
        with pytest.raises(ValueError, match="not supported by the OSS"):
            memory.project.update(custom_instructions="x")

    def test_chat_is_not_implemented_where_nothing_stands_behind(
        self, memory: Any, async_memory: Any
    ) -> None:
        with pytest.raises(NotImplementedError):
            memory.chat("hello")
        with pytest.raises(NotImplementedError):
            asyncio.run(async_memory.chat("hello"))


class TestOthersAsSelf:
    """mem0's tests call methods of the class with whatever has the attributes."""

    @pytest.mark.parametrize("kind", ["spec", "plain", "namespace"])
    def test_delete_all(self, kind: str) -> None:
        own: Any = {
            "spec": lambda: MagicMock(spec=memory_main.Memory),
            "plain": MagicMock,
            "namespace": lambda: SimpleNamespace(_delete_memory=Mock()),
        }[kind]()
        own.vector_store = MagicMock()
        own.vector_store.list.side_effect = [([found("a"), found("b")], None), ([], None)]
        with patch("mem0.memory.main.display_first_run_notice"), patch("mem0.memory.main.capture_event"):
            memory_main.Memory.delete_all(own, user_id="ada")
        assert [call.args for call in own._delete_memory.call_args_list] == [("a",), ("b",)]

    def test_search_and_add_refuse_before_they_look_at_self(self) -> None:
        for own in (SimpleNamespace(), memory_main.Memory.__new__(memory_main.Memory), object()):
            with pytest.raises(ValueError, match="filters must contain"):
                memory_main.Memory.search(own, "hello")
            with pytest.raises(Mem0ValidationError, match="At least one of"):
                memory_main.Memory.add(own, "hello")

    def test_private_methods_take_any_self(self) -> None:
        own = SimpleNamespace(vector_store=MagicMock(), embedding_model=MagicMock(), db=MagicMock())
        name = memory_main.Memory._create_memory(own, "Tea", {"Tea": [0.1]}, {"user_id": "ada"})
        assert own.vector_store.insert.call_args.kwargs["ids"] == [name]

    def test_features_of_the_platform_are_refused_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            memory_main, "get_temporal_feature_error_message", lambda *where: f"blocked {where}"
        )
        bare = memory_main.Memory.__new__(memory_main.Memory)
        with pytest.raises(ValueError, match=r"blocked .*timestamp"):
            memory_main.Memory.add(bare, "hello", timestamp=123)
        with pytest.raises(ValueError, match=r"blocked .*reference_date"):
            memory_main.Memory.search(bare, "hello", reference_date="2025-01-01")

        async def message(*where: str) -> str:
            return f"blocked {where}"

        monkeypatch.setattr(memory_main, "get_temporal_feature_error_message_async", message)
        other = memory_main.AsyncMemory.__new__(memory_main.AsyncMemory)
        with pytest.raises(ValueError, match=r"blocked .*timestamp"):
            asyncio.run(memory_main.AsyncMemory.add(other, "hello", timestamp=123))


class TestSyncMethods:
    @pytest.mark.parametrize("where", ["search", "get_all"])
    def test_ids_at_the_top_are_refused(self, memory: Any, where: str) -> None:
        args = ("tea",) if where == "search" else ()
        with pytest.raises(ValueError, match=r"user_id.*filters"):
            getattr(memory, where)(*args, user_id="ada")
        with pytest.raises(TypeError):
            getattr(memory, where)(*args, "ada")

    def test_add_with_inference(self, memory: Any, llm: MagicMock, store: MagicMock) -> None:
        llm.generate_response.return_value = json.dumps(
            {"memory": [{"text": "A"}, {"text": "A"}, {"text": "B"}]}
        )
        added = memory.add("A and B", user_id="ada")["results"]
        assert [(item["memory"], item["event"]) for item in added] == [("A", "ADD"), ("B", "ADD")]
        store.insert.assert_called_once()
        memory.db.batch_add_history.assert_called_once()

    def test_an_insert_that_fails_is_tried_record_by_record(
        self, memory: Any, llm: MagicMock, store: MagicMock
    ) -> None:
        llm.generate_response.return_value = json.dumps({"memory": [{"text": "A"}, {"text": "B"}]})
        store.insert.side_effect = [RuntimeError("batch"), None, RuntimeError("second")]
        assert [item["memory"] for item in memory.add("A, B", user_id="ada")["results"]] == ["A"]
        store.insert.side_effect = RuntimeError("all")
        with pytest.raises(VectorStoreError):
            memory.add("A, B", user_id="ada")

    def test_a_failing_llm_is_an_llm_error(self, memory: Any, llm: MagicMock) -> None:
        llm.generate_response.side_effect = RuntimeError("away")
        with pytest.raises(LLMError):
            memory.add("hello", user_id="ada")

    def test_add_without_inference_embeds_once(
        self, memory: Any, embedder: MagicMock, store: MagicMock
    ) -> None:
        memory.add("foo", user_id="ada", infer=False)
        assert embedder.embed.call_count == 1
        store.insert.assert_called_once()

    def test_search_gives_scores(self, memory: Any, store: MagicMock, embedder: MagicMock) -> None:
        store.search.return_value = [found("1", 0.9), found("2", 0.05)]
        with patch("mem0.memory.main.extract_entities", return_value=[]):
            results = memory.search("  tea ", filters=ADA)["results"]
        assert [item["id"] for item in results] == ["1"]
        store.search.assert_called_once_with(query="tea", vectors=[0.1, 0.2, 0.3], top_k=80, filters=ADA)
        embedder.embed.assert_called_once_with("tea", "search")

    def test_lists_come_in_many_shapes(self, memory: Any, store: MagicMock) -> None:
        rows = [found("1"), found("2")]
        for listed in (rows, [rows], (rows, 7)):
            store.list.return_value = listed
            assert [item["id"] for item in memory.get_all(filters=ADA)["results"]] == ["1", "2"]

    def test_update_and_delete(self, memory: Any, store: MagicMock) -> None:
        store.get.return_value = found("1", created_at="2024-01-01T05:00:00+05:00", user_id="ada", tag="x")
        memory._update_memory("1", "New", {"New": [0.1]}, {"user_id": "eve"})
        payload = store.update.call_args.kwargs["payload"]
        assert (payload["data"], payload["user_id"], payload["tag"]) == ("New", "ada", "x")
        memory.delete("1")
        store.delete.assert_called_once_with(vector_id="1")
        assert memory.db.add_history.call_args.kwargs["created_at"] == "2024-01-01T00:00:00+00:00"
        store.get.return_value = None
        for call in (lambda: memory.delete("1"), lambda: memory.update("1", "x")):
            with pytest.raises(ValueError, match="not found"):
                call()

    def test_a_store_that_is_away_is_its_own_error(self, memory: Any, store: MagicMock) -> None:
        store.get.side_effect = ConnectionError("unreachable")
        with pytest.raises(ConnectionError):
            memory.update("1", "x")

    def test_reset_and_close(self, memory: Any, store: MagicMock, factories: SimpleNamespace) -> None:
        memory.reset()
        assert memory.collection_name == "mem0"
        with memory as same:
            assert same is memory
        assert memory.db is None
        memory.close()

    def test_filters_are_processed(self, memory: Any) -> None:
        merged = memory._process_metadata_filters({"AND": [{"price": {"gt": 1}}, {"price": {"lt": 2}}]})
        assert merged == {"price": {"gt": 1, "lt": 2}}
        assert memory._has_advanced_operators({"AND": []})

    def test_procedural_memories(self, memory: Any, llm: MagicMock, store: MagicMock) -> None:
        llm.generate_response.return_value = "```\nsteps\n```"
        result = memory.add("How?", agent_id="cook", memory_type="procedural_memory")
        assert result["results"][0]["memory"] == "steps"
        assert store.insert.call_args.kwargs["payloads"][0]["memory_type"] == "procedural_memory"

    @pytest.mark.parametrize(
        ("options", "code"),
        [
            ({}, "001"),
            ({"user_id": "a", "memory_type": "x"}, "002"),
            ({"user_id": "a", "messages": 1}, "003"),
        ],
    )
    def test_refusals_carry_codes(self, memory: Any, options: dict[str, Any], code: str) -> None:
        with pytest.raises(Mem0ValidationError) as raised:
            memory.add(**{"messages": "hello", **options})
        assert raised.value.error_code == f"VALIDATION_{code}"

    def test_events_are_reported(self, memory: Any, factories: SimpleNamespace, store: MagicMock) -> None:
        store.list.return_value = []
        memory.get_all(filters=ADA)
        assert factories.events.call_args.args[:2] == ("mem0.get_all", memory)


class TestAsyncMethods:
    def run(self, work: Any) -> Any:
        return asyncio.run(work)

    def test_ids_at_the_top_are_refused(self, async_memory: Any) -> None:
        with pytest.raises(ValueError, match=r"user_id.*filters"):
            self.run(async_memory.search("tea", user_id="ada"))
        with pytest.raises(ValueError, match=r"user_id.*filters"):
            self.run(async_memory.get_all(user_id="ada"))

    def test_add_search_get_list(self, async_memory: Any, llm: MagicMock, store: MagicMock) -> None:
        llm.generate_response.return_value = json.dumps({"memory": [{"text": "A"}]})
        assert self.run(async_memory.add("A", user_id="ada"))["results"][0]["memory"] == "A"
        store.search.return_value = [found("1")]
        assert self.run(async_memory.search("tea", filters=ADA))["results"][0]["id"] == "1"
        assert self.run(async_memory._search_vector_store("tea", ADA, 10))[0]["id"] == "1"
        store.get.return_value = found("1", attributed_to="user")
        assert self.run(async_memory.get("1"))["attributed_to"] == "user"
        store.list.return_value = [[found("1")]]
        assert len(self.run(async_memory._get_all_from_vector_store(ADA, 100))) == 1

    def test_delete_all_goes_on_over_failures(self, async_memory: Any, store: MagicMock) -> None:
        rows = {name: found(name) for name in ("a", "b", "c")}
        store.list.return_value = (list(rows.values()),)

        def get(vector_id: str) -> Any:
            if vector_id == "b":
                raise RuntimeError("broken")
            return rows[vector_id]

        store.get.side_effect = get
        done = self.run(async_memory.delete_all(user_id="ada"))
        assert done == {"message": "Memories deleted successfully!"}
        assert store.delete.call_count == 2

    def test_an_entity_store_is_cleared_in_bulk(self, async_memory: Any, store: MagicMock) -> None:
        store.list.return_value = ([found("a", user_id="ada")],)
        store.get.side_effect = lambda vector_id: found(vector_id)
        entities = MagicMock()
        entities.list.return_value = ([found("entity", user_id="ada")],)
        async_memory._entity_store = entities
        self.run(async_memory.delete_all(user_id="ada"))
        entities.delete.assert_called_once_with(vector_id="entity")

    def test_a_langchain_model_makes_procedural_memories(self, async_memory: Any, store: MagicMock) -> None:
        model = MagicMock()
        model.invoke.return_value.content = "steps"
        messages = pytest.importorskip("langchain_core.messages.utils")
        assert messages
        self.run(async_memory.add("How?", agent_id="cook", memory_type="procedural_memory", llm=model))
        assert store.insert.call_args.kwargs["payloads"][0]["data"] == "steps"

    def test_a_wrong_memory_type_is_a_value_error(self, async_memory: Any) -> None:
        with pytest.raises(ValueError, match="Invalid 'memory_type'"):
            self.run(async_memory.add("hello", user_id="ada", memory_type="x"))

    def test_reset_update_and_leaving(self, async_memory: Any, store: MagicMock) -> None:
        async def work() -> None:
            await async_memory.reset()
            store.delete_col.assert_called_once()
            store.get.return_value = found("1", user_id="ada")
            await async_memory.update("1", "New")
            async with async_memory as same:
                assert same is async_memory

        self.run(work())
        assert async_memory.db is None

    @pytest.mark.filterwarnings("error")
    def test_from_config_is_no_coroutine(self, factories: SimpleNamespace) -> None:
        memory = mem0.AsyncMemory.from_config({})
        assert isinstance(memory, mem0.AsyncMemory)


class ListStore(VectorStoreBase):  # type: ignore[misc]  # mem0 has no types
    """A real store that a test has made."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}

    def insert(self, vectors: Any, payloads: Any = None, ids: Any = None) -> None:
        self.rows |= {name: found(name, **payload) for name, payload in zip(ids, payloads, strict=True)}

    def search(self, query: Any, vectors: Any, top_k: int = 5, filters: Any = None) -> Any:
        return list(self.rows.values())[:top_k]

    def list(self, filters: Any = None, top_k: Any = None) -> Any:
        return [list(self.rows.values())]

    def get(self, vector_id: str) -> Any:
        return self.rows.get(vector_id)

    def delete(self, vector_id: str) -> None:
        del self.rows[vector_id]

    def update(self, vector_id: str, vector: Any = None, payload: Any = None) -> None:
        self.rows[vector_id].payload.update(payload)

    def reset(self) -> None:
        self.rows.clear()

    delete_col = reset

    def create_col(self, *args: Any) -> None: ...
    def list_cols(self) -> Any:
        return []

    def col_info(self) -> Any:
        return {}


class TestRealStoresMadeByTests:
    @pytest.mark.parametrize("keywords", [False, True])
    def test_the_warning_about_keyword_search(
        self, factories: SimpleNamespace, caplog: pytest.LogCaptureFixture, keywords: bool
    ) -> None:
        class Searchable(ListStore):
            def keyword_search(self, query: Any, top_k: int = 5, filters: Any = None) -> Any:
                return []

        factories.stores.return_value = Searchable() if keywords else ListStore()
        with caplog.at_level(logging.WARNING, logger="mem0.memory.main"):
            memory = mem0.Memory(MemoryConfig())
        warned = any("does not support keyword search" in record.message for record in caplog.records)
        assert warned is not keywords
        memory.close()

    @pytest.mark.parametrize("face", ["Memory", "AsyncMemory"])
    def test_its_attributes_shine_through_and_no_engine_is_started(
        self, factories: SimpleNamespace, face: str
    ) -> None:
        factories.stores.return_value = inner = ListStore()
        memory = getattr(mem0, face)()
        assert memory.vector_store.rows is inner.rows
        added = memory.add("Tea", user_id="ada", infer=False)
        if face == "AsyncMemory":
            added = asyncio.run(added)
        assert list(inner.rows) == [added["results"][0]["id"]]
        memory.close()  # would wait for a fetch of the model, if an engine had been asked for

    def test_qdrant_in_a_folder_and_sqlite(self, tmp_path: Path, embedder: MagicMock, llm: MagicMock) -> None:
        config = {
            "vector_store": {
                "provider": "qdrant",
                "config": {"path": str(tmp_path / "q"), "embedding_model_dims": 3, "collection_name": "c"},
            },
            "history_db_path": str(tmp_path / "history.db"),
        }
        with (
            patch("mem0.utils.factory.EmbedderFactory.create", return_value=embedder),
            patch("mem0.utils.factory.LlmFactory.create", return_value=llm),
        ):
            memory = mem0.Memory.from_config(config)
        [named] = memory.add(
            [{"role": "assistant", "name": "planner", "content": "tea"}], user_id="ada", infer=False
        )["results"]
        assert memory.vector_store.get(named["id"]).payload["actor_id"] == "planner"
        assert memory.history(named["id"])[0]["actor_id"] == "planner"
        hits = memory.search("tea", filters={**ADA, "actor_id": "planner"})["results"]
        assert [hit["id"] for hit in hits] == [named["id"]]
        memory.close()
        memory.vector_store.client.close()
        with sqlite3.connect(tmp_path / "history.db") as database:
            assert database.execute("SELECT COUNT(*) FROM history").fetchone() == (1,)


class TestHelpers:
    def test_a_configuration_can_be_copied(self, factories: SimpleNamespace) -> None:
        memory = mem0.Memory(MemoryConfig())
        assert memory_main._safe_deepcopy_config(memory.config) == memory.config
        assert copy.copy(memory).config is memory.config

    def test_calls_to_super_end(self, factories: SimpleNamespace) -> None:
        class App(mem0.Memory):  # type: ignore[misc]  # mem0 has no types
            def add(self, *args: Any, **options: Any) -> Any:
                return super().add(*args, **options)

            def search(self, *args: Any, **options: Any) -> Any:
                return super().search(*args, **options)

        app = App(MemoryConfig())
        app.add("Tea", user_id="ada", infer=False)
        assert app.search("tea", filters=ADA) == {"results": []}

    def test_async_calls_to_super_end(self, factories: SimpleNamespace) -> None:
        class App(mem0.AsyncMemory):  # type: ignore[misc]  # mem0 has no types
            async def add(self, *args: Any, **options: Any) -> Any:
                return await super().add(*args, **options)

        app = App(MemoryConfig())
        assert len(asyncio.run(app.add("Tea", user_id="ada", infer=False))["results"]) == 1
