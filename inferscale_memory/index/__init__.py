"""The local vector store: SQLite is the truth, one slab per owner in memory is searched exactly.

The store does not know what a fact is used for: it imports neither an engine nor the journal nor `memory`, and neither
mem0 nor torch. `mem0_adapter.vector_store` is the class that mem0 sees.
"""

from inferscale_memory.index.collection import Collection
from inferscale_memory.index.records import Hit

__all__ = ["Collection", "Hit"]
