"""What tests of other rooms may know about the inside of a blob store."""

from __future__ import annotations

from inferscale_memory.kv.store import BlobStore, Entry


def entries(store: BlobStore) -> list[Entry]:
    """Every blob in the store."""
    return list(store._entries.values())


def rows_in_use(store: BlobStore) -> list[int]:
    """How many rows of each tier belong to blobs."""
    return [
        sum(len(entry.rows.get(tier, ())) for entry in entries(store)) for tier in range(len(store.tiers))
    ]


def assert_at_rest(store: BlobStore) -> None:
    """Nothing is pinned, and the books of all owners add up to the rows in use."""
    assert store._pinned == set()
    tokens = [sum(share.tokens for share in shares._owners.values()) for shares in store._shares]
    assert tokens == rows_in_use(store)


def sizes(store: BlobStore) -> dict[str, int]:
    """How much the store remembers."""
    return {
        "blobs": len(store),
        "owners": sum(len(shares) + len(shares._largest) for shares in store._shares),
        "moves": len(store._moves) + len(store._pinned),
    }
