"""Bodies come back as they were, and lie where SQLite leaves no copies."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from inferscale_memory.index.body import Layout
from inferscale_memory.index.records import to_json

_TREE = (2, 5, 10, 13)  # the first byte of a B-tree page; that of an overflow page is 0 in a small file


@pytest.mark.parametrize("page_size", [512, 4096, 65536])
def test_nothing_of_a_body_but_zeros_lies_in_a_btree_page(page_size: int) -> None:
    layout = Layout(page_size)
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.execute(f"PRAGMA page_size = {page_size}")
    db.execute(
        "CREATE TABLE facts (place INTEGER PRIMARY KEY, key BLOB, agent BLOB, run BLOB, body BLOB) STRICT"
    )
    keys = bytes(16)
    for extra in range(0, 2 * page_size + 100, 1 + page_size // 2048):
        vector = np.frombuffer(b"VVVV" * 8, "<f4")
        body = layout.pack(vector, to_json("JJJJ", {"JJJJ": "J" * extra}))
        scope = (keys, None) if extra % 2 else (None, None)
        db.execute("INSERT INTO facts VALUES (?, ?, ?, ?, ?)", (extra << 32, keys, *scope, body))
    file = db.serialize()
    pages = [file[start : start + page_size] for start in range(0, len(file), page_size)]
    trees = [page for page in pages[1:] if page[0] in _TREE]
    assert len(trees) > 1
    assert not [page for page in trees if b"VVVV" in page or b"JJJJ" in page]
    assert any(b"JJJJ" in page for page in pages)


@pytest.mark.parametrize("length", [0, 1, 3000, 4000, 4028, 4029, 9000])
def test_a_body_comes_back(length: int) -> None:
    layout = Layout(4096)
    vector = np.arange(5, dtype=np.float32)
    payload = {"data": "ü" * length, "n": 1.5, "list": [None, True]}
    back, id, found = layout.unpack(layout.pack(vector, to_json("id", payload)))
    assert back.tolist() == vector.tolist()
    assert (id, found) == ("id", payload)
