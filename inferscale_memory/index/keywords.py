"""Keyword search over the facts of one owner: SQLite's FTS5 with BM25, in memory.

It is derived from the payloads and never written to a disk: an FTS5 index keeps the words of deleted rows in its
older segments until they are merged (`secure-delete` came with SQLite 3.42, and one merges everything to be sure
before that), so the only index that never holds a deleted word in a file is one that has no file.

FTS5 takes a run of letters for one word. Where a script puts no spaces between words, the index has the characters and
the pairs of characters of a run instead, so a word is found in the middle of a sentence.

The statistics behind a score are the owner's own: a score says nothing about what other people have stored.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from inferscale_memory.scripts import split_runs

_WORD = re.compile(r"\w+")
_MOST_WORDS = 128
"""Of a query. FTS5 refuses expressions of more than 256 parts, and nobody means so many."""


def words_of(payload: Mapping[str, Any]) -> str:
    """The text mem0 prepared for this, else the fact's."""
    text = payload.get("text_lemmatized") or payload.get("data") or ""
    # Half a surrogate pair is no UTF-8; NUL would end the text.
    return str(text).encode("utf-8", "replace").decode().replace("\0", " ")


class Keywords:
    """An index of texts by place. The caller keeps the texts, and hands one back to have it removed."""

    def __init__(self) -> None:
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._db.execute(
            "CREATE VIRTUAL TABLE words USING"
            " fts5(text, content = '', tokenize = 'unicode61 remove_diacritics 2')"
        )

    def close(self) -> None:
        self._db.close()

    def add(self, texts: Iterable[tuple[int, str]]) -> None:
        """Index texts at places that have none."""
        self._db.execute("BEGIN")
        rows = ((place, split_runs(text)) for place, text in texts)
        self._db.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", rows)
        self._db.execute("COMMIT")

    def remove(self, place: int, text: str) -> None:
        """Take out the very text that was added at `place`."""
        self._db.execute("INSERT INTO words (words, rowid, text) VALUES ('delete', ?, ?)", (place, split_runs(text)))

    def search(self, query: str, k: int | None) -> list[tuple[int, float]]:
        """Places and BM25 scores of the `k` best texts with at least one word of `query`, or of all of them.
        A query is words: nothing in it is an operator."""
        words = list(dict.fromkeys(_WORD.findall(split_runs(query.casefold()))))[:_MOST_WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        rows = self._db.execute(
            "SELECT rowid, -rank FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?",
            (match, -1 if k is None else k),
        )
        return rows.fetchall()
