"""What can be configured, what is made up where nothing is, and what is refused early."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mem0.configs.base import MemoryConfig
from pydantic import ValidationError

from inferscale_memory import fetch
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.memory import Injection, Memory
from inferscale_memory.memory.config import Settings
from tests.memory.conftest import OpenMemory
from tests.memory.saying import ADA, injected, say
from tests.memory.watched import WatchedEngine


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetch, "embedder", lambda: pytest.fail("reading a configuration fetches nothing"))
    return tmp_path / "home"


def test_with_nothing_set_all_is_local_and_under_one_folder(home: Path) -> None:
    settings = Settings.read(None)
    mem0 = settings.mem0
    assert settings.folder == home
    assert (mem0.embedder.provider, mem0.embedder.config) == ("inferscale", {"embedding_dims": 384})
    store = mem0.vector_store
    assert (store.provider, store.config.path) == ("inferscale", str(home / "facts.sqlite"))
    assert mem0.vector_store.config.embedding_model_dims == 384
    assert mem0.history_db_path == str(home / "history.db")
    assert mem0.llm.provider == "inferscale"
    assert settings.engine.eager


def test_the_engine_is_not_made_before_it_is_needed(open_memory: OpenMemory, model: Path) -> None:
    memory = open_memory(engine={"provider": "transformers", "model": model})
    assert memory._core is not None
    assert memory._core.engine.started is None
    assert memory.engine is memory._core.engine.started


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"dtyp": "float32"}, "did you mean 'dtype'"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"provider": "vlm"}, "did you mean 'vllm'"),
        ({"blobs": {"devce_bytes": 1}}, "did you mean 'device_bytes'"),
        ({"blobs": 5}, "blobs"),
        ({"model": 5}, "model"),
        ({"model": "/nowhere"}, "no model folder at /nowhere"),
        ({"model": "."}, "no config.json"),
        ({"model": "org/missing"}, "HF_HUB_OFFLINE"),
        ({"provider": "vllm", "max_modle_len": 9}, "did you mean 'max_model_len'"),
    ],
)
def test_an_engine_that_cannot_be_made_is_refused_when_the_memory_is_made(
    spec: dict[str, Any], said: str, open_memory: OpenMemory, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=said):
        open_memory(engine={"provider": "transformers", "model": model, **spec})


def test_an_option_that_transformers_has_not_is_named(open_memory: OpenMemory, model: Path) -> None:
    engine = {"provider": "transformers", "model": model, "max_model_len": 100, "enforce_eager": True}
    with pytest.raises(ConfigurationError, match="leave out enforce_eager, max_model_len"):
        _ = open_memory(engine=engine).engine


def test_an_engine_made_from_the_configuration_ends_with_the_memory(
    open_memory: OpenMemory, model: Path
) -> None:
    memory = open_memory(engine={"provider": "transformers", "model": model, "device": "cpu"})
    say(memory, "I like tea")
    memory.flush()
    assert injected(memory.chat("What?", **ADA, max_tokens=1)) == ["I like tea"]
    engine: Any = memory.engine
    memory.close()
    assert engine._closed


def test_an_engine_that_was_passed_stays_the_callers(memory: Memory, engine: WatchedEngine) -> None:
    say(memory, "I like tea")
    memory.flush()
    memory.close()
    assert not engine._closed


def test_arguments_and_dictionary_say_the_same(
    engine: WatchedEngine, hashing_embedder: dict[str, Any], tmp_path: Path
) -> None:
    config = {"embedder": hashing_embedder}
    ours: dict[str, Any] = {"engine": engine, "injection": {"top_k": 3}, "folder": tmp_path / "one"}
    with Memory(config, **ours) as one:
        assert one._core is not None
        assert one._core.injection.top_k == 3
        assert (tmp_path / "one" / "journal.sqlite").exists()
    with Memory.from_config({**config, **ours, "folder": tmp_path / "two"}) as two:
        assert two._core is not None
        assert two._core.injection.top_k == 3
        assert two.engine is engine


def test_mem0s_dictionaries_work_as_they_are(tmp_path: Path) -> None:
    settings = Settings.read(
        {
            "embedder": {"provider": "openai", "config": {"model": "e", "embedding_dims": 3}},
            "vector_store": {"provider": "qdrant", "config": {"host": "db", "port": 1}},
            "llm": {"provider": "ollama", "config": {"model": "m"}},
            "version": "v1.1",
            "custom_instructions": "Only facts about tea.",
        }
    )
    assert settings.mem0.embedder.provider == "openai"
    assert settings.mem0.vector_store.config.host == "db"
    assert settings.mem0.vector_store.config.embedding_model_dims == 3
    assert settings.mem0.llm.provider == "ollama"
    assert settings.mem0.custom_instructions == "Only facts about tea."
    assert not settings.engine.eager, "an app that only uses mem0 starts no engine"


def test_a_store_in_a_file_gets_its_place_under_the_folder(home: Path) -> None:
    store = Settings.read({"vector_store": {"provider": "faiss"}}).mem0.vector_store
    assert store.config.path == str(home / "faiss")
    store = Settings.read(
        {"vector_store": {"provider": "faiss", "config": {"path": "/mine"}}}
    ).mem0.vector_store
    assert store.config.path == "/mine"


def test_the_users_dictionary_is_not_changed() -> None:
    mine: dict[str, Any] = {"vector_store": {"provider": "qdrant", "config": {}}, "injection": {"top_k": 2}}
    Settings.read(mine)
    assert mine == {"vector_store": {"provider": "qdrant", "config": {}}, "injection": {"top_k": 2}}


def test_mem0s_configuration_object_is_taken_as_it_is(tmp_path: Path) -> None:
    config = MemoryConfig(history_db_path=str(tmp_path / "h.db"))
    settings = Settings.read(config, folder=tmp_path / "f")
    assert settings.mem0 is config
    assert not settings.engine.eager
    assert Settings.read(config, {"provider": "transformers"}, folder=tmp_path / "f").engine.eager


def test_options_for_the_engine_as_llm_are_handed_on() -> None:
    llm = Settings.read({"llm": {"provider": "inferscale", "config": {"max_tokens": 7}}}).mem0.llm
    assert llm.config["max_tokens"] == 7


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"engine": {"provider": "llama.cpp"}}, "use vllm or transformers"),
        ({"engine": 7}, "pass an Engine"),
        ({"injection": {"topk": 7}}, "has no 'topk'"),
        ({"injection": {"top_k": -1}}, "injection.top_k must be"),
        ({"injection": {"context_turns": 1.5}}, "injection.context_turns must be"),
    ],
)
def test_what_cannot_work_is_refused_early(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Settings.read(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"injecton": {}}, "the configuration has no 'injecton': did you mean 'injection'?"),
        ({"vector_stor": {}}, "did you mean 'vector_store'?"),
        ({"zzz": 1}, "the configuration has no 'zzz': leave it out"),
        ({"injection": {"neighbors": 2}}, "injection has no 'neighbors': did you mean 'neighbours'?"),
        ({"llm": {"provder": "openai"}}, "llm has no 'provder': did you mean 'provider'?"),
        ({"llm": {"provider": "openai", "config": {"temprature": 1}}}, "did you mean 'temperature'?"),
        ({"llm": {"config": {"max_token": 1}}}, "llm.config has no 'max_token': did you mean 'max_tokens'?"),
        ({"embedder": {"provider": "ollama", "config": {"modl": "m"}}}, "did you mean 'model'?"),
        ({"vector_store": {"provider": "qdrant", "confg": {}}}, "did you mean 'config'?"),
        ({"vector_store": "qdrant"}, "vector_store must be a dictionary such as"),
        ({"blobs": {"disk_bytes": 1}}, "blobs has no 'disk_bytes'"),
        ([], "the configuration must be mem0's dictionary"),
        ("config.yaml", "the configuration must be mem0's dictionary"),
        ({"folder": 5}, "folder must be the path of a folder, not 5"),
    ],
)
def test_what_is_misspelt_is_named_with_what_was_probably_meant(config: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        Settings.read(config)


def test_mem0s_own_part_is_mem0s_own_error() -> None:
    with pytest.raises(ValidationError):
        Settings.read({"embedder": {"provider": "nonsense", "config": {}}})


def test_a_journal_that_cannot_be_opened_is_named(open_memory: OpenMemory, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "journal.sqlite").write_text("no database, whatever its name says" * 100)
    with pytest.raises(ConfigurationError, match=r"journal\.sqlite cannot be opened"):
        open_memory()


def test_injection_has_few_options_and_good_defaults() -> None:
    assert Injection() == Injection(top_k=20, neighbours=8, context_turns=0, text_last=0)


def test_a_folder_whose_embedded_qdrant_is_in_use_is_said(open_memory: OpenMemory) -> None:
    qdrant = {"vector_store": {"provider": "qdrant"}}
    open_memory(**qdrant)
    with pytest.raises(ConfigurationError, match="open already"):
        open_memory(**qdrant)


def test_two_memories_on_one_folder_see_each_others_facts(open_memory: OpenMemory) -> None:
    one, two = open_memory(), open_memory()
    [fact] = say(one, "I like tea")
    assert [found["id"] for found in two.get_all(filters=ADA)["results"]] == [fact]
    two.delete(fact)
    assert one.search("tea", filters=ADA)["results"] == []


def test_a_folder_with_facts_in_embedded_qdrant_keeps_them_there(
    open_memory: OpenMemory, caplog: pytest.LogCaptureFixture
) -> None:
    with open_memory(vector_store={"provider": "qdrant"}) as before:
        [fact] = say(before, "I like tea")
    with caplog.at_level("INFO", logger="inferscale_memory.memory.config"):
        after = open_memory()
    assert after.config.vector_store.provider == "qdrant"
    assert [found["id"] for found in after.get_all(filters=ADA)["results"]] == [fact]
    assert "stay in its embedded Qdrant" in caplog.text


def test_a_new_default_store_is_never_given_up_for_an_old_one(home: Path) -> None:
    (home / "qdrant").mkdir(parents=True)
    assert Settings.read(None).mem0.vector_store.provider == "qdrant"
    (home / "facts.sqlite").touch()
    assert Settings.read(None).mem0.vector_store.provider == "inferscale"


def test_options_of_our_store_are_read_and_refused(tmp_path: Path) -> None:
    ours = {"path": str(tmp_path / "f"), "collection_name": "c", "embedding_model_dims": 7}
    store = Settings.read({"vector_store": {"provider": "inferscale", "config": ours}}).mem0.vector_store
    assert store.config.model_dump() == {**ours, "searcher": "exact", "cache_bytes": 512 << 20}
    with pytest.raises(ValidationError, match="distance"):
        Settings.read({"vector_store": {"provider": "inferscale", "config": {"distance": "l2"}}})


def test_blobs_are_budgets_of_the_engine(tmp_path: Path) -> None:
    settings = Settings.read(
        {"engine": {"provider": "vllm"}, "blobs": {"device_bytes": 1 << 20, "host_bytes": 0}}, folder=tmp_path
    )
    assert settings.engine._options == {
        "provider": "vllm",
        "blobs": {"device_bytes": 1 << 20, "host_bytes": 0},
    }
    assert not Settings.read({"blobs": {"host_bytes": 1}}, folder=tmp_path).engine.chosen


@pytest.mark.parametrize("blobs", [7, {"disk_bytes": 1}, {"host_bytes": -1}, {"host_bytes": 1.5}])
def test_blobs_that_cannot_be_are_refused(tmp_path: Path, blobs: Any) -> None:
    with pytest.raises(ConfigurationError, match="blobs"):
        Settings.read({"blobs": blobs}, folder=tmp_path)


def test_an_engine_that_is_made_takes_no_blobs(tmp_path: Path) -> None:
    made = SimpleNamespace(generate=print, encode=print)
    with pytest.raises(ConfigurationError, match="made already"):
        Settings.read({"engine": made, "blobs": {"host_bytes": 1}}, folder=tmp_path)


@pytest.mark.parametrize("gap", [0, -1, True, "an hour", float("nan"), float("inf")])
def test_a_session_gap_that_cannot_be_is_refused(gap: Any) -> None:
    with pytest.raises(ConfigurationError, match="session_gap"):
        Injection(session_gap=gap)


def test_a_folder_that_cannot_be_made_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigurationError, match="INFERSCALE_HOME"):
        Settings.read(None, folder=tmp_path / "file")
