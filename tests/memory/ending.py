"""Programs that remember and then end, each in another way: the other half of `test_exit`.

    python -m tests.memory.ending FOLDER ENGINE WAY...

Each prints the acknowledged facts, one a line, and ends while they are being encoded. ENGINE is JSON. Everything is
imported once, then every way has a process of its own, forked before anything is opened, whose interpreter ends as that
of any program. Its output and its status lie in FOLDER, under the name of the way.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from mem0.utils.factory import EmbedderFactory

from inferscale_memory.memory import AsyncMemory, Memory
from tests.memory.hashing import DIMENSIONS

ADA = {"user_id": "ada"}
WORDS = "the train to Berlin leaves from the restaurant near the river where the cat sleeps " * 20


def configuration(folder: Path, engine: dict[str, Any]) -> dict[str, Any]:
    EmbedderFactory.provider_to_class["huggingface"] = "tests.memory.hashing.HashingEmbedder"
    embedder = {"provider": "huggingface", "config": {"model": "hashing", "embedding_dims": DIMENSIONS}}
    return {"embedder": embedder, "engine": engine, "folder": folder}


def messages(count: int, name: str = "") -> list[dict[str, str]]:
    return [{"role": "user", "content": f"fact {name}{number}: {WORDS}"} for number in range(count)]


def acknowledge(result: Any) -> None:
    for fact in result["results"]:
        print(fact["memory"].split(":")[0], flush=True)


def remember(folder: Path, engine: dict[str, Any], count: int = 8, name: str = "") -> Memory:
    """A memory whose facts are being encoded."""
    memory = Memory.from_config(configuration(folder, engine))
    acknowledge(memory.add("first", **ADA, infer=False))
    memory.flush()
    acknowledge(memory.add(messages(count, name), **ADA, infer=False))
    with suppress(TimeoutError):
        memory.flush(timeout=0.1)
    return memory


async def remember_async(folder: Path, engine: dict[str, Any]) -> AsyncMemory:
    memory = AsyncMemory.from_config(configuration(folder, engine))
    acknowledge(await memory.add("first", **ADA, infer=False))
    await memory.flush()
    acknowledge(await memory.add(messages(8), **ADA, infer=False))
    with suppress(TimeoutError):
        await memory.flush(timeout=0.1)
    return memory


def main(way: str, folder: Path, engine: dict[str, Any]) -> None:
    if way == "async":
        asyncio.run(remember_async(folder, engine))
        return
    if way == "many":
        kept = [remember(folder / str(number), engine, 2, f"{number}-") for number in range(3)]
        assert kept
        return
    memory = remember(folder, engine)
    match way:
        case "raise":
            raise LookupError("the app's own")
        case "exit":
            sys.exit(3)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
        case "daemon":  # a thread of the app's own that asks while the program ends

            def ask() -> None:
                while True:
                    memory.chat("Where does the cat sleep?", **ADA, max_tokens=50)

            threading.Thread(target=ask, daemon=True).start()
        case "worker":  # a thread of the app's own that goes on when the main one has ended

            def go_on() -> None:
                threading.main_thread().join()
                acknowledge(memory.add(messages(1, "late "), **ADA, infer=False))
                print(len(memory.chat("Where?", **ADA, max_tokens=2, k=1).completion.token_ids), "tokens")

            threading.Thread(target=go_on).start()
        case "end":
            pass


if __name__ == "__main__":
    place, made, ways = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:]
    for way in ways:
        if child := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            (place / f"{way}.status").write_text(str(status))
            continue
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(place / f"{way}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
        main(way, place / way, made)
        break
