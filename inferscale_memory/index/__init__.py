"""The local vector store: SQLite is the truth, one slab per owner in memory is searched exactly.

It must never know what a fact is used for: it imports no engine, no journal and nothing of `memory`. Only
`index.store`, the face mem0 sees, imports mem0; nothing here imports torch, except the Jasper backend when it is
asked for.
"""

from inferscale_memory.index.collection import Collection
from inferscale_memory.index.records import Hit

__all__ = ["Collection", "Hit"]
