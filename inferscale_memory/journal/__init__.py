"""What was said, in order, and which blob stands for which fact. Knows nobody: no engine, no mem0, no
prompt."""

from inferscale_memory.journal.failed import FailedAdd
from inferscale_memory.journal.journal import SESSION_GAP, Forgotten, Journal
from inferscale_memory.journal.owed import Owed
from inferscale_memory.journal.records import Context, Fact, Intent, LedgerEntry, NewTurn, Turn

__all__ = [
    "SESSION_GAP",
    "Context",
    "Fact",
    "FailedAdd",
    "Forgotten",
    "Intent",
    "Journal",
    "LedgerEntry",
    "NewTurn",
    "Owed",
    "Turn",
]
