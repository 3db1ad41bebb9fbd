"""A blob that leaves the process comes back as it was, or not at all."""

from __future__ import annotations

import json
import random
from hashlib import blake2b
from typing import Any

import pytest
import torch

from inferscale_memory.errors import BlobError
from inferscale_memory.kv.blob import HEAD, MAGIC, MAX_HEADER, Blob
from inferscale_memory.kv.key import digest_ids

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def a_blob(dtype: torch.dtype = torch.float32, *, tokens: int = 5) -> Blob:
    data = torch.randn(3, 2, tokens, 2, 4, generator=torch.Generator().manual_seed(tokens))
    return Blob(data.to(dtype), fingerprint="model-a", ids_digest=digest_ids(range(tokens)))


def forged(header: Any, payload: bytes = b"") -> bytes:
    """Bytes whose checksum is right, whatever they hold."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    checksum = blake2b(raw + payload, digest_size=16).digest()
    return MAGIC + len(raw).to_bytes(4, "little") + checksum + raw + payload


def header_of(raw: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(raw[8:12], "little")
    return json.loads(raw[HEAD : HEAD + size]), raw[HEAD + size :]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_blob_survives_the_round_trip_bit_for_bit(dtype: torch.dtype) -> None:
    blob = a_blob(dtype)
    back = Blob.from_bytes(blob.to_bytes(), fingerprint="model-a")
    assert back.data.dtype == dtype
    assert torch.equal(back.data.view(torch.uint8), blob.data.view(torch.uint8))
    assert (back.fingerprint, back.ids_digest, back.tokens) == ("model-a", blob.ids_digest, 5)


def test_nan_infinity_and_negative_zero_survive() -> None:
    data = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]).view(1, 1, 1, 1, 4).expand(2, 2, 3, 1, 4)
    blob = Blob(data, "model-a", b"digest")
    back = Blob.from_bytes(blob.to_bytes())
    assert torch.equal(back.data.view(torch.int32), data.contiguous().view(torch.int32))


def test_a_blob_that_is_a_view_is_written_whole() -> None:
    whole = a_blob(tokens=9)
    part = Blob(whole.data[:, :, 2:5], "model-a", b"digest")
    assert torch.equal(Blob.from_bytes(part.to_bytes()).data, whole.data[:, :, 2:5])


def test_what_is_read_does_not_share_memory_with_what_was_read_from() -> None:
    raw = a_blob().to_bytes()
    Blob.from_bytes(raw).data.zero_()
    assert torch.equal(Blob.from_bytes(raw).data, a_blob().data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_blob_cut_short_anywhere_is_refused(dtype: torch.dtype) -> None:
    raw = a_blob(dtype).to_bytes()
    for length in range(len(raw)):
        with pytest.raises(BlobError):
            Blob.from_bytes(raw[:length])


def test_a_blob_with_bytes_after_its_end_is_refused() -> None:
    with pytest.raises(BlobError):
        Blob.from_bytes(a_blob().to_bytes() + b"\0")


def test_a_changed_byte_anywhere_is_refused() -> None:
    """In the magic, the length, the checksum, the header and the payload alike."""
    raw = a_blob().to_bytes()
    draw = random.Random(0)
    for position in range(len(raw)):
        for flip in (1, 0x80, draw.randrange(1, 256)):
            damaged = bytearray(raw)
            damaged[position] ^= flip
            with pytest.raises(BlobError):
                Blob.from_bytes(bytes(damaged))


def test_a_digit_changed_in_the_header_does_not_put_the_blob_under_other_ids() -> None:
    raw = a_blob().to_bytes()
    digest = a_blob().ids_digest.hex().encode()
    other = (b"0" if digest[:1] != b"0" else b"1") + digest[1:]
    with pytest.raises(BlobError):
        Blob.from_bytes(raw.replace(digest, other))


def test_a_shape_of_the_same_size_that_is_not_the_blobs_own_is_refused() -> None:
    raw = a_blob().to_bytes()
    with pytest.raises(BlobError):
        Blob.from_bytes(raw.replace(b"[3, 2, 5, 2, 4]", b"[5, 2, 3, 2, 4]"))


def test_a_header_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    for size in (MAX_HEADER + 1, 2**31, 2**32 - 1):
        with pytest.raises(BlobError, match="too large"):
            Blob.from_bytes(MAGIC + size.to_bytes(4, "little") + bytes(64))


def test_a_header_larger_than_any_of_ours_is_refused_even_when_it_is_all_there() -> None:
    header, payload = header_of(a_blob().to_bytes())
    with pytest.raises(BlobError, match="too large"):
        Blob.from_bytes(forged(header | {"fingerprint": "x" * MAX_HEADER}, payload))


def test_a_huge_shape_is_refused_before_anything_is_allocated() -> None:
    header, payload = header_of(a_blob().to_bytes())
    with pytest.raises(BlobError, match="size"):
        Blob.from_bytes(forged(header | {"shape": [2**30, 2, 2**30, 2**30, 2**30]}, payload))


@pytest.mark.parametrize(
    "shape",
    [
        [3, 2, 5, 2],
        [3, 2, 5, 2, 4, 1],
        [3, 3, 5, 2, 4],
        [3, 2, 0, 2, 4],
        [-3, 2, -5, 2, 4],
        [3.0, 2, 5, 2, 4],
        [True, 2, 15, 2, 4],
        [2**31, 2, 5, 2, 4],
        ["3", 2, 5, 2, 4],
        None,
        {},
        "3,2,5,2,4",
        [[3], 2, 5, 2, 4],
    ],
    ids=str,
)
def test_a_shape_that_is_no_blobs_shape_is_refused(shape: Any) -> None:
    header, payload = header_of(a_blob().to_bytes())
    with pytest.raises(BlobError):
        Blob.from_bytes(forged(header | {"shape": shape}, payload))


@pytest.mark.parametrize("field", ["shape", "dtype", "fingerprint", "ids_digest"])
def test_a_header_without_one_of_its_fields_is_refused(field: str) -> None:
    header, payload = header_of(a_blob().to_bytes())
    del header[field]
    with pytest.raises(BlobError):
        Blob.from_bytes(forged(header, payload))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"7",
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"shape":' + b"[" * 30_000,
        b'{"shape": 1' + b"0" * 5_000 + b"}",
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_a_header_that_is_not_the_right_json_is_refused(header: bytes) -> None:
    with pytest.raises(BlobError):
        Blob.from_bytes(forged(header))


@pytest.mark.parametrize("dtype", ["float64", "int8", "object", "", None, 7, [], {}])
def test_an_unknown_dtype_is_refused(dtype: Any) -> None:
    header, payload = header_of(a_blob().to_bytes())
    with pytest.raises(BlobError):
        Blob.from_bytes(forged(header | {"dtype": dtype}, payload))


@pytest.mark.parametrize("digest", ["zz", "abc", 7, None, []])
def test_a_digest_that_is_not_hexadecimal_is_refused(digest: Any) -> None:
    header, payload = header_of(a_blob().to_bytes())
    with pytest.raises(BlobError):
        Blob.from_bytes(forged(header | {"ids_digest": digest}, payload))


def test_a_blob_of_another_model_is_refused_by_name() -> None:
    with pytest.raises(BlobError, match=r"model-a.*model-b"):
        Blob.from_bytes(a_blob().to_bytes(), fingerprint="model-b")


def test_a_blob_is_read_for_any_model_when_none_is_named() -> None:
    assert Blob.from_bytes(a_blob().to_bytes()).fingerprint == "model-a"


def test_a_pickle_is_not_run() -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("the pickle was executed",))

    trap = pickle.dumps(Trap())
    for raw in (trap, MAGIC + trap, forged(trap), forged({"shape": [1, 2, 1, 1, 1]}, trap)):
        with pytest.raises(BlobError):
            Blob.from_bytes(raw)


def test_random_bytes_never_raise_anything_else() -> None:
    draw = random.Random(1)
    for _ in range(2_000):
        body = draw.randbytes(draw.randrange(200))
        for raw in (body, MAGIC + body, forged(body), forged(body, body)):
            with pytest.raises(BlobError):
                Blob.from_bytes(raw)
