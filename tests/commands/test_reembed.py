"""A store knows by which model its vectors were made: another one is refused by name, and can embed them anew."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mem0.utils.factory import EmbedderFactory

from inferscale_memory import StoreError
from inferscale_memory.cli import main
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenMemory
from tests.memory.hashing import HashingEmbedder

ADA = {"user_id": "ada"}
NAMES = [f"I own the book number {number}" for number in range(40)]


class WideEmbedder(HashingEmbedder):
    """Vectors of another length and of other directions. Fails when it has been asked `fails_after` times."""

    fails_after: int | None = None
    texts = 0

    def embed(self, text: str, memory_action: Any = None) -> list[float]:
        narrow = super().embed(text[::-1])
        return (narrow + narrow[::-1])[: self.config.embedding_dims]

    def embed_batch(self, texts: list[str], memory_action: Any = "add") -> list[list[float]]:
        kind = type(self)
        if kind.fails_after is not None and kind.texts + len(texts) > kind.fails_after:
            raise ConnectionError("the service is away")
        kind.texts += len(texts)
        return [self.embed(text) for text in texts]


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """mem0's configuration of an embedder of another model."""
    monkeypatch.setitem(EmbedderFactory.provider_to_class, "ollama", "tests.commands.test_reembed.WideEmbedder")
    monkeypatch.setattr(WideEmbedder, "fails_after", None)
    monkeypatch.setattr(WideEmbedder, "texts", 0)
    return lambda dims=100: {"provider": "ollama", "config": {"model": "org/wide", "embedding_dims": dims}}


@pytest.fixture
def folder(tmp_path: Path, open_memory: OpenMemory) -> Path:
    with open_memory() as memory:
        memory.add([{"role": "user", "content": name} for name in NAMES], infer=False, **ADA)
    return tmp_path / "memory"


def nearest(memory: Memory) -> str:
    return str(memory.search("number 7", filters=ADA)["results"][0]["memory"])


def config_of(folder: Path, embedder: dict[str, Any]) -> Path:
    path = folder.parent / "config.json"
    path.write_text(json.dumps({"embedder": embedder, "folder": str(folder)}), encoding="utf-8")
    return path


@pytest.mark.parametrize("dims", [64, 100], ids=["same size", "another size"])
def test_another_model_is_refused_by_name(
    folder: Path, open_memory: OpenMemory, other: Callable[..., dict[str, Any]], dims: int
) -> None:
    with pytest.raises(StoreError, match=r"'hashing'.*--reembed"):
        open_memory(embedder=other(dims))
    assert nearest(open_memory()) == NAMES[7]


@pytest.mark.parametrize("dims", [64, 100], ids=["same size", "another size"])
def test_it_embeds_them_anew(
    folder: Path,
    open_memory: OpenMemory,
    other: Callable[..., dict[str, Any]],
    dims: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_of(folder, other(dims))
    assert main(["migrate", "--reembed", str(config), "--dry-run"]) == 0
    assert main(["migrate", "--reembed", str(config)]) == 0
    assert "40 of 40 vectors" in capsys.readouterr().out
    memory = open_memory(embedder=other(dims))
    assert nearest(memory) == NAMES[7]
    assert {row["memory"] for row in memory.get_all(filters=ADA, top_k=100)["results"]} == set(NAMES)
    memory.add("I own a horse", infer=False, **ADA)
    memory.close()
    with pytest.raises(StoreError, match="'wide'"):
        open_memory()
    assert main(["migrate", "--reembed", str(config)]) == 0
    assert "0 of 41 vectors" in capsys.readouterr().out


def test_interrupted_it_goes_on_where_it_was(
    folder: Path,
    open_memory: OpenMemory,
    other: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = config_of(folder, other())
    monkeypatch.setattr(WideEmbedder, "fails_after", 20)
    assert main(["migrate", "--reembed", str(config), "--batch", "8"]) == 2
    assert "goes on where it was" in capsys.readouterr().err
    for embedder in (other(), None):
        with pytest.raises(StoreError, match=r"being embedded anew by 'wide'|64 numbers"):
            open_memory(**({} if embedder is None else {"embedder": embedder}))
    monkeypatch.setattr(WideEmbedder, "fails_after", None)
    monkeypatch.setattr(WideEmbedder, "texts", 0)
    assert main(["migrate", "--reembed", str(config), "--batch", "8"]) == 0
    assert WideEmbedder.texts == 24, "16 had been embedded"
    assert nearest(open_memory(embedder=other())) == NAMES[7]


def test_an_empty_collection_takes_every_model_and_every_size(
    folder: Path, open_memory: OpenMemory, other: Callable[..., dict[str, Any]]
) -> None:
    with open_memory() as memory:
        memory.delete_all(**ADA)
    memory = open_memory(embedder=other())
    memory.add(NAMES[7], infer=False, **ADA)
    assert nearest(memory) == NAMES[7]


def test_a_store_that_was_made_before_records_the_model_it_is_opened_with(
    folder: Path, open_memory: OpenMemory, other: Callable[..., dict[str, Any]]
) -> None:
    with closing(sqlite3.connect(folder / "facts.sqlite")) as db:
        db.execute("ALTER TABLE collections DROP COLUMN model")
        db.execute("DROP TABLE reembedding")
        db.execute("PRAGMA user_version = 1")
        db.commit()
    with open_memory() as memory:
        assert nearest(memory) == NAMES[7]
    with pytest.raises(StoreError, match="'hashing'"):
        open_memory(embedder=other(64))


def test_other_stores_are_known_by_the_journal(
    open_memory: OpenMemory, other: Callable[..., dict[str, Any]]
) -> None:
    qdrant = {"vector_store": {"provider": "qdrant"}}
    with open_memory(**qdrant) as memory:
        memory.add(NAMES[7], infer=False, **ADA)
    with pytest.raises(StoreError, match=r"'hashing'.*--from --to"):
        open_memory(embedder=other(64), **qdrant)
    with open_memory(**qdrant) as memory:
        assert nearest(memory) == NAMES[7]
