"""Words in the journal's file, laid out so that nothing of them outlives their deletion.

`secure_delete` zeroes what is deleted where it lies, not the copies that SQLite leaves in a B-tree page when it moves
rows to another. Overflow pages are never copied, and are zeroed whole when they are freed
(https://www.sqlite.org/fileformat2.html, "B-tree Cell Format": of a row that is longer than U - 35 bytes, U the size of
a page, no more than U - 35 lie in the B-tree). So whatever a person wrote is the last column of its row, behind U - 35
zeros: it lies on overflow pages, whatever stands before it. Pages are small, since every row has some of its own.

Nothing a person wrote may be stored in another way.
"""

from __future__ import annotations

import sqlite3

PAGE = 512
_ZEROS = PAGE - 35


def packed(text: str | None) -> bytes | None:
    """As `packed` in SQL: a text as it is stored. None is none."""
    return None if text is None else bytes(_ZEROS) + text.encode()


def plain(column: str) -> str:
    """SQL for the text in a column of packed words."""
    return f"CAST(substr({column}, {_ZEROS + 1}) AS TEXT)"


def words_of(name: str, column: str) -> str:
    """SQL for two last columns of a table: the words, packed, and `name`, which is their text when it is read."""
    return f"{name} TEXT GENERATED ALWAYS AS ({plain(column)}) VIRTUAL,\n    {column} BLOB"


def settle_page_size(db: sqlite3.Connection) -> None:
    """Give the file of `db` pages of `PAGE` bytes: before it holds anything, or by writing it anew. It must not be
    open elsewhere then. Raises `sqlite3.OperationalError`."""
    if db.execute("PRAGMA page_size").fetchone()[0] == PAGE:
        return
    db.execute(f"PRAGMA page_size = {PAGE}")
    if db.execute("PRAGMA page_count").fetchone()[0]:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("VACUUM")
    if db.execute("PRAGMA page_size").fetchone()[0] != PAGE:
        raise sqlite3.OperationalError("its pages cannot be made anew: close whoever has it open")
