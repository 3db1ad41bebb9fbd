"""A memory over a server: the app holds no weights, and what it forgets is forgotten there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.connector import secret
from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.remote import RemoteEngine
from inferscale_memory.errors import ConfigurationError, EngineError
from inferscale_memory.memory import AsyncMemory, Memory
from tests.memory.saying import ADA, injected, say, texts
from tests.serving import SETTINGS, Server, free_port

FACTS = ("My cat is called Miso", "I moved to Porto", "My sister is a nurse")
Open = Callable[..., Memory]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(secret.VARIABLE, "a secret of this test")
        with Server(str(model), *SETTINGS, log=tmp_path_factory.mktemp("log") / "server") as server:
            yield server


@pytest.fixture
def config(server: Server, hashing_embedder: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    engine = {"provider": "remote", "base_url": server.url}
    return {"embedder": hashing_embedder, "engine": engine, "folder": tmp_path / "memory"}


def blobs(memory: Memory) -> tuple[str, list[str]]:
    """Whose Ada's blobs are, and the keys of all that the ledger knows."""
    core = memory._core
    assert core is not None
    ids = [row["id"] for row in memory.get_all(filters=ADA)["results"]]
    entries = core.journal.ledger.get(ids, core.engine.get().fingerprint).values()
    [owner] = {entry.owner for entry in entries}
    return owner, [entry.key for entry in entries]


@pytest.mark.engine
def test_what_was_said_is_injected_at_the_server_and_answers_as_text_does(config: dict[str, Any]) -> None:
    with Memory.from_config(config) as memory:
        say(memory, *FACTS)
        memory.flush()
        prepared = memory.prepare("What is my cat called?", **ADA)
        reply = memory.chat("What is my cat called?", **ADA, max_tokens=4)
        assert set(injected(reply)) == set(FACTS)
        assert reply.completion.injected_tokens == sum(
            len(part.ids) for part in prepared.prompt.segments[:-1]
        )
        assert reply.completion.refused is None
        *_, last = memory.chat("What is my sister?", **ADA, max_tokens=4, stream=True)
        assert last.reply is not None
        assert set(injected(last.reply)) == set(FACTS)


@pytest.mark.engine
def test_one_memory_in_its_own_context_is_exact(config: dict[str, Any]) -> None:
    with Memory.from_config(config) as memory:
        say(memory, "The one and only")
        memory.flush()
        options = SamplingOptions(logprobs=5)
        path = [
            memory.chat("What?", **ADA, max_tokens=3, inject=inject, options=options)
            for inject in (True, False)
        ]
    assert path[0].completion.injected_tokens > 0
    assert path[1].completion.injected_tokens == 0
    for one, other in zip(*(reply.completion.logprobs or () for reply in path), strict=True):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.engine
def test_what_is_deleted_is_forgotten_at_the_server(config: dict[str, Any], server: Server) -> None:
    with Memory.from_config(config) as memory:
        cat, *_ = say(memory, *FACTS)
        memory.flush()
        owner, keys = blobs(memory)
        with RemoteEngine(server.url) as other:
            assert len(keys) == 3
            assert other.at_hand(owner, keys) == set(keys)
            memory.delete(cat)
            assert len(other.at_hand(owner, keys)) < 3
            assert memory.audit("Miso").clean
            reply = memory.chat("What is my cat called?", **ADA, max_tokens=2)
            assert "Miso" not in "".join(texts(reply))


@pytest.mark.engine
def test_a_process_that_has_asked_for_nothing_yet_forgets_at_the_server_too(
    config: dict[str, Any], server: Server
) -> None:
    """The blobs of an engine in process die with it; these do not."""
    with Memory.from_config(config) as memory:
        say(memory, *FACTS)
        memory.flush()
        owner, keys = blobs(memory)
    with RemoteEngine(server.url) as other:
        assert other.at_hand(owner, keys) == set(keys)
        with Memory.from_config(config) as memory:
            memory.delete_all(**ADA)
        assert other.at_hand(owner, keys) == set()


@pytest.mark.engine
def test_the_async_face_over_a_server(config: dict[str, Any]) -> None:
    async def work() -> None:
        async with AsyncMemory.from_config(config) as memory:
            await memory.add("My cat is called Miso", infer=False, **ADA)
            await memory.flush()
            reply = await memory.chat("What is my cat called?", **ADA, max_tokens=3)
            assert injected(reply) == ["My cat is called Miso"]
            assert reply.completion.injected_tokens > 0

    asyncio.run(work())


# -- without a server ---


def away(hashing_embedder: dict[str, Any], folder: Path) -> dict[str, Any]:
    engine = {"provider": "remote", "base_url": f"http://127.0.0.1:{free_port()}"}
    return {"embedder": hashing_embedder, "engine": engine, "folder": folder}


def test_facts_are_kept_while_the_server_is_away(hashing_embedder: dict[str, Any], tmp_path: Path) -> None:
    with Memory.from_config(away(hashing_embedder, tmp_path / "memory")) as memory:
        say(memory, *FACTS)
        assert len(memory.get_all(filters=ADA)["results"]) == 3
        with pytest.raises(EngineError, match="inferscale serve"):
            memory.flush()
        with pytest.raises(EngineError, match="inferscale serve"):
            memory.chat("What is my cat called?", **ADA)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "base_url"),
        ({"base_url": "http://127.0.0.1:1", "max_model_len": 5}, "leave out max_model_len"),
        ({"base_url": "127.0.0.1"}, "http://127.0.0.1:8000"),
        ({"base_url": "http://127.0.0.1:1", "tokenizer": "/nowhere"}, "folder"),
        ({"base_url": "http://127.0.0.1:1", "blobs": {"device_bytes": 1}}, "--device-bytes"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_at_once(
    options: dict[str, Any], remedy: str, hashing_embedder: dict[str, Any], tmp_path: Path
) -> None:
    engine = {"provider": "remote", **options}
    with pytest.raises(ConfigurationError, match=remedy):
        Memory.from_config({"embedder": hashing_embedder, "engine": engine, "folder": tmp_path / "memory"})
