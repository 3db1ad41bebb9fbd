"""What the turn log lets go of, so that it does not grow for ever.

A turn whose words were forgotten leaves no row, except the last of its scope, by which the next is numbered. Turns that
no fact came from and no blob was made behind are kept while they are among the last `KEPT` of their scope: windows and
sessions reach no further back. What a fact came from stays as long as the fact, and what an `add` is about that
has failed or is under way as long as that.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable

KEPT = 1000
"""Turns of a scope that are kept though no fact came from them."""
TRIMMED_EVERY = 64
"""Turns of a scope between two looks at what can go."""

_UNUSED = """
    NOT EXISTS (SELECT 1 FROM sources WHERE turn = number)
    AND NOT EXISTS (SELECT 1 FROM echoes WHERE turn = number)
    AND NOT EXISTS (SELECT 1 FROM held WHERE held.turn = number)
    AND NOT EXISTS (SELECT 1 FROM intents, json_each(intents.turns) WHERE json_each.value = turns.number)
    AND NOT EXISTS (SELECT 1 FROM failed_turns WHERE failed_turns.turn = turns.number)
"""


def drop_empty(db: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Delete the rows of those of these turns that have no words and are of no use."""
    db.execute(
        "DELETE FROM turns WHERE number IN (SELECT value FROM json_each(?)) AND words IS NULL"
        " AND EXISTS (SELECT 1 FROM turns AS later WHERE later.scope = turns.scope AND later.ordinal > turns.ordinal)"
        f" AND {_UNUSED}",
        (json.dumps(list(numbers)),),
    )


def trim(db: sqlite3.Connection, scope: str, last: int) -> None:
    """Delete turns of a scope that nobody needs; `last` is the ordinal of its last one."""
    db.execute(f"DELETE FROM turns WHERE scope = ? AND ordinal <= ? AND {_UNUSED}", (scope, last - KEPT))
