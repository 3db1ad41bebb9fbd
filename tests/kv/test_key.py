"""A blob's key depends on everything its keys and values depend on, and on nothing else."""

from __future__ import annotations

import itertools

import numpy as np

from inferscale_memory.kv.key import blob_key, digest_ids, hash_fields

SECRET = b"a secret"
CONTEXT, FACT = [1, 2, 3], [4, 5]


def test_a_key_is_forty_hexadecimal_digits() -> None:
    key = blob_key(SECRET, "model", "alice", CONTEXT, FACT)
    assert len(key) == 40
    assert set(key) <= set("0123456789abcdef")


def test_the_same_content_has_the_same_key_whatever_holds_the_ids() -> None:
    keys = {
        blob_key(SECRET, "model", "alice", make(CONTEXT), make(FACT))
        for make in (list, tuple, np.array, lambda ids: np.array(ids, dtype=np.int32))
    }
    assert len(keys) == 1


def test_every_field_changes_the_key() -> None:
    keys = {
        blob_key(SECRET, "model", "alice", CONTEXT, FACT),
        blob_key(b"another", "model", "alice", CONTEXT, FACT),
        blob_key(b"", "model", "alice", CONTEXT, FACT),
        blob_key(SECRET, "model2", "alice", CONTEXT, FACT),
        blob_key(SECRET, "model", "bob", CONTEXT, FACT),
        blob_key(SECRET, "model", "alice", [1, 2, 7], FACT),
        blob_key(SECRET, "model", "alice", CONTEXT, [4, 6]),
        blob_key(SECRET, "model", "alice", [], FACT),
        blob_key(SECRET, "model", "alice", CONTEXT, []),
    }
    assert len(keys) == 9


def test_the_order_of_the_context_changes_the_key() -> None:
    keys = {blob_key(SECRET, "m", "a", order, FACT) for order in itertools.permutations(CONTEXT)}
    assert len(keys) == 6


def test_where_the_context_ends_and_the_fact_begins_changes_the_key() -> None:
    ids = [1, 2, 3, 4, 5]
    assert len({blob_key(SECRET, "m", "a", ids[:cut], ids[cut:]) for cut in range(6)}) == 6


def test_a_letter_that_moves_from_the_model_to_the_owner_changes_the_key() -> None:
    assert blob_key(SECRET, "ab", "c", CONTEXT, FACT) != blob_key(SECRET, "a", "bc", CONTEXT, FACT)


def test_an_owner_in_any_alphabet_has_a_key() -> None:
    owners = ["", "alice", "ålice", "爱丽丝", "a\0b", "a" * 10_000]
    assert len({blob_key(SECRET, "m", owner, CONTEXT, FACT) for owner in owners}) == len(owners)


def test_fields_are_told_apart_by_their_lengths() -> None:
    splits = [(b"abc",), (b"ab", b"c"), (b"a", b"bc"), (b"abc", b""), (b"", b"abc"), (b"a", b"b", b"c")]
    assert len({hash_fields(SECRET, *fields) for fields in splits}) == len(splits)


def test_a_digest_stands_for_the_ids_in_their_order() -> None:
    assert digest_ids([1, 2, 3]) == digest_ids(np.array([1, 2, 3]))
    assert len({digest_ids(ids) for ids in ([], [0], [0, 0], [1, 2], [2, 1], [1 << 8], [256, 1])}) == 7
    assert len(digest_ids([1])) == 16
