"""The address of a blob: a keyed hash of everything its keys and values depend on.

Only the side that prefilled the ids may compute a key. Two blobs with the same key hold the same tensors, so a blob is
never updated and never becomes invalid: different content has a different key.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 20


def ids_bytes(ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Token ids as little-endian int32, the form in which they are hashed."""
    return np.asarray(ids, dtype="<i4").tobytes()


def digest_ids(ids: Sequence[int] | NDArray[np.int32]) -> bytes:
    """A digest of token ids, 16 bytes. A blob is injected only where the prompt's own ids have the same digest."""
    return blake2b(ids_bytes(ids), digest_size=16).digest()


def hash_fields(secret: bytes, *fields: bytes) -> str:
    """Hex BLAKE2b of length-prefixed fields, keyed by `secret` (at most 64 bytes; an empty secret means no key)."""
    return _hasher(secret, *fields).hexdigest()


def composition_fields(segments: Sequence[tuple[str, int]]) -> tuple[bytes, bytes]:
    """(key, tokens) of blobs in order, as two fields to be hashed. There may be thousands of blobs, and one field for
    each would be slow. Keys contain no zero byte, so their joined form is unambiguous."""
    if not segments:
        return b"", b""
    keys, tokens = zip(*segments, strict=True)
    return array("q", tokens).tobytes(), "\0".join(keys).encode()


def blob_key(
    secret: bytes,
    fingerprint: str,
    owner: str,
    context_ids: Sequence[int],
    fact_ids: Sequence[int],
    base: Sequence[tuple[str, int]] = (),
) -> str:
    """The key of the blob of `fact_ids` prefilled after `context_ids`, for one model and one owner: 40 hex digits.

    Args:
        base: (key, tokens) of the blobs that were injected for the leading `context_ids`. Their keys are hashed into
            the new key, so a key names everything that its blob depends on, directly or through other blobs.
    """
    ids = [*context_ids, *fact_ids]
    [key] = blob_keys(secret, fingerprint, owner, ids, [(len(context_ids), len(ids))], base)
    return key


def blob_keys(
    secret: bytes,
    fingerprint: str,
    owner: str,
    ids: Sequence[int],
    spans: Sequence[tuple[int, int]],
    base: Sequence[tuple[str, int]] = (),
) -> list[str]:
    """The keys of several blobs of one prompt: for each of `spans`, in order, the key of `ids[start:stop]` prefilled
    after `ids[:start]`. Every id is hashed once, however many spans there are."""
    kind = (b"based", *composition_fields(base)) if base else (b"blob",)
    hasher = _hasher(secret, *kind, fingerprint.encode(), owner.encode())
    text, hashed, keys = ids_bytes(ids), 0, []
    for start, stop in spans:
        hasher.update(text[hashed * 4 : stop * 4])
        hashed = stop
        ended = hasher.copy()
        ended.update(start.to_bytes(8, "little") + stop.to_bytes(8, "little"))
        keys.append(ended.hexdigest())
    return keys


def _hasher(secret: bytes, *fields: bytes) -> blake2b:
    hasher = blake2b(key=secret, digest_size=KEY_BYTES)
    for item in fields:
        hasher.update(len(item).to_bytes(8, "little"))
        hasher.update(item)
    return hasher
