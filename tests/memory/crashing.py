"""A process that remembers and forgets until it is killed: the other half of `test_crash`.

It imports mem0 once, and forks for every round. What a round is about to do it says with a question mark, what was
acknowledged without: one line of JSON each. A round may be told to kill itself at its n-th SQLite statement, which is
where a crash matters; one without a seed only opens the memory.

    python -m tests.memory.crashing FOLDER PROVIDER    (then one line [seed or null, statement or null] per round)
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
from typing import Any

from mem0.utils.factory import EmbedderFactory

from inferscale_memory.memory import Memory
from tests.memory.hashing import DIMENSIONS

ADA = {"user_id": "ada"}
BEN = {"user_id": "ben"}


class Extracting:
    """An LLM that says what the round wants."""

    def __init__(self) -> None:
        self.facts: list[str] = []

    def generate_response(self, messages: Any, **options: Any) -> str:
        return json.dumps({"memory": [{"text": fact} for fact in self.facts]})


def open_memory(folder: str, provider: str) -> Memory:
    EmbedderFactory.provider_to_class["huggingface"] = "tests.memory.hashing.HashingEmbedder"
    memory = Memory.from_config(
        {
            "embedder": {
                "provider": "huggingface",
                "config": {"model": "hashing", "embedding_dims": DIMENSIONS},
            },
            "vector_store": {"provider": provider},
            "llm": {"provider": "openai", "config": {"api_key": "none"}},
            "folder": folder,
        }
    )
    memory.llm = Extracting()
    return memory


def say(*what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def die_at(statement: int) -> None:
    """Kill this process at a statement, whoever makes it, on whichever database."""
    left, connect = statement, sqlite3.connect

    def count(_: str) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        db.set_trace_callback(count)
        return db

    sqlite3.connect = counted


def work(folder: str, provider: str, seed: int | None, statement: int | None) -> None:
    if statement is not None:
        die_at(statement)
    memory = open_memory(folder, provider)
    say("open")
    if seed is None:
        os._exit(0)
    draw = random.Random(seed)
    mine = {row["id"]: row["memory"] for row in memory.get_all(filters=ADA, top_k=10_000)["results"]}
    for step in range(10**6):
        name = f"w{seed}x{step}x"
        what = draw.choice(("add", "add", "extract", "update", "delete", "delete", "delete_all"))
        if what == "add" or not mine:
            texts = [f"fact {name}{n}y" for n in range(draw.randrange(1, 4))]
            say("add?", texts)
            added = memory.add([{"role": "user", "content": text} for text in texts], **ADA, infer=False)
            added = {result["id"]: result["memory"] for result in added["results"]}
            mine |= added
            say("add", added)
        elif what == "extract":
            memory.llm.facts = [f"drawn {name}{n}y" for n in range(2)]
            say("add?", memory.llm.facts)
            added = memory.add(f"turn {name} of many words", **ADA)
            added = {result["id"]: result["memory"] for result in added["results"]}
            mine |= added
            say("add", added)
        elif what == "update":
            fact, text = draw.choice(sorted(mine)), f"renewed {name}y"
            say("update?", fact, text)
            memory.update(fact, text)
            mine[fact] = text
            say("update", fact, text)
        elif what == "delete":
            fact = draw.choice(sorted(mine))
            say("delete?", fact)
            memory.delete(fact)
            del mine[fact]
            say("delete", fact)
        else:
            texts = [f"ben {name}{n}y" for n in range(3)]
            memory.add([{"role": "user", "content": text} for text in texts], **BEN, infer=False)
            say("delete_all?", texts)
            memory.delete_all(**BEN)
            say("delete_all", texts)


def main() -> None:
    folder, provider = sys.argv[1:]
    say("ready")
    for line in sys.stdin:
        seed, statement = json.loads(line)
        pid = os.fork()
        if not pid:
            work(folder, provider, seed, statement)
        say("pid", pid)
        os.waitpid(pid, 0)
        say("ended")


if __name__ == "__main__":
    main()
