"""Blobs and where they are kept. Knows nobody: no engine, no vLLM, no memory."""

from inferscale_memory.kv.arena import Arena, Shape
from inferscale_memory.kv.blob import Blob
from inferscale_memory.kv.key import blob_key, digest_ids
from inferscale_memory.kv.store import BlobStore, Entry, Move
from inferscale_memory.kv.tier import RowTier, Tier

__all__ = [
    "Arena",
    "Blob",
    "BlobStore",
    "Entry",
    "Move",
    "RowTier",
    "Shape",
    "Tier",
    "blob_key",
    "digest_ids",
]
