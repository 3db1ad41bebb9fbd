"""One fact's keys (before RoPE) and values, and the one byte format in which they leave the process.

Format, little-endian, after safetensors' example (nothing executes on load, sizes are checked before anything is
allocated):

    8 bytes   magic b"ISBLOB01"
    4 bytes   length of the header, at most 64 KiB
    16 bytes  checksum: BLAKE2b-128 of header and payload
    header    JSON: shape [layers, 2, tokens, kv_heads, head_dim], dtype, fingerprint, ids digest (hex)
    payload   the tensor, contiguous

The checksum covers the header too: a damaged digest or shape would put a blob under ids it was not made of.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from hashlib import blake2b

import torch

from inferscale_memory.errors import BlobError

MAGIC = b"ISBLOB01"
HEAD = len(MAGIC) + 4 + 16
MAX_HEADER = 64 * 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Blob:
    """Keys before RoPE and values of one fact's own tokens. Immutable.

    Attributes:
        data: [layers, 2, tokens, kv_heads, head_dim]; index 0 of the second axis is keys, 1 is values.
        fingerprint: the model the tensors belong to.
        ids_digest: `digest_ids` of the fact's token ids.
    """

    data: torch.Tensor
    fingerprint: str
    ids_digest: bytes

    @property
    def tokens(self) -> int:
        return int(self.data.shape[2])

    def to_bytes(self) -> bytes:
        """The blob in the format above."""
        header = json.dumps(
            {
                "shape": list(self.data.shape),
                "dtype": str(self.data.dtype).removeprefix("torch."),
                "fingerprint": self.fingerprint,
                "ids_digest": self.ids_digest.hex(),
            }
        ).encode()
        body = header + self.data.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return MAGIC + len(header).to_bytes(4, "little") + _checksum(body) + body

    @classmethod
    def from_bytes(cls, raw: bytes, *, fingerprint: str | None = None) -> Blob:
        """Read what `to_bytes` wrote.

        Raises:
            BlobError: truncated, corrupt, or not of `fingerprint`. The remedy is always the same: drop it and encode
                the fact again.
        """
        if len(raw) < HEAD or raw[: len(MAGIC)] != MAGIC:
            raise BlobError("not a blob: wrong magic bytes; drop it and encode the fact again")
        size = int.from_bytes(raw[len(MAGIC) : len(MAGIC) + 4], "little")
        if size > MAX_HEADER or HEAD + size > len(raw):
            raise BlobError("blob header is truncated or too large; drop it and encode the fact again")
        if _checksum(memoryview(raw)[HEAD:]) != raw[HEAD - 16 : HEAD]:
            raise BlobError("blob checksum does not match; drop it and encode the fact again")
        shape, dtype, found, digest = _parse_header(raw[HEAD : HEAD + size])
        if fingerprint is not None and found != fingerprint:
            raise BlobError(f"blob belongs to model {found}, this is {fingerprint}; encode the fact again")
        payload = raw[HEAD + size :]
        if len(payload) != math.prod(shape) * dtype.itemsize:
            raise BlobError(
                "blob payload has not the size its header says; drop it and encode the fact again"
            )
        data = torch.frombuffer(bytearray(payload), dtype=dtype).view(shape)
        return cls(data=data, fingerprint=found, ids_digest=digest)


def _parse_header(raw: bytes) -> tuple[list[int], torch.dtype, str, bytes]:
    try:
        header = json.loads(raw)
        shape = header["shape"]
        dtype = DTYPES[header["dtype"]]
        digest = bytes.fromhex(header["ids_digest"])
        fingerprint = str(header["fingerprint"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BlobError(f"blob header is unreadable ({error}); drop it and encode the fact again") from None
    if (
        not isinstance(shape, list)
        or len(shape) != 5
        or not all(type(n) is int and 0 < n < 2**31 for n in shape)
        or shape[1] != 2
    ):
        raise BlobError("blob header has no valid shape; drop it and encode the fact again")
    return shape, dtype, fingerprint, digest


def _checksum(body: bytes | memoryview) -> bytes:
    return blake2b(body, digest_size=16).digest()
