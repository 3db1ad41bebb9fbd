"""The address of a blob: a keyed hash of everything its keys and values depend on.

Only the side that really prefilled the ids may compute a key. Two blobs with one key hold the same tensors, so a blob
is never updated and never invalidated: other content has another key.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 20


def ids_bytes(ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Token ids as little-endian int32, the form in which they are hashed."""
    return np.asarray(ids, dtype="<i4").tobytes()


def digest_ids(ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """16 bytes that stand for a run of token ids: a blob is injected only where the prompt has the same digest."""
    return blake2b(ids_bytes(ids), digest_size=16).digest()


def hash_fields(secret: bytes, *fields: bytes) -> str:
    """Hex BLAKE2b of length-prefixed fields, keyed by `secret` (at most 64 bytes; empty means unkeyed)."""
    hasher = blake2b(key=secret, digest_size=KEY_BYTES)
    for item in fields:
        hasher.update(len(item).to_bytes(8, "little"))
        hasher.update(item)
    return hasher.hexdigest()


def blob_key(
    secret: bytes,
    fingerprint: str,
    owner: str,
    context_ids: Sequence[int],
    fact_ids: Sequence[int],
    base: Sequence[tuple[str, int]] = (),
) -> str:
    """Key of the blob of `fact_ids`, prefilled after `context_ids`, of one model and one owner: 40 hex digits.

    Args:
        base: (key, tokens) of the blobs that were injected for the first of `context_ids`. What they hold is in their
            keys, so what the new one holds is in its own, however deep the pile.
    """
    kind = (b"based", *(part for key, tokens in base for part in (key.encode(), b"%d" % tokens)))
    return hash_fields(
        secret,
        *(kind if base else (b"blob",)),
        fingerprint.encode(),
        owner.encode(),
        ids_bytes(context_ids),
        ids_bytes(fact_ids),
    )
