"""Random writes, filters and searches against a dictionary and plain Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferscale_memory.index import Collection
from tests.index.facts import DIMS

Payload = dict[str, Any]
KEYS = ("user_id", "agent_id", "n", "word", "tags", "flag")


def random_payload(draw: random.Random) -> Payload:
    options: Payload = {
        "user_id": draw.choice(["ada", "ben", "eve"]),
        "agent_id": draw.choice(["bot", "ada"]),
        "n": draw.choice([1, 2, 3, 2.5]),
        "word": draw.choice(["tea", "Tea leaves", "coffee"]),
        "tags": draw.sample(["hot", "cold", "new"], draw.randrange(3)),
        "flag": draw.random() < 0.5,
    }
    return {key: value for key, value in options.items() if draw.random() < 0.75}


def random_filter(draw: random.Random, depth: int = 2) -> Payload:
    made: Payload = {}
    for _ in range(draw.randrange(1, 3)):
        key = draw.choice(KEYS)
        text = draw.choice(["ada", "bot", "tea", "hot", "cold", "eve"])
        made[key] = draw.choice(
            [
                text,
                "*",
                2,
                [text, 1],
                {"eq": text},
                {"ne": text},
                {"in": [text, "ben", 3]},
                {"nin": [text, 1]},
                {"gt": 1},
                {"gte": 2, "lte": 2.5},
                {"lt": "m"},
                {"contains": text},
                {"icontains": text.upper()},
            ]
        )
    if depth and draw.random() < 0.5:
        logic = draw.choice(["AND", "OR", "NOT", "$or", "$not", "$and"])
        made[logic] = [random_filter(draw, depth - 1) for _ in range(draw.randrange(1, 3))]
    return made


def holds(condition: Payload, payload: Payload) -> bool:
    """mem0's filters, said again as plainly as possible."""
    for key, value in condition.items():
        logic = key.removeprefix("$").upper()
        if logic in ("AND", "OR", "NOT"):
            found = [holds(part, payload) for part in value]
            if not {"AND": all(found), "OR": any(found), "NOT": not any(found)}[logic]:
                return False
        elif not all(one(payload.get(key), name, operand) for name, operand in operators(key, value)):
            return False
    return True


def operators(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if value == "*" and key not in ("user_id", "agent_id"):
        return [("ne", None)]
    return [("in" if isinstance(value, list) else "eq", value)]


def one(value: Any, name: str, operand: Any) -> bool:
    if value is None:
        return False
    elements = value if isinstance(value, list) else [value]
    if name in ("eq", "ne"):
        return (name == "eq") is any(same(element, operand) for element in elements)
    if name in ("in", "nin"):
        return (name == "in") is any(same(element, o) for element in elements for o in operand)
    if name == "contains":
        return operand in value if isinstance(value, list | str) else False
    if name == "icontains":
        if isinstance(value, list):
            return operand.lower() in [element.lower() for element in value]
        return isinstance(value, str) and operand.lower() in value.lower()
    compare = {"gt": "__gt__", "gte": "__ge__", "lt": "__lt__", "lte": "__le__"}[name]
    text = isinstance(operand, str)
    fit = [e for e in elements if not isinstance(e, bool) and isinstance(e, str) is text]
    return any(getattr(float(e) if not text else e, compare)(operand) is True for e in fit)


def same(value: Any, operand: Any) -> bool:
    numbers = [type(one) in (int, float) for one in (value, operand)]
    return (all(numbers) or type(value) is type(operand)) and value == operand


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_written_and_asked_a_dictionary_would_say_the_same(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    floats = np.random.default_rng(seed)
    facts = Collection(tmp_path / "f", "facts", dims=DIMS, cache_bytes=draw.choice([1 << 20, 30_000]))
    truth: dict[str, tuple[np.ndarray[Any, Any], Payload]] = {}
    for _ in range(120):
        what = draw.random()
        if what < 0.5 or not truth:
            names = [f"id{draw.randrange(60)}" for _ in range(draw.randrange(1, 5))]
            rows = [(floats.standard_normal(DIMS).astype("f4"), random_payload(draw)) for _ in names]
            facts.put(names, [row[0] for row in rows], [row[1] for row in rows])
            truth.update(zip(names, rows, strict=True))
        elif what < 0.7:
            name = draw.choice(list(truth))
            vector, payload = truth[name]
            if draw.random() < 0.5:
                vector = floats.standard_normal(DIMS).astype("f4")
                facts.update(name, vector=vector)
            else:
                payload = random_payload(draw)
                facts.update(name, payload=payload)
            truth[name] = (vector, payload)
        else:
            names = draw.sample(sorted(truth), min(len(truth), draw.randrange(1, 4)))
            facts.delete(names)
            for name in names:
                del truth[name]
        asked = random_filter(draw)
        expected = {name for name, (_, payload) in truth.items() if holds(asked, payload)}
        assert {hit.id for hit in facts.first(filters=asked)} == expected, asked

        query, k = floats.standard_normal(DIMS).astype("f4"), draw.randrange(1, 8)
        cosines = {
            name: float(truth[name][0] @ query / np.linalg.norm(truth[name][0]) / np.linalg.norm(query))
            for name in expected
        }
        hits = facts.search([query], k, asked)[0]
        assert [hit.id for hit in hits] == sorted(cosines, key=lambda name: -cosines[name])[:k]
        assert [hit.score for hit in hits] == pytest.approx([cosines[hit.id] for hit in hits], abs=1e-5)
        assert all(hit.payload == truth[hit.id][1] for hit in hits)
    again = Collection(tmp_path / "f", "facts")
    assert {hit.id: hit.payload for hit in again.first()} == {name: p for name, (_, p) in truth.items()}
