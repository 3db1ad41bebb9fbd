"""A fact's bytes in the file, laid out so that nothing of them outlives their deletion.

SQLite's `secure_delete` zeroes what is deleted where it lies, but not the copies that rebalancing a B-tree leaves
behind in the free space of neighbouring pages: with plain rows, up to 20 of 3,116 deleted texts were still in the
file after a random workload. Overflow pages are never copied by rebalancing, and are zeroed whole when they are freed.
So a body is padded until SQLite keeps nothing but zeros in the B-tree and puts vector and text on overflow pages
(https://www.sqlite.org/fileformat2.html, "B-tree Cell Format": a record of P bytes keeps M + (P - M) mod (U - 4)
bytes in the B-tree, or M if that is too many).

    [zeros: M][bytes of JSON: uint32][dims: uint32][vector: float32 x dims][JSON: id and payload][zeros]

Nothing a person wrote may be stored outside a body.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from inferscale_memory.index.records import Floats, Payload, from_json

_HEAD = struct.Struct("<II")
_SLACK = 64
"""More than a record's header, and than the distance between M + (U - 4) and the most a B-tree keeps."""


class Layout:
    """Bodies for a file with pages of `page_size` bytes."""

    def __init__(self, page_size: int) -> None:
        self._kept = (page_size - 12) * 32 // 255 - 23  # M, of the file format
        self._chunk = page_size - 4
        self._vector = self._kept + _HEAD.size

    def pack(self, vector: Floats, json: bytes) -> bytes:
        """The body of a fact. The vector is `[dims]`."""
        held = b"".join((_HEAD.pack(len(json), len(vector)), vector.astype("<f4").tobytes(), json))
        pages = -(-(len(held) + _SLACK) // self._chunk)
        return (bytes(self._kept) + held).ljust(self._kept + pages * self._chunk - _SLACK, b"\0")

    def unpack(self, body: bytes) -> tuple[Floats, str, Payload]:
        """Vector (read-only), id and payload."""
        length, dims = _HEAD.unpack_from(body, self._kept)
        json = self._vector + 4 * dims
        return np.frombuffer(body, "<f4", dims, self._vector), *from_json(body[json : json + length])

    def unpack_all(self, bodies: Sequence[bytes]) -> tuple[Floats, list[tuple[str, Payload]]]:
        """The vectors as one matrix `[facts, dims]`, ids and payloads. The vectors have one length."""
        facts = [self.unpack(body) for body in bodies]
        return np.stack([vector for vector, _, _ in facts]), [(id, payload) for _, id, payload in facts]
