"""Many threads, and processes that end at any moment."""

from __future__ import annotations

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import pytest

from inferscale_memory.index import Collection
from tests.index.facts import DIMS, fact

THREADS = 16


def vector_of(text: str) -> Any:
    return np.random.default_rng(abs(hash(text)) % 2**32).standard_normal(DIMS).astype("f4")


def test_sixteen_threads_never_see_a_text_with_another_texts_vector(tmp_path: Path) -> None:
    facts = Collection(tmp_path / "f", "facts", dims=DIMS, cache_bytes=60_000)
    other = Collection(tmp_path / "f", "facts")  # as another process would

    def work(thread: int) -> set[str]:
        draw = random.Random(thread)
        mine: dict[str, str] = {}
        user = f"user{thread % 4}"
        for step in range(60):
            text = f"{thread} {step} words"
            store = other if draw.random() < 0.2 else facts
            chance = draw.random()
            if chance < 0.4 or not mine:
                id = f"{thread}-{step}"
                store.put([id], [vector_of(text)], [fact(text, user)])
                mine[id] = text
            elif chance < 0.6:
                id = draw.choice(list(mine))
                store.update(id, vector_of(text), fact(text, user))
                mine[id] = text
            elif chance < 0.75:
                id = draw.choice(list(mine))
                store.delete([id])
                del mine[id]
            if mine:
                id = draw.choice(list(mine))
                asked = None if draw.random() < 0.1 else {"user_id": user}
                best = facts.search([vector_of(mine[id])], 1, asked)[0][0]
                assert (best.id, best.payload["data"]) == (id, mine[id])
                assert best.score is not None
                assert best.score > 0.999
                for hit in facts.search_words(mine[id], 3, {"user_id": user}):
                    assert hit.payload["user_id"] == user
        return {f"{id} {text}" for id, text in mine.items()}

    with ThreadPoolExecutor(THREADS) as pool:
        wanted = set[str]().union(*pool.map(work, range(THREADS)))
    for store in (facts, other, Collection(tmp_path / "f", "facts")):
        assert {f"{hit.id} {hit.payload['data']}" for hit in store.first()} == wanted


def test_deletes_at_once_on_many_connections_all_empty_the_log_before_they_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite answers a second checkpoint with "busy" at once: taken for an answer, it leaves text behind."""
    path = tmp_path / "f"
    Collection(path, "facts0", dims=DIMS)

    def work(number: int) -> int:
        left = 0
        for step in range(15):
            facts = Collection(path, f"facts{number}", dims=DIMS)
            facts.put([f"{step}"], [vector_of("x")], [fact(f"word{number}x{step}")])
            facts.delete([f"{step}"])
            left += facts.file._unscrubbed
            facts.close()
        return left

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(work, range(THREADS))) == 0
    assert not caplog.records


def test_a_new_file_may_be_opened_by_many_at_once(tmp_path: Path) -> None:
    for round in range(15):
        path = tmp_path / str(round)

        def work(thread: int, path: Path = path) -> None:
            facts = Collection(path, f"facts{thread % 3}", dims=DIMS)
            facts.put([str(thread)], [vector_of("x")], [fact("x")])
            facts.close()

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))
        assert sum(Collection(path, f"facts{n}").file.count() for n in range(3)) == THREADS


CHILD = """
import sys, json, random
from inferscale_memory.index import Collection
facts = Collection(sys.argv[1], "facts", dims=4)
draw = random.Random(int(sys.argv[2]))
alive = [hit.id for hit in facts.first()]
say = lambda *what: print(json.dumps(what), flush=True)
say("open")
for step in range(10**6):
    if draw.random() < 0.6 or len(alive) < 3:
        ids = [f"{sys.argv[2]}-{step}-{n}" for n in range(draw.randrange(1, 6))]
        say("put?", ids)
        facts.put(ids, [[1, 2, 3, step + 1.0]] * len(ids),
                  [{"data": "word" + id, "user_id": id[-1], "n": step} for id in ids])
        say("put", ids)
        alive += ids
    else:
        ids = draw.sample(alive, 2)
        say("delete?", ids)
        facts.delete(ids)
        say("delete", ids)
        alive = [id for id in alive if id not in ids]
"""


def test_a_process_killed_at_any_moment_leaves_every_acknowledged_fact_and_no_half_batch(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store" / "facts.sqlite"
    draw = random.Random(7)
    known: set[str] = set()
    gone: set[str] = set()
    for round in range(20):
        child = Popen([sys.executable, "-c", CHILD, str(path), str(round)], stdout=PIPE, text=True)
        assert child.stdout is not None
        assert json.loads(child.stdout.readline()) == ["open"]
        time.sleep(draw.uniform(0.0, 0.12))
        child.kill()
        said = [json.loads(line) for line in child.stdout.read().splitlines() if line.endswith("]")]
        child.wait()
        started: tuple[str, list[str]] = ("", [])
        for what, ids in said:
            if what.endswith("?"):
                started = (what, ids)
                continue
            started = ("", [])
            known, gone = (known | set(ids), gone) if what == "put" else (known - set(ids), gone | set(ids))
        facts = Collection(path, "facts")
        stored = {hit.id: hit.payload for hit in facts.first()}
        what, ids = started
        if what:  # begun and not acknowledged: all of it happened, or nothing
            there = [id for id in ids if id in stored]
            assert there in ([], ids)
            known = (known | set(ids) if there else known - set(ids)) if what == "put?" else known
            if what == "delete?" and not there:
                known, gone = known - set(ids), gone | set(ids)
        assert set(stored) == known
        assert all(payload["data"] == "word" + id for id, payload in stored.items())
        assert facts.file.count() == len(known)
        assert facts.file._reader.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        facts.close()
    assert gone
    raw = path.read_bytes()
    assert not [id for id in gone if f'word{id}"'.encode() in raw]
