"""It is mem0's Memory: what mem0's apps and mem0's own tests rely on."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import MagicMock

import mem0
import pytest
from mem0.configs.base import MemoryConfig
from mem0.memory import main as mem0_main

from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenMemory
from tests.memory.hashing import DIMENSIONS
from tests.memory.saying import ADA, say


def test_it_is_one(memory: Memory) -> None:
    assert isinstance(memory, mem0.Memory)


@pytest.mark.parametrize(
    "method", ["add", "update", "delete", "delete_all", "search", "get", "get_all", "history"]
)
def test_its_methods_take_mem0s_arguments(method: str) -> None:
    ours, mem0s = (inspect.signature(getattr(face, method)) for face in (Memory, mem0.Memory))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in mem0s.parameters.values()
    ]


def test_add_search_get_update_delete_history_answer_as_mem0_does(memory: Memory) -> None:
    added = memory.add("I like tea", **ADA, infer=False)
    [result] = added["results"]
    assert result == {**result, "memory": "I like tea", "event": "ADD", "role": "user", "actor_id": None}
    fact = result["id"]
    assert [found["id"] for found in memory.search("tea", filters=ADA)["results"]] == [fact]
    assert memory.get(fact)["memory"] == "I like tea"
    assert memory.update(fact, text="I like coffee") == {"message": "Memory updated successfully!"}
    assert [found["memory"] for found in memory.get_all(filters=ADA)["results"]] == ["I like coffee"]
    assert memory.delete(memory_id=fact) == {"message": "Memory deleted successfully!"}
    assert memory.get(fact) is None
    assert [event["event"] for event in memory.history(fact)] == ["ADD", "UPDATE", "DELETE"]
    assert memory.delete_all(**ADA) == {"message": "Memories deleted successfully!"}


def test_an_expired_memory_never_enters_a_prompt(memory: Memory) -> None:
    memory.add("old news", **ADA, infer=False, expiration_date="2020-01-01")
    assert memory.prepare("news?", **ADA).memories == ()


def test_a_search_of_mem0s_own_keeps_its_threshold(memory: Memory) -> None:
    say(memory, "something")
    assert memory.search("else entirely", filters=ADA, threshold=0.9)["results"] == []
    assert memory.prepare("else entirely", **ADA).memories != ()


def test_an_instance_made_without_init_behaves_as_mem0s() -> None:
    bare = Memory.__new__(Memory)
    with pytest.raises(ValueError, match="timestamp"):
        Memory.add(bare, "hello", timestamp=123)
    with pytest.raises(Exception, match="At least one of 'user_id', 'agent_id', or 'run_id'"):
        Memory.add(bare, "hello")
    with pytest.raises(ValueError, match="filters must contain"):
        Memory.search(bare, "hello")
    with pytest.raises(AttributeError):
        _ = bare.vector_store
    bare.vector_store = store = MagicMock()
    assert bare.vector_store is store


def test_a_mock_of_the_class_can_be_passed_as_self(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mem0's own tests do."""
    mock = MagicMock(spec=Memory)
    mock.vector_store = MagicMock()
    mock.vector_store.list.side_effect = [([MagicMock(id="a")], None), ([], None)]
    Memory.delete_all(mock, user_id="ada")
    mock._delete_memory.assert_called_once_with("a")


def test_it_can_be_made_from_mem0s_configuration_object(
    tmp_path: Path, hashing_embedder: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    store = {"path": str(tmp_path / "q"), "embedding_model_dims": DIMENSIONS}
    config = MemoryConfig(
        embedder=hashing_embedder,
        vector_store={"provider": "qdrant", "config": store},
        llm={"provider": "openai", "config": {"api_key": "none"}},
        history_db_path=str(tmp_path / "history.db"),
    )
    with Memory(config) as memory:
        say(memory, "I like tea")
        memory.flush()
        assert len(memory.get_all(filters=ADA)["results"]) == 1
        assert memory._core is not None
        assert memory._core.engine.started is None, "nobody asked for an engine"


def test_mocked_stores_are_left_alone(open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MagicMock()
    monkeypatch.setattr(mem0_main.VectorStoreFactory, "create", lambda *args: store)
    assert open_memory().vector_store is store


def test_closing_gives_back_every_file(open_memory: OpenMemory) -> None:
    for number in range(3):
        memory = open_memory()
        assert len(memory.get_all(filters=ADA)["results"]) == number
        say(memory, f"opened {number} times before")
        memory.close()
        memory.close()
    with pytest.raises(RuntimeError, match="closed"):
        memory.chat("?", **ADA)


def test_importing_the_package_imports_neither_mem0_nor_torch() -> None:
    code = "import sys, inferscale_memory; assert not {'mem0', 'torch', 'vllm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def run(code: str, home: Path) -> str:
    """Output of `code` in a process in which nobody has set anything of mem0's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEM0")}
    environment |= {"INFERSCALE_HOME": str(home), "HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()


IMPORTS = ("from inferscale_memory import Memory", "import mem0")


@pytest.mark.parametrize("imports", [IMPORTS, IMPORTS[::-1]], ids=["ours first", "mem0 first"])
def test_telemetry_is_off_and_mem0s_files_lie_under_our_folder(imports: Sequence[str], tmp_path: Path) -> None:
    code = """
Memory.__init__
from mem0.configs import base
from mem0.memory import main, setup, telemetry
print(telemetry.MEM0_TELEMETRY, main.MEM0_TELEMETRY, setup.mem0_dir, main.mem0_dir, base.mem0_dir)
"""
    folder = tmp_path / "mem0"
    assert run("\n".join(imports) + code, tmp_path) == f"False False {folder} {folder} {folder}"
    assert folder.is_dir()


@pytest.mark.parametrize("imports", [IMPORTS, IMPORTS[::-1]], ids=["ours first", "mem0 first"])
def test_mem0s_folder_is_the_one_that_the_user_has_set(imports: Sequence[str], tmp_path: Path) -> None:
    own = tmp_path / "own"
    code = f"""
import os
os.environ["MEM0_DIR"] = {str(own)!r}
{imports[0]}
{imports[1]}
from mem0.memory import main, setup
print(Memory and setup.mem0_dir, main.mem0_dir)
"""
    assert run(code, tmp_path) == f"{own} {own}"


def test_telemetry_that_the_user_wants_stays_on(tmp_path: Path) -> None:
    code = """
import os
os.environ["MEM0_TELEMETRY"] = "True"
from inferscale_memory import Memory
from mem0.memory import telemetry
print(Memory and telemetry.MEM0_TELEMETRY, flush=True)
os._exit(0)  # without a last report
"""
    assert run(code, tmp_path) == "True"
