"""What was said, in order, and which blob belongs to which fact. This room knows no engine, no mem0 and no prompt."""

from inferscale_memory.journal.failed_adds import FailedAdd
from inferscale_memory.journal.journal import Forgotten, Journal
from inferscale_memory.journal.known import Epoch, KnownFact
from inferscale_memory.journal.pending_forgets import PendingForget
from inferscale_memory.journal.records import Context, Fact, Intent, LedgerEntry, NewTurn, Turn
from inferscale_memory.journal.turns import SESSION_GAP

__all__ = [
    "SESSION_GAP",
    "Context",
    "Epoch",
    "Fact",
    "FailedAdd",
    "Forgotten",
    "Intent",
    "Journal",
    "KnownFact",
    "LedgerEntry",
    "NewTurn",
    "PendingForget",
    "Turn",
]
