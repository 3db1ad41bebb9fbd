"""What is the async face's own: the loop stays free, tasks do not mix, and a cancelled call leaves no half."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from inferscale_memory.engine.runner import Direct, Threads, run
from inferscale_memory.errors import ExtractionError
from inferscale_memory.memory import AsyncMemory
from inferscale_memory.write.writer import owner_under_way
from tests.memory.conftest import opening
from tests.memory.saying import ADA, injected, texts
from tests.memory.test_faces import Extractor
from tests.memory.watched import WatchedEngine

Opens = Callable[..., AsyncMemory]


@pytest.fixture
def open_async(tmp_path: Path, engine: WatchedEngine, hashing_embedder: Any) -> Iterator[Opens]:
    yield from opening(AsyncMemory.from_config, tmp_path, engine, hashing_embedder)


@pytest.fixture
def memory(open_async: Opens) -> AsyncMemory:
    return open_async()


def user(number: int) -> dict[str, str]:
    return {"user_id": f"user{number}"}


def live_turns(memory: AsyncMemory) -> list[str]:
    assert memory._core is not None
    rows = memory._core.journal.database.read("SELECT text FROM turns WHERE text IS NOT NULL ORDER BY number")
    return [text for (text,) in rows]


class Pulse:
    """How long the event loop was away at most, in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def __aenter__(self) -> Pulse:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.sleep(0)
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.longest = max(self.longest, time.monotonic() - before)


