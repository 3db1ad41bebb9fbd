"""A fact's bytes in the file, laid out so that nothing of them outlives their deletion.

SQLite's `secure_delete` zeroes what is deleted where it lies, but not the copies that rebalancing a B-tree leaves
behind in the free space of neighbouring pages: with plain rows, up to 20 of 3,116 deleted texts were still in the
file after a random workload. Overflow pages are never copied by rebalancing, and are zeroed whole when they are freed.
So a body is padded until SQLite keeps nothing but zeros in the B-tree and puts vector and text on overflow pages
(https://www.sqlite.org/fileformat2.html, "B-tree Cell Format": a record of P bytes keeps M + (P - M) mod (U - 4)
bytes in the B-tree, or M if that is too many).

    [zeros: M][bytes of JSON: uint32][dims: uint32][vector: float32 x dims][JSON: id and payload][CRC-32: uint32][zeros]

The highest bit of `dims` says that there is a CRC-32, of everything before it behind the first zeros; bodies of the
first format have none.

Nothing a person wrote may be stored outside a body.
"""

from __future__ import annotations

import struct
from zlib import crc32

import numpy as np

from inferscale_memory.index.records import Floats, Payload, from_json

_HEAD = struct.Struct("<II")
_CRC = struct.Struct("<I")
_CHECKED = 1 << 31
_SLACK = 64
"""More than a record's header, and than the distance between M + (U - 4) and the most a B-tree keeps."""


class DamagedBodyError(ValueError):
    """The bytes of a fact are not what was written."""


class Layout:
    """Bodies for a file with pages of `page_size` bytes."""

    def __init__(self, page_size: int) -> None:
        self._kept = (page_size - 12) * 32 // 255 - 23  # M, of the file format
        self._chunk = page_size - 4
        self._vector = self._kept + _HEAD.size

    def pack(self, vector: Floats, json: bytes) -> bytes:
        """The body of a fact. The vector is `[dims]`."""
        head = _HEAD.pack(len(json), len(vector) | _CHECKED)
        held = b"".join((head, vector.astype("<f4").tobytes(), json))
        held += _CRC.pack(crc32(held))
        pages = -(-(len(held) + _SLACK) // self._chunk)
        return (bytes(self._kept) + held).ljust(self._kept + pages * self._chunk - _SLACK, b"\0")

    def unpack(self, body: bytes) -> tuple[Floats, str, Payload]:
        """Vector (read-only), id and payload. Raises DamagedBodyError on bytes that are not what was packed."""
        if len(body) < self._vector:
            raise DamagedBodyError("it is too short")
        length, dims = _HEAD.unpack_from(body, self._kept)
        checked, dims = dims & _CHECKED, dims & ~_CHECKED
        json = self._vector + 4 * dims
        end = json + length
        if end + (_CRC.size if checked else 0) > len(body):
            raise DamagedBodyError("it is too short")
        if checked and crc32(memoryview(body)[self._kept : end]) != _CRC.unpack_from(body, end)[0]:
            raise DamagedBodyError("its checksum is another")
        vector = np.frombuffer(body, "<f4", dims, self._vector)
        try:
            id, payload = from_json(body[json:end])
        except ValueError as error:  # no UTF-8, no JSON, or not two values
            raise DamagedBodyError("its text cannot be read") from error
        if not isinstance(id, str) or not isinstance(payload, dict) or not np.isfinite(vector).all():
            raise DamagedBodyError("its text cannot be read")
        return vector, id, payload
