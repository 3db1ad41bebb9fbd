"""The vector stores that forgetting is tested over. A new one is one word in each list."""

from __future__ import annotations

STORES = ("inferscale", "qdrant", "faiss")

# Those that survive a kill. mem0's FAISS store writes its files anew, in place, with every change.
CRASH_SAFE_STORES = ("inferscale", "qdrant")
