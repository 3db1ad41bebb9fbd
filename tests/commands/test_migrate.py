"""`inferscale migrate`, from real mem0 memories into real ones of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import mem0
import pytest

from inferscale_memory import cli
from inferscale_memory.commands.migrate import source as migrate_source
from inferscale_memory.commands.migrate.source import Source, rows
from inferscale_memory.mem0_adapter.vector_store import Store
from inferscale_memory.memory import Memory
from tests.memory.hashing import DIMENSIONS, HashingEmbedder
from tests.memory.saying import ADA, BEN

MEM0S = ["qdrant", "faiss"]
"""Stores of mem0's that are read."""

OURS = "inferscale"

Config = dict[str, Any]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(migrate_source, "PAGE", 8)
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))


@pytest.fixture
def config(tmp_path: Path, hashing_embedder: Config) -> Callable[[str, str], Config]:
    """A configuration of mem0's with everything under a folder of that name."""

    def make(name: str, provider: str) -> Config:
        place = tmp_path / name / provider
        return {
            "embedder": hashing_embedder,
            "vector_store": {
                "provider": provider,
                "config": {"path": str(place), "embedding_model_dims": DIMENSIONS, "collection_name": name},
            },
            "llm": {"provider": "openai", "config": {"api_key": "none"}},
            "history_db_path": str(tmp_path / name / "history.db"),
        }

    return make


@pytest.fixture
def migrate(tmp_path: Path) -> Callable[..., int]:
    def run(source: Config, target: Config, *options: str) -> int:
        for name, content in (("from", source), ("to", target)):
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        paths = ("--from", str(tmp_path / "from.json"), "--to", str(tmp_path / "to.json"))
        return cli.main(["migrate", *paths, *options])

    return run


@pytest.fixture(params=MEM0S)
def source(request: pytest.FixtureRequest, config: Callable[[str, str], Config]) -> Config:
    """A memory of mem0's with 30 facts of two users, one of them changed, and an entity."""
    return filled(config("theirs", request.param))


@pytest.fixture
def target(config: Callable[[str, str], Config], tmp_path: Path) -> Config:
    return {**config("ours", OURS), "folder": str(tmp_path / "ours")}


def filled(config: Config, count: int = 30) -> Config:
    with theirs(config) as memory:
        ids = [
            memory.add(
                [{"role": "user", "content": f"Fact number {number}", "name": "Ada"}],
                **(ADA if number % 3 else BEN),
                metadata={"number": number},
                infer=False,
            )["results"][0]["id"]
            for number in range(count)
        ]
        memory.update(ids[0], text="Fact number zero")
        memory.entity_store.insert(
            vectors=[memory.embedding_model.embed("Ada")],
            payloads=[{"data": "Ada", "entity_type": "PROPER", "linked_memory_ids": ids[:2], **ADA}],
            ids=[str(uuid4())],
        )
    return config


class theirs:  # noqa: N801
    """mem0's own memory for a block, and its embedded Qdrant closed behind it."""

    def __init__(self, config: Config) -> None:
        self._memory = mem0.Memory.from_config(config)

    def __enter__(self) -> Any:
        return self._memory

    def __exit__(self, *_: object) -> None:
        self._memory.close()
        if getattr(self._memory.vector_store, "is_local", False):
            self._memory.vector_store.client.close()