class TestTheLoopStaysFree:
    """Everything slow takes a second here, and the loop is never away for that long."""

    SLOW = 1.0

    async def watched(self, work: Any) -> float:
        async with Pulse() as pulse:
            await work
        return pulse.longest

    def slowly(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(self.SLOW)
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    def test_while_turns_are_logged(self, memory: AsyncMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        assert memory._core is not None
        self.slowly(monkeypatch, memory._core.journal.turns, "append")
        assert asyncio.run(self.watched(memory.add("Tea", **ADA, infer=False))) < self.SLOW / 2

    def test_while_the_engine_forgets(
        self, memory: AsyncMemory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def work() -> float:
            [added] = (await memory.add("Tea", **ADA, infer=False))["results"]
            await memory.flush()
            self.slowly(monkeypatch, engine, "forget")
            return await self.watched(memory.delete(added["id"]))

        assert asyncio.run(work()) < self.SLOW / 2

    def test_while_a_prompt_is_composed_and_answered(
        self, memory: AsyncMemory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def work() -> list[float]:
            await memory.add("Tea", **ADA, infer=False)
            await memory.flush()
            await memory.chat("Tea?", **ADA, max_tokens=1)
            assert memory._core is not None
            self.slowly(monkeypatch, memory._core.journal.ledger, "get")
            self.slowly(monkeypatch, engine, "generate")
            session = memory.session(**ADA)
            return [
                await self.watched(memory.chat("Tea?", **ADA, max_tokens=1)),
                await self.watched(session.chat("Tea?")),
            ]

        assert max(asyncio.run(work())) < self.SLOW / 2

    def test_while_an_encode_is_waited_for(self, memory: AsyncMemory, engine: WatchedEngine) -> None:
        async def work() -> float:
            engine.gate.clear()
            await memory.add("Tea", **ADA, infer=False)
            asyncio.get_running_loop().call_later(self.SLOW, engine.gate.set)
            return await self.watched(memory.flush())

        assert asyncio.run(work()) < self.SLOW / 2

    def test_while_failed_calls_are_read(self, memory: AsyncMemory, monkeypatch: pytest.MonkeyPatch) -> None:
        memory.llm = Extractor(says="no JSON")

        async def work() -> float:
            with pytest.raises(ExtractionError):
                await memory.add("Tea", **ADA)
            assert memory._core is not None
            failed = memory._core.journal.failed_adds
            for read in ("all", "get"):
                self.slowly(monkeypatch, failed, read)
            return await self.watched(memory.retry_failed())

        assert asyncio.run(work()) < self.SLOW / 2

    def test_while_it_closes(self, open_async: Opens, engine: WatchedEngine) -> None:
        async def work() -> float:
            async with open_async() as memory:
                engine.gate.clear()
                await memory.add("Tea", **ADA, infer=False)
                asyncio.get_running_loop().call_later(self.SLOW, engine.gate.set)
                closing = memory.__aexit__(None, None, None)
                return await self.watched(closing)

        assert asyncio.run(work()) < self.SLOW / 2


class TestTasksDoNotMix:
    def test_turns_of_many_coroutines_stay_with_their_facts(
        self, memory: AsyncMemory, engine: WatchedEngine
    ) -> None:
        async def one(number: int) -> None:
            messages = [{"role": "user", "content": f"{number} says {part}"} for part in ("one", "two")]
            await memory.add(messages, **user(number), infer=False)

        async def work() -> None:
            await asyncio.gather(*(one(number) for number in range(30)))
            await memory.flush()

        asyncio.run(work())
        assert memory._core is not None
        for request in engine.encoded_facts:
            number = request.owner.removeprefix("user:user")
            assert all(
                text.endswith((f"{number} says one\n", f"{number} says two\n"))
                for text in engine.texts(request)
            )
            others = [f" {n} says " for n in range(30) if str(n) != number]
            assert not any(other in engine.text(request) for other in others)
        facts = memory._core.journal.database.read("SELECT COUNT(*) FROM facts")
        assert facts == [(60,)]

    def test_what_mem0_asks_the_engine_in_a_thread_is_asked_for_its_owner(self, memory: AsyncMemory) -> None:
        owners: dict[str, str | None] = {}

        class Asked:
            def generate_response(self, messages: Any, **options: Any) -> str:
                owner = owner_under_way()
                time.sleep(0.01)
                owners[messages[-1]["content"].split("I am ")[1].split(".")[0]] = owner
                return '{"memory": []}'

        memory.llm = Asked()

        async def work() -> None:
            await asyncio.gather(*(memory.add(f"I am {n}.", **user(n)) for n in range(12)))
            assert owner_under_way() is None

        asyncio.run(work())
        assert owners == {str(number): f"user:user{number}" for number in range(12)}

    def test_a_search_beside_a_chat_keeps_its_threshold(self, memory: AsyncMemory) -> None:
        async def work() -> None:
            await memory.add("something", **ADA, infer=False)
            found, prepared = await asyncio.gather(
                memory.search("else entirely", filters=ADA, threshold=0.9),
                memory.prepare("else entirely", **ADA),
            )
            assert found["results"] == []
            assert len(prepared.memories) == 1

        asyncio.run(work())

    def test_facts_deleted_in_gathered_tasks_are_forgotten_in_one_go(
        self, memory: AsyncMemory, engine: WatchedEngine
    ) -> None:
        async def work() -> None:
            messages = [{"role": "user", "content": f"Fact {number}"} for number in range(20)]
            await memory.add(messages, **ADA, infer=False)
            await memory.flush()
            await memory.delete_all(**ADA)

        asyncio.run(work())
        [(owner, keys, tags)] = engine.forgotten
        assert (owner, len(keys), len(tags)) == ("user:ada", 20, 21)


class TestCancelling:
    def test_a_cancelled_add_leaves_store_and_journal_in_step(
        self, memory: AsyncMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inner = memory.vector_store.insert
        started = asyncio.Event()

        async def work() -> None:
            loop = asyncio.get_running_loop()

            def slow(**options: Any) -> Any:
                loop.call_soon_threadsafe(started.set)
                time.sleep(0.3)
                return inner(**options)

            monkeypatch.setattr(memory.vector_store, "insert", slow)
            task = asyncio.create_task(memory.add("Tea", **ADA, infer=False))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.6)  # mem0's thread goes on
            assert owner_under_way() is None
            stored = (await memory.get_all(filters=ADA))["results"]
            assert memory._core is not None
            assert set(memory._core.journal.facts.get(fact["id"] for fact in stored)) == {
                fact["id"] for fact in stored
            }
            await memory.flush()
            reply = await memory.chat("Tea?", **ADA, max_tokens=1)
            assert texts(reply) == [fact["memory"] for fact in stored] == ["Tea"]

        asyncio.run(work())

    def test_a_cancelled_delete_is_still_forgotten_by_the_engine(
        self, memory: AsyncMemory, engine: WatchedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started = asyncio.Event()

        async def work() -> None:
            [added] = (await memory.add("Tea", **ADA, infer=False))["results"]
            await memory.flush()
            loop, inner = asyncio.get_running_loop(), memory.vector_store.delete

            def slow(**options: Any) -> Any:
                loop.call_soon_threadsafe(started.set)
                time.sleep(0.3)
                return inner(**options)

            monkeypatch.setattr(memory.vector_store, "delete", slow)
            task = asyncio.create_task(memory.delete(added["id"]))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.forgotten == []
            await asyncio.sleep(0.6)
            assert len(engine.forgotten) == 1

        asyncio.run(work())

    def test_a_call_cancelled_while_its_turn_is_logged_ends_in_order(
        self, memory: AsyncMemory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert memory._core is not None
        inner = memory._core.journal.turns.append

        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(0.3)
            return inner(*args, **options)

        monkeypatch.setattr(memory._core.journal.turns, "append", slow)

        async def work() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(memory.add("Tea", **ADA, infer=False), 0.05)
            assert owner_under_way() is None
            await memory.add("Milk", **ADA, infer=False)
            assert (await memory.get_all(filters=ADA))["results"][0]["memory"] == "Milk"

        asyncio.run(work())


class TestStreams:
    def test_many_streams_at_once(self, memory: AsyncMemory) -> None:
        async def one(number: int) -> list[str]:
            pieces = await memory.chat("Who am I?", **user(number), max_tokens=3, stream=True)
            last = [piece async for piece in pieces][-1]
            assert last.reply is not None
            return texts(last.reply)

        async def work() -> list[list[str]]:
            for number in range(8):
                await memory.add(f"I am {number}", **user(number), infer=False)
            return await asyncio.gather(*(one(number) for number in range(8)))

        assert asyncio.run(work()) == [[f"I am {number}"] for number in range(8)]

    def test_a_stream_that_is_left_does_not_enter_the_conversation(self, memory: AsyncMemory) -> None:
        async def work() -> None:
            session = memory.session(**ADA)
            async for _ in session.stream("Hello?"):
                break
            assert session.messages == []

        asyncio.run(work())

    def test_conversations_side_by_side(self, memory: AsyncMemory) -> None:
        async def talk(number: int) -> list[str]:
            session = memory.session(**user(number), k=3)
            for turn in range(3):
                await session.chat(f"{number} asks {turn}")
            return [message["content"] for message in session.messages if message["role"] == "user"]

        async def work() -> list[list[str]]:
            return await asyncio.gather(*(talk(number) for number in range(6)))

        assert asyncio.run(work()) == [[f"{number} asks {turn}" for turn in range(3)] for number in range(6)]


class TestReset:
    def test_the_new_store_is_mirrored_too(self, memory: AsyncMemory) -> None:
        async def work() -> None:
            before = memory.vector_store
            await memory.add("Tea", **ADA, infer=False)
            await memory.reset()
            assert memory.vector_store is not before
            assert type(memory.vector_store) is type(before)
            assert live_turns(memory) == []
            await memory.add("Milk", **ADA, infer=False)
            await memory.flush()
            assert injected(await memory.chat("?", **ADA, max_tokens=1)) == ["Milk"]

        asyncio.run(work())


# -- how a face waits ----------------------------------------------------------------------------------------

_word: ContextVar[str] = ContextVar("word", default="nothing")


@contextmanager
def said(log: list[str], *, swallow: bool = False) -> Iterator[None]:
    token = _word.set("something")
    log.append("in")
    try:
        yield
    except KeyError:
        if not swallow:
            raise
    finally:
        _word.reset(token)
        log.append(f"out: {_word.get()}")


class TestWaiting:
    @pytest.mark.parametrize("wait", [Direct(), Threads()])
    def test_variables_hold_in_the_block_and_in_its_threads_and_not_behind_it(self, wait: Any) -> None:
        async def work() -> list[str]:
            log: list[str] = []
            async with wait.within(said(log)):
                log.append(await wait.call(_word.get))
                log.append(_word.get())
            return [*log, _word.get()]

        ended = asyncio.run(work()) if isinstance(wait, Threads) else run(work())
        assert ended == ["in", "something", "something", "out: nothing", "nothing"]

    @pytest.mark.parametrize("wait", [Direct(), Threads()])
    @pytest.mark.parametrize("swallow", [False, True])
    def test_errors_reach_the_manager_and_then_the_caller(self, wait: Any, swallow: bool) -> None:
        log: list[str] = []

        async def work() -> None:
            async with wait.within(said(log, swallow=swallow)):
                raise KeyError("x")

        def go() -> None:
            asyncio.run(work()) if isinstance(wait, Threads) else run(work())

        if swallow:
            go()
        else:
            with pytest.raises(KeyError):
                go()
        assert log == ["in", "out: nothing"]

    def test_a_body_that_suspends_is_a_fault_and_said(self) -> None:
        with pytest.raises(RuntimeError, match="has suspended"):
            run(asyncio.sleep(0))

    def test_an_error_of_a_beginning_is_the_callers(self) -> None:
        @contextmanager
        def broken() -> Iterator[None]:
            raise OSError("no disk")
            yield

        async def work() -> None:
            async with Threads().within(broken()):
                pytest.fail("never reached")

        with pytest.raises(OSError, match="no disk"):
            asyncio.run(work())
