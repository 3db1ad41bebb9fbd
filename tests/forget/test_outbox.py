"""An engine that fails when it is to forget is told again, and nobody but it has any trouble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.errors import EngineError
from inferscale_memory.journal import PendingForget
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.faces import Settled
from tests.memory.raw import files_with
from tests.memory.saying import ADA, say
from tests.memory.watched import WatchedEngine

SECRET, OTHER = "My safe opens with 4711-Q", "I water the ficus on Mondays"


class Deaf:
    """An engine's `forget` that fails while it is set, and counts."""

    def __init__(self, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails, self.calls = True, 0
        self._inner = engine.forget
        monkeypatch.setattr(engine, "forget", self)

    def __call__(self, *args: Any) -> int:
        self.calls += 1
        if self.fails:
            raise EngineError("the engine is busy")
        return self._inner(*args)


@pytest.fixture
def deaf(engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch) -> Deaf:
    return Deaf(engine, monkeypatch)


def blob_of(memory: Settled | Memory, engine: WatchedEngine, fact: str) -> str:
    core = memory._core if isinstance(memory, Memory) else memory.itself._core
    return str(core.journal.ledger.get([fact], engine.fingerprint)[fact].key)


def test_a_delete_succeeds_and_the_audit_tells_of_the_blob(
    either: Settled, engine: WatchedEngine, deaf: Deaf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [fact] = [result["id"] for result in either.add(SECRET, **ADA, infer=False)["results"]]
    either.flush()
    key = blob_of(either, engine, fact)
    either.delete(fact)
    assert files_with(tmp_path, "4711-Q") == []
    assert "could not be told" in caplog.text
    assert engine.at_hand("user:ada", [key]) == {key}
    audit = either.audit(SECRET)
    assert (audit.clean, audit.pending) == (False, 1)
    either.flush()
    assert either.audit(SECRET).pending == 1, "it failed again"
    deaf.fails = False
    either.flush()
    assert engine.at_hand("user:ada", [key]) == set()
    assert either.audit(SECRET).clean


def test_the_next_forgetting_tells_it_again(memory: Memory, engine: WatchedEngine, deaf: Deaf) -> None:
    first, second = say(memory, SECRET, OTHER)
    memory.flush()
    key = blob_of(memory, engine, first)
    memory.update(first, "other words")
    assert memory.audit(SECRET).pending == 1
    deaf.fails = False
    memory.delete(second)
    assert engine.at_hand("user:ada", [key]) == set()
    assert memory.audit(SECRET).clean


def test_the_engine_is_told_before_it_is_noted_that_all_is_done(
    memory: Memory, deaf: Deaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    [fact] = say(memory, SECRET)
    memory.flush()
    assert memory._core is not None
    journal = memory._core.journal
    begun: list[int] = []
    monkeypatch.setattr(deaf, "_inner", lambda *args: begun.append(len(journal.intents.unfinished())) or 0)
    deaf.fails = False
    memory.delete(fact)
    assert begun == [1]


def test_the_next_start_tells_an_engine_that_is_still_there(
    open_face: OpenFace, engine: WatchedEngine, deaf: Deaf
) -> None:
    memory = open_face()
    [fact] = [result["id"] for result in memory.add(SECRET, **ADA, infer=False)["results"]]
    memory.flush()
    key = blob_of(memory, engine, fact)
    memory.delete(fact)
    memory.close()
    assert open_face().audit(SECRET).pending == 1
    deaf.fails = False
    assert open_face().audit(SECRET).clean
    assert engine.at_hand("user:ada", [key]) == set()


def test_what_an_engine_of_a_process_held_is_gone_with_it(
    open_memory: OpenMemory, model: Path, deaf: Deaf
) -> None:
    memory = open_memory()
    [fact] = say(memory, SECRET)
    memory.flush()
    memory.delete(fact)
    memory.close()
    memory = open_memory(engine={"provider": "transformers", "model": str(model), "device": "cpu"})
    assert memory.audit(SECRET).clean
    assert memory._core is not None
    assert memory._core.engine.started is None


def test_a_server_that_was_not_asked_yet_hears_of_it_later(
    open_memory: OpenMemory, engine: WatchedEngine
) -> None:
    memory = open_memory()
    assert memory._core is not None
    lazy, outbox = memory._core.engine, memory._core.outbox
    lazy._engine, lazy._options = None, {"provider": "a server"}
    outbox.send([PendingForget("user:ada", ("key",), ())])
    outbox.start()
    assert outbox.pending == 1
    lazy._engine = engine
    outbox.retry()
    assert outbox.pending == 0
    assert engine.forgotten == [("user:ada", ("key",), ())]


def test_an_encode_that_came_too_late_is_told_again_too(
    memory: Memory, engine: WatchedEngine, deaf: Deaf
) -> None:
    [fact] = say(memory, SECRET)
    memory.flush()
    [later] = say(memory, OTHER)
    memory.flush()
    assert memory._core is not None

    def forgotten_meanwhile() -> None:
        engine.before_return = lambda: None
        memory.delete(later)

    memory.update(later, "the ficus again")
    engine.before_return = forgotten_meanwhile
    memory.flush()
    assert memory._core.encoder.failed == {}
    assert memory.audit("the ficus again").pending >= 1
    deaf.fails = False
    memory.flush()
    assert memory.audit("the ficus again").clean
    assert memory.get(fact) is not None
