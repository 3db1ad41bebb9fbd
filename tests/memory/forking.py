"""A program that opens a memory, and is then forked: the other half of `test_fork`.

    python -m tests.memory.forking FOLDER ENGINE

ENGINE is JSON. It prints one line of JSON: what the children and the parent have seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferscale_memory import ForkedError
from inferscale_memory.memory import Chat, Memory
from tests.memory.ending import ADA, configuration

SHORT = {"max_tokens": 2}


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, which ends as programs do."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        try:
            seen = work()
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(seen).encode())
        sys.exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        seen = json.loads(answer.read() or "null")
    return {"seen": seen, "status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ForkedError as error:
        return str(error)
    return "answered"


def texts(found: Any) -> list[str]:
    return sorted(fact["memory"] for fact in found["results"])


def main(folder: Path, engine: dict[str, Any]) -> None:
    memory = Memory.from_config(configuration(folder, engine))
    unused = in_child(lambda: memory.chat("Hello?", **ADA, **SHORT).completion.finish_reason)
    fact = memory.add("I live in Porto", **ADA, infer=False)["results"][0]["id"]
    memory.flush()
    chat, talk = Chat(memory=memory), memory.session(**ADA)
    pieces = memory.chat("Where do I live?", **ADA, stream=True, **SHORT)

    def child() -> Any:
        prepared = [{"role": "user", "content": "Where?"}]
        return {
            "found": texts(memory.search("Where do I live?", filters=ADA)),
            "added": texts(memory.add("I like tea", **ADA, infer=False)),
            "refused": [
                refused(lambda: memory.chat("Where do I live?", **ADA, **SHORT)),
                refused(lambda: chat.answer(chat.prepare(prepared, ADA))),
                refused(lambda: talk.chat("Where?", **SHORT)),
                refused(lambda: list(pieces)),
                refused(lambda: memory.engine.at_hand("user:ada", ["key"])),
            ],
            "updated": memory.update(fact, "I live in Vienna")["message"],
            "flushed": memory.flush(timeout=30),
            "again": in_child(lambda: texts(memory.get_all(filters=ADA))),
        }

    # Threads of the parent hold every lock that there is, every now and then.
    busy, done = threading.Event(), threading.Event()

    def work() -> None:
        while not done.is_set():
            memory.add("I like coffee", user_id="ben", infer=False)
            memory.search("coffee", filters={"user_id": "ben"})
            busy.set()

    worker = threading.Thread(target=work)
    worker.start()
    busy.wait()
    children = [in_child(child), in_child(lambda: texts(memory.search("tea", filters=ADA)))]
    done.set()
    worker.join()
    memory.chat("Where?", **ADA, **SHORT)  # has what the child has written encoded
    memory.flush()
    in_parent = {
        "facts": texts(memory.get_all(filters=ADA)),
        "injected": len([m for m in memory.chat("Where?", **ADA, **SHORT).memories if m.injected]),
    }
    memory.close()
    print(json.dumps({"unused": unused, "children": children, "parent": in_parent}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