def payloads(config: Config) -> dict[str, Any]:
    """Id -> payload of everything in a store."""
    with_ours = Source(config)
    try:
        return dict(with_ours.facts())
    finally:
        with_ours.close()


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is embedded."""
    texts: list[str] = []
    inner = HashingEmbedder.embed

    def embed(self: Any, text: str, action: Any = None) -> list[float]:
        texts.append(text)
        return inner(self, text, action)

    monkeypatch.setattr(HashingEmbedder, "embed", embed)
    return texts


@pytest.mark.parametrize("into", [*MEM0S, OURS])
def test_every_fact_arrives_as_it_was(
    source: Config, into: str, config: Callable[[str, str], Config], migrate: Callable[..., int], capsys: Any
) -> None:
    before = payloads(source)
    target = config("ours", into)
    assert migrate(source, target) == 0
    assert capsys.readouterr().out.startswith("30 facts: 30 copied, 0 updated, 0 were there")
    assert payloads(target) == before
    assert payloads(source) == before
    with Memory.from_config(target) as memory:
        assert [f["memory"] for f in memory.search("number zero", filters=BEN, top_k=1)["results"]] == [
            "Fact number zero"
        ]
        assert len(memory.get_all(filters=ADA, top_k=100)["results"]) == 20
        [zero] = [name for name, payload in before.items() if payload["data"] == "Fact number zero"]
        assert [event["event"] for event in memory.history(zero)] == ["ADD", "UPDATE"]
        [entity] = dict(rows(memory.entity_store)).values()
        assert (entity["data"], len(entity["linked_memory_ids"])) == ("Ada", 2)
        journal = memory._core.journal if memory._core else None
        assert journal is not None
        assert len(journal.facts.get(before)) == 30, "they can be encoded"


def test_a_second_run_changes_and_embeds_nothing(
    source: Config, target: Config, migrate: Callable[..., int], embedded: list[str], capsys: Any
) -> None:
    migrate(source, target)
    once = payloads(target)
    capsys.readouterr()
    embedded.clear()
    assert migrate(source, target) == 0
    assert "30 facts: 0 copied, 0 updated, 30 were there, 0 were" in capsys.readouterr().out
    assert embedded == []
    assert payloads(target) == once
    with Memory.from_config(target) as memory:
        assert all(len(memory.history(name)) in (1, 2) for name in once)


def test_a_run_that_was_interrupted_is_continued(
    source: Config,
    target: Config,
    migrate: Callable[..., int],
    embedded: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    inner, left = HashingEmbedder.embed_batch, [3]

    def embed_batch(self: Any, texts: Any, action: Any = "add") -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return inner(self, texts, action)

    monkeypatch.setattr(HashingEmbedder, "embed_batch", embed_batch)
    assert migrate(source, target, "--batch", "7") == 130
    assert len(payloads(target)) == 14
    embedded.clear()
    assert migrate(source, target, "--batch", "7") == 0
    assert "30 facts: 16 copied, 0 updated, 14 were there" in capsys.readouterr().out
    assert len([text for text in embedded if text.startswith("Fact")]) == 16
    assert payloads(target) == payloads(source)


def test_a_dry_run_counts_and_writes_nothing(
    source: Config, target: Config, migrate: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    assert migrate(source, target, "--dry-run") == 0
    assert capsys.readouterr().out == "30 facts of 2 owners, 1 entities, 31 events. Nothing was written.\n"
    assert not (tmp_path / "ours").exists()


def test_of_two_versions_the_later_one_stays(
    source: Config, target: Config, migrate: Callable[..., int], capsys: Any
) -> None:
    migrate(source, target)
    first, second = sorted(payloads(source))[:2]
    with Memory.from_config(target) as memory:
        memory.update(first, text="Changed here")
    with theirs(source) as memory:
        memory.update(second, text="Changed there")
    capsys.readouterr()
    assert migrate(source, target) == 0
    assert "0 copied, 1 updated, 28 were there, 1 were there in a later" in capsys.readouterr().out
    found = payloads(target)
    assert (found[first]["data"], found[second]["data"]) == ("Changed here", "Changed there")


def test_facts_of_early_versions_of_mem0_get_what_they_lack(
    config: Callable[[str, str], Config], target: Config, migrate: Callable[..., int]
) -> None:
    old = config("theirs", "qdrant")
    name = str(uuid4())
    with theirs(old) as memory:
        payload = {"data": "I like tea", "created_at": "2024-05-12T10:00:00+00:00", **ADA}
        memory.vector_store.insert(vectors=[[1.0] * DIMENSIONS], payloads=[payload], ids=[name])
    assert migrate(old, target) == 0
    found = payloads(target)[name]
    assert {"hash", "text_lemmatized", *payload} == set(found)
    with Memory.from_config(target) as memory:
        assert memory.get(name)["created_at"] == payload["created_at"]


def test_facts_that_did_not_arrive_are_status_1(
    source: Config,
    target: Config,
    migrate: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    inner = Store.insert

    def insert(self: Any, vectors: Sequence[Any], payloads: Any = None, ids: Any = None) -> Any:
        lost = len(vectors) > 1
        return inner(self, vectors[lost:], payloads[lost:], ids[lost:])

    monkeypatch.setattr(Store, "insert", insert)
    assert migrate(source, target) == 1
    assert "1 of 30 facts are not in the target after all" in " ".join(capsys.readouterr().err.split())


def test_a_store_that_fails_is_one_line_that_says_how_to_go_on(
    source: Config, target: Config, migrate: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def embed_batch(self: Any, texts: Any, action: Any = "add") -> Any:
        raise TimeoutError("no answer")

    monkeypatch.setattr(HashingEmbedder, "embed_batch", embed_batch)
    assert migrate(source, target) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "TimeoutError: no answer" in said
    assert "run the same command again" in said


def test_a_source_without_facts_is_status_1(
    config: Callable[[str, str], Config], target: Config, migrate: Callable[..., int], capsys: Any
) -> None:
    empty = filled(config("theirs", "qdrant"), count=1)
    empty["vector_store"]["config"]["collection_name"] = "elsewhere"
    assert migrate(empty, target) == 1
    assert "holds no facts" in capsys.readouterr().err


def test_what_cannot_work_is_one_line_and_status_2(
    source: Config, target: Config, migrate: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    lost = {**source, "vector_store": {"provider": "qdrant", "config": {"path": str(tmp_path / "lost")}}}
    for one, says in ((source, "are the same store"), (lost, "there is no qdrant store at")):
        assert migrate(one, source if one is source else target) == 2
        assert says in capsys.readouterr().err
    unknown = {**source, "vector_store": {"provider": "cupboard", "config": {}}}
    for one, other in ((unknown, target), (source, unknown)):
        assert migrate(one, other) == 2
        assert "cannot be opened (" in capsys.readouterr().err
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "torn.json").write_text("{")
    for name, says in (("list", "no JSON object"), ("torn", "is no JSON"), ("none", "cannot be read")):
        path = str(tmp_path / f"{name}.json")
        assert cli.main(["migrate", "--from", path, "--to", path]) == 2
        assert says in capsys.readouterr().err


def test_a_memory_of_ours_can_be_a_source(
    source: Config, target: Config, migrate: Callable[..., int], tmp_path: Path, config: Any
) -> None:
    mine = {name: target[name] for name in ("embedder", "folder")}
    assert migrate(source, mine) == 0
    further = config("further", "faiss")
    assert migrate(mine, further) == 0
    assert payloads(further) == payloads(source)


class Capped:
    """A store that lists no more than it pleases."""

    def __init__(self, holds: int, cap: int, *, told: int | None = None, fails: bool = False) -> None:
        self.holds, self.cap, self.told, self.fails = holds, cap, told, fails

    def list(self, filters: Any = None, top_k: int = 100) -> Any:
        if self.fails and top_k > self.cap:
            raise RuntimeError("the window is too large")
        count = min(self.holds, self.cap, top_k)
        return [[type("Row", (), {"id": str(n), "payload": {"data": "x"}})() for n in range(count)]]

    def col_info(self) -> Any:
        return {"count": self.told}


@pytest.mark.parametrize("holds", [0, 7, 8, 9, 80, 81, 500])
def test_a_store_without_pages_is_asked_for_more_until_that_is_all(holds: int) -> None:
    assert len(list(rows(Capped(holds, 10_000, told=holds)))) == holds


@pytest.mark.parametrize("store", [Capped(100, 8), Capped(100, 8, told=100), Capped(100, 80, fails=True)])
def test_a_part_is_never_taken_for_the_whole(store: Capped) -> None:
    with pytest.raises(Exception, match=r"may hold more|fails when it is asked for more"):
        list(rows(store))
