"""A small conversation file of two users, and a tiny model before which benchmarks take place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.place import Place, remembering
from inferscale_memory.commands.demo.conversations import load
from inferscale_memory.commands.demo.copying import row_bytes
from tests.memory.hashing import DIMENSIONS

SAID = (
    "I adopted a grey cat called Miso.",
    "It sleeps on the radiator all winter.",
    "I moved from Lisbon to Porto in March.",
    "I work as a nurse at the hospital now.",
    "My sister plans to marry in June, near the river.",
    "I am allergic to peanuts and prefer tea.",
)
QUESTIONS = (
    ("What is the cat called?", "miso"),
    ("Where did they move?", "porto"),
    ("Who marries?", "sister"),
)


def talk_file(folder: Path) -> Path:
    """Two users, two sessions of six turns and three questions each."""
    users = [
        {
            "user_id": name.lower(),
            "name": name,
            "sessions": [
                {
                    "date": f"2024-05-0{day}",
                    "turns": [{"speaker": name, "text": f"{text} ({name}, day {day})"} for text in SAID],
                }
                for day in (1, 2)
            ],
            "questions": [{"question": text, "answers": [answer]} for text, answer in QUESTIONS],
        }
        for name in ("Ada", "Ben")
    ]
    path = folder / "talk.json"
    path.write_text(json.dumps({"users": users}))
    return path


@contextmanager
def place(
    engine: Any,
    model: Path,
    folder: Path,
    *,
    device_tokens: int,
    host_tokens: int = 0,
    asynchronous: bool = False,
) -> Iterator[Place]:
    """`engine` with a fresh memory before it, of mem0's own parts and an embedder for tests."""
    folder.mkdir()
    embedder = {"provider": "huggingface", "config": {"model": "hashing", "embedding_dims": DIMENSIONS}}
    opening = remembering(engine, folder / "memory", asynchronous=asynchronous, embedder=embedder)
    with opening as (watched, memory, clock):
        users = load(talk_file(folder))
        yield Place(watched, memory, users, row_bytes(model, "float32"), device_tokens, host_tokens, clock)
