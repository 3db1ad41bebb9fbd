"""Deleted text leaves an SQLite file: its write-ahead log, its free pages, and the free room within pages.

`secure_delete` zeroes what is deleted where it lies, not the copies that SQLite leaves in a page when it moves rows
to another. So the file is looked through for the words, and written anew when they are still there. It must never
believe that something is gone: it looks.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection

from inferscale_memory.storage.file_search import find, spellings
from inferscale_memory.storage.sqlite import code_of, empty_log, is_full, patience

_PATIENCE_S = 5.0
_LOOKED_FOR = 64
"""Beyond so many texts the file is written anew without a look."""

_log = logging.getLogger(__name__)


def scrub(db: sqlite3.Connection, words: Collection[str] | None, living: str) -> bool:
    """Leave nothing of `words` in the file of `db`, which must not be in a transaction. Somebody who reads the
    file and does not end is said in the log; then the answer is False.

    Args:
        words: what was deleted; None for whatever it was.
        living: a query that gives a row when a row that was not deleted says `:text`. Then the text is no
            secret, and copies of it are not looked for.
    """
    full = False
    try:
        with patience(db, _PATIENCE_S):
            clean = empty_log(db, _PATIENCE_S)
            if _is_left(db, words, living):
                db.execute("VACUUM")
                clean = empty_log(db, _PATIENCE_S)
    except sqlite3.OperationalError as error:
        if code_of(error) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL):
            raise
        clean, full = False, is_full(error)
    if not clean:
        _log.warning(
            "a database %s: what was just deleted stays in its file until the next start",
            "cannot be written anew on a full disk" if full else "is being read by somebody who does not end",
        )
    return clean


def _is_left(db: sqlite3.Connection, words: Collection[str] | None, living: str) -> bool:
    if words is None or len(words) > _LOOKED_FOR:
        return True
    gone = [text for text in words if text]
    if not gone:
        return False
    image = db.serialize()
    # Hardly anything is ever left, and to look for it is quicker than to ask every row.
    left = find(image, [spelling for text in gone for spelling in spellings(text)])
    return bool(left) and any(
        db.execute(living, {"text": text}).fetchone() is None and find(image, spellings(text))
        for text in gone
    )
