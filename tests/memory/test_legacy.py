"""Apps written for mem0 0.1 and 1.x: what they call is mapped, with one warning each that names the new form."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from mem0.configs.base import MemoryConfig

from inferscale_memory.memory import AsyncMemory, Memory
from inferscale_memory.memory.config import Settings
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.faces import Settled
from tests.memory.saying import ADA, BEN

Call = Callable[[Settled], Any]


@pytest.fixture
def filled(either: Settled) -> Settled:
    for text in ("I like tea", "I like coffee", "My cat is grey"):
        either.add(text, **ADA, infer=False)
    either.add("Tea at the office", user_id="ada", agent_id="desk", infer=False)
    either.add("Ben likes tea", **BEN, infer=False)
    return either


def memories(found: Any) -> list[str]:
    return [item["memory"] for item in (found if isinstance(found, list) else found["results"])]


ADA_DESK = {"user_id": "ada", "agent_id": "desk"}

OLD_AND_NEW: list[tuple[Call, Call, str]] = [
    (
        lambda m: m.search("tea", user_id="ada"),
        lambda m: m.search("tea", filters=ADA),
        "no user_id= in search(): write search(query, filters={'user_id': ...}, top_k=100)",
    ),
    (
        lambda m: m.search(query="tea", user_id="ada", agent_id="desk", run_id=None),
        lambda m: m.search("tea", filters=ADA_DESK),
        "no user_id=, agent_id=, run_id= in search()",
    ),
    (
        lambda m: m.search("tea", user_id="ada", limit=1),
        lambda m: m.search("tea", filters=ADA, top_k=1),
        "write search(query, filters={'user_id': ...}, top_k=1)",
    ),
    (
        lambda m: m.search("tea", filters=ADA, limit=1),
        lambda m: m.search("tea", filters=ADA, top_k=1),
        "no limit= in search(): write search(query, filters={'user_id': ...}, top_k=1)",
    ),
    (
        lambda m: m.search("tea", user_id="ada", filters={"agent_id": "desk"}),
        lambda m: m.search("tea", filters=ADA_DESK),
        "filters={'agent_id': ..., 'user_id': ...}",
    ),
    (
        lambda m: m.search("tea", "ada"),
        lambda m: m.search("tea", filters=ADA),
        "no user_id by position in search(): write search(query, filters={'user_id': ...}, top_k=100)",
    ),
    (
        lambda m: m.search("tea", "ada", None, None, 1),
        lambda m: m.search("tea", filters=ADA, top_k=1),
        "top_k=1",
    ),
    (
        lambda m: m.search("tea", "ada", None, None, 5, {"agent_id": "desk"}, 0.2),
        lambda m: m.search("tea", filters=ADA_DESK, top_k=5, threshold=0.2),
        "threshold by position",
    ),
    (
        lambda m: m.search("tea", filters=ADA, output_format="v1.1"),
        lambda m: m.search("tea", filters=ADA),
        "no output_format= in search(): write search(query, filters={'user_id': ...})",
    ),
    (
        lambda m: m.search("tea", user_id="ada", output_format="v1.0"),
        lambda m: m.search("tea", filters=ADA)["results"],
        "top_k=100)['results']",
    ),
    (
        lambda m: m.get_all(user_id="ada"),
        lambda m: m.get_all(filters=ADA),
        "no user_id= in get_all(): write get_all(filters={'user_id': ...}, top_k=100)",
    ),
    (
        lambda m: m.get_all("ada"),
        lambda m: m.get_all(filters=ADA),
        "no user_id by position in get_all()",
    ),
    (
        lambda m: m.get_all("ada", "desk", None, 7),
        lambda m: m.get_all(filters=ADA_DESK, top_k=7),
        "top_k=7",
    ),
    (
        lambda m: m.get_all(agent_id="desk", limit=3, output_format="v1.0"),
        lambda m: m.get_all(filters={"agent_id": "desk"}, top_k=3)["results"],
        "no agent_id=, limit=, output_format= in get_all()",
    ),
]


@pytest.mark.parametrize(("old", "new", "says"), OLD_AND_NEW)
def test_an_old_call_finds_what_the_new_one_finds(filled: Settled, old: Call, new: Call, says: str) -> None:
    with pytest.warns(DeprecationWarning, match="mem0 2") as caught:
        found = old(filled)
    assert sorted(memories(found)) == sorted(memories(new(filled)))
    assert type(found) is type(new(filled))
    assert memories(found)
    [warning] = [w for w in caught if w.category is DeprecationWarning]
    assert says in str(warning.message)


@pytest.mark.parametrize(
    ("old", "says"),
    [
        (lambda m: m.add("New", "ada", infer=False), "write add(messages, infer=..., user_id=...)"),
        (lambda m: m.add("New", "ada", None, "r1", {"a": 1}, infer=False), "metadata by position"),
        (lambda m: m.add("New", user_id="ada", infer=False, filters={"x": 1}), "no filters= in add()"),
        (lambda m: m.add("New", user_id="ada", infer=False, output_format="v1.1"), "no output_format="),
    ],
)
def test_an_old_add_adds(either: Settled, old: Call, says: str) -> None:
    with pytest.warns(DeprecationWarning, match="mem0 2") as caught:
        [added] = old(either)["results"]
    assert len(caught) == 1
    assert says in str(caught[0].message)
    assert either.get(added["id"])["user_id"] == "ada"


def test_the_oldest_output_format_is_the_list_alone(either: Settled) -> None:
    with pytest.warns(DeprecationWarning, match=r"\['results'\]"):
        [added] = either.add("New", user_id="ada", infer=False, output_format="v1.0")
    assert added["memory"] == "New"


def test_an_old_call_returns_as_many_as_it_did(either: Settled) -> None:
    messages = [{"role": "user", "content": f"Fact {number}"} for number in range(25)]
    either.add(messages, **ADA, infer=False)
    with pytest.warns(DeprecationWarning, match="mem0 2"):
        assert len(either.get_all(user_id="ada")["results"]) == 25
    assert len(either.get_all(filters=ADA)["results"]) == 20


def test_the_warning_is_at_the_line_that_called(face: str, filled: Settled, loop: Any) -> None:
    memory = filled.itself

    async def awaits() -> None:
        await memory.search("tea", user_id="ada")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if face == "async":
            loop.run(awaits())
        else:
            memory.search("tea", user_id="ada")
    assert [w.filename for w in caught if w.category is DeprecationWarning] == [__file__]


def test_values_are_not_in_the_warning(filled: Settled) -> None:
    with pytest.warns(DeprecationWarning, match="mem0 2") as caught:
        filled.search("tea", user_id="ada")
    assert "ada" not in str(caught[0].message)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda m: m.search("tea", user_id="ada", filters={"user_id": "ben"}), ValueError, "one user_id"),
        (lambda m: m.search("tea", filters=ADA, limit=1, top_k=2), ValueError, "pass top_k alone"),
        (lambda m: m.search("tea", user_id="ada", output_format="v3"), ValueError, "v1.0 or v1.1"),
        (lambda m: m.search("tea", "ada", user_id="ada"), TypeError, "multiple values"),
        (lambda m: m.get_all("ada", "x", "y", 1, {}), TypeError, "mem0's old order"),
        (lambda m: m.search("tea", user_id=None), ValueError, "filters must contain"),
        (lambda m: m.search("tea", user_id="two words"), ValueError, "cannot contain whitespace"),
        (lambda m: m.get_all(user_id=""), ValueError, "cannot be empty"),
        (lambda m: m.search("tea", user_id="ada", limit=-1), ValueError, "Invalid top_k"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_no_version_took_is_refused(either: Settled, call: Call, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        call(either)


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_calls_of_mem0_2_are_not_warned_of(filled: Settled) -> None:
    filled.search("tea", filters=ADA, top_k=3, threshold=0.2)
    filled.get_all(filters=ADA, show_expired=True)
    filled.add("More", user_id="ada", infer=False)
    filled.delete_all("ada", "desk")
    [first, *_] = filled.get_all(filters=ADA)["results"]
    filled.update(first["id"], "Other")


class TestAwaitingFromConfig:
    @pytest.fixture
    def config(self, tmp_path: Any, hashing_embedder: Any, engine: Any) -> dict[str, Any]:
        return {"embedder": hashing_embedder, "engine": engine, "folder": tmp_path / "m"}

    def test_awaited_it_is_the_memory_and_a_warning(self, config: dict[str, Any]) -> None:
        async def old() -> AsyncMemory:
            memory = await AsyncMemory.from_config(config)
            await memory.add("I like tea", **ADA, infer=False)
            return memory

        with pytest.warns(DeprecationWarning, match="does not await from_config") as caught:
            memory = asyncio.run(old())
        assert isinstance(memory, AsyncMemory)
        assert [w.filename for w in caught] == [__file__]
        memory.close()

    @pytest.mark.filterwarnings("error")
    def test_not_awaited_nothing_is_said(self, config: dict[str, Any]) -> None:
        AsyncMemory.from_config(config).close()


class TestConfigurations:
    @pytest.mark.parametrize("name", ["custom_fact_extraction_prompt", "custom_prompt"])
    def test_the_extraction_prompt_has_a_new_name(self, open_face: OpenFace, name: str) -> None:
        with pytest.warns(DeprecationWarning, match=f"{name} is custom_instructions") as caught:
            memory = open_face(**{name: "Only facts about tea."})
        assert memory.custom_instructions == "Only facts about tea."
        assert len(caught) == 1

    def test_the_new_name_wins(self, open_face: OpenFace) -> None:
        with pytest.warns(DeprecationWarning, match="mem0 2"):
            memory = open_face(custom_instructions="New", custom_fact_extraction_prompt="Old")
        assert memory.custom_instructions == "New"

    def test_the_warning_is_at_the_line_that_called(self, tmp_path: Any) -> None:
        with pytest.warns(DeprecationWarning, match="mem0 2") as caught:
            Settings.read({"custom_prompt": "Tea", "folder": tmp_path})
        assert caught[0].filename == __file__

    def test_what_mem0_2_has_nothing_for_is_said(self, open_face: OpenFace) -> None:
        with pytest.warns(DeprecationWarning, match="graph_store has no effect") as caught:
            open_face(graph_store={"provider": "neo4j"}, custom_update_memory_prompt="Merge.")
        assert len(caught) == 1
        assert "custom_update_memory_prompt has no effect" in str(caught[0].message)

    @pytest.mark.parametrize("version", ["v1.0", "v1.1"])
    @pytest.mark.filterwarnings("error::DeprecationWarning")
    def test_versions_are_accepted(self, open_face: OpenFace, version: str) -> None:
        memory = open_face(version=version)
        assert memory.api_version == version
        assert memory.get_all(filters=ADA) == {"results": []}

    def test_mem0s_object_is_taken_as_it_is(self, tmp_path: Any) -> None:
        config = MemoryConfig(version="v1.0")
        assert Settings.read(config, folder=tmp_path).mem0 is config


def test_where_there_is_no_real_store_mem0_answers_as_it_does(
    open_memory: OpenMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mem0's own tests insist that it refuses ids at the top."""
    from unittest.mock import MagicMock

    monkeypatch.setattr("mem0.utils.factory.VectorStoreFactory.create", lambda *args: MagicMock())
    memory: Memory = open_memory()
    with pytest.raises(ValueError, match="Top-level entity parameters"):
        memory.search("tea", user_id="ada")
    with pytest.raises(ValueError, match="Top-level entity parameters"):
        memory.get_all(user_id="ada")
    with pytest.raises(TypeError):
        memory.search("tea", "ada")
