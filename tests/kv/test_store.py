"""The store decides where blobs are kept, and arenas that carry out its decisions hold what it says."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from inferscale_memory.kv.arena import Arena, Shape
from inferscale_memory.kv.store import BlobStore, Entry
from inferscale_memory.kv.tier import RowAllocator, Rows

SHAPE = Shape(layers=1, kv_heads=1, head_dim=1, dtype=torch.float32)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine two threads take ten times as long over tensors as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Shelves:
    """A store, and arenas that carry out what it decides. Every row of a blob holds the blob's number."""

    def __init__(self, *capacities: int) -> None:
        names = ("device", "host", "disk")
        self.store = BlobStore([RowAllocator(n, c) for n, c in zip(names, capacities, strict=False)])
        self.arenas = [Arena(SHAPE, capacity) for capacity in capacities]
        for arena in self.arenas:
            arena.wipe(np.arange(arena.rows))

    def put(self, name: str, tokens: int, *, number: float | None = None) -> Entry | None:
        """Reserve, write and commit a blob; None when there is no room."""
        rows = self.store.reserve(tokens)
        if rows is None:
            return None
        self.carry_out()
        number = float(name) if number is None else number
        self.arenas[0].write(rows, torch.full((1, 2, tokens, 1, 1), number))
        return self.store.commit(name, "alice", name.encode(), rows)

    def carry_out(self) -> None:
        for move in self.store.take_moves():
            source = self.arenas[move.source]
            self.arenas[move.target].copy_rows(source, move.source_rows, move.target_rows)
        for wipe in self.store.take_wipes():
            self.arenas[wipe.tier].wipe(wipe.rows)

    def promote(self, *names: str) -> bool:
        """Bring blobs to the device as one step does, and carry the moves out."""
        done = self.store.promote([self.entry(name) for name in names])
        self.carry_out()
        self.store.unpin_all()
        return done

    def entry(self, name: str) -> Entry:
        entry = self.store.get(name)
        assert entry is not None, f"{name} is not at hand"
        return entry

    def tiers_of(self, name: str) -> list[int]:
        return sorted(self.entry(name).rows)

    def on_device(self) -> set[str]:
        return {name for name in self.names() if 0 in self.entry(name).rows}

    def names(self) -> list[str]:
        return [str(n) for n in range(30) if str(n) in self.store]

    def sound(self, *, out: Sequence[Rows] = ()) -> bool:
        """Every copy of every blob holds its number; no two share a row; what is free adds up, and holds nothing."""
        self.carry_out()
        for number, (arena, tier) in enumerate(zip(self.arenas, self.store.tiers, strict=True)):
            held: list[Rows] = list(out) if number == 0 else []
            for name in self.names():
                rows = self.entry(name).rows.get(number)
                if rows is None:
                    continue
                held.append(rows)
                assert len(rows) == self.entry(name).tokens
                assert (arena.read(rows) == float(name)).all(), f"{name} on tier {number} is another"
            every = np.concatenate([np.empty(0, dtype=np.int64), *held])
            free = np.setdiff1d(np.arange(tier.capacity), every)
            assert (arena.read(free) == 0).all(), f"something is left in free rows of tier {number}"
            assert len(np.unique(every)) == len(every), "two blobs share a row"
            assert tier.free == tier.capacity - len(every), "free rows do not add up"
            copies = {
                name for name in self.names() if min(self.entry(name).rows) < number in self.entry(name).rows
            }
            assert set(self.store._copies[number]) == copies
            owners: dict[str, set[str]] = {}
            for name in self.names():
                if number in self.entry(name).rows:
                    owners.setdefault(self.entry(name).owner, set()).add(name)
            shares = self.store._shares[number]._owners
            assert {owner: set(share.blobs) for owner, share in shares.items()} == owners
            assert sum(share.tokens for share in shares.values()) == self.store._stored[number]
        return True


@pytest.fixture
def two() -> Iterator[Shelves]:
    """Room for three blobs of ten tokens on the device, for four on the host."""
    shelves = Shelves(30, 40)
    yield shelves
    assert shelves.sound()


# -- writing ------------------------------------------------------------------------------------------------


def test_a_store_without_tiers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one tier"):
        BlobStore([])


def test_a_blob_is_at_hand_only_when_it_is_committed() -> None:
    shelves = Shelves(30)
    rows = shelves.store.reserve(10)
    assert rows is not None
    assert len(shelves.store) == 0
    assert "1" not in shelves.store
    shelves.store.commit("1", "alice", b"digest", rows)
    entry = shelves.store.get("1")
    assert entry is not None
    assert (entry.key, entry.owner, entry.ids_digest, entry.tokens) == ("1", "alice", b"digest", 10)


def test_what_is_reserved_and_not_committed_can_be_given_back() -> None:
    shelves = Shelves(30)
    rows = shelves.store.reserve(30)
    assert rows is not None
    assert shelves.store.reserve(1) is None
    shelves.store.release(rows)
    assert shelves.store.tiers[0].free == 30


def test_what_is_reserved_is_never_evicted(two: Shelves) -> None:
    rows = two.store.reserve(25)
    assert rows is not None
    assert two.put("1", 5)
    assert two.store.reserve(6) is None
    assert two.tiers_of("1") == [0]
    two.store.release(rows)


def test_a_blob_larger_than_the_device_is_refused_and_nothing_is_evicted(two: Shelves) -> None:
    two.put("1", 10)
    assert two.store.reserve(31) is None
    assert two.tiers_of("1") == [0]


def test_a_known_key_keeps_its_first_blob_and_the_second_gives_its_rows_back(two: Shelves) -> None:
    first = two.put("1", 10)
    assert two.put("1", 10, number=99.0) is first
    assert two.store.tiers[0].free == 20


def test_committing_a_known_key_counts_as_using_it(two: Shelves) -> None:
    two.put("1", 10)
    two.put("2", 10)
    two.put("1", 10, number=99.0)
    two.put("3", 20)
    assert two.on_device() == {"1", "3"}


# -- what may be injected -----------------------------------------------------------------------------------


@pytest.fixture
def owned() -> BlobStore:
    """A public blob, three of alice and one of bob, of ten tokens each. A blob's digest is its name."""
    store = BlobStore([RowAllocator("device", 100)], public_owner="public")
    for key in ("public 0", "alice 1", "alice 2", "alice 3", "bob 4"):
        rows = store.reserve(10)
        assert rows is not None
        store.commit(key, key.split()[0], key.encode(), rows)
    return store


def verified(
    store: BlobStore, owner: str, keys: Sequence[str], ids: Sequence[str], **options: int
) -> list[str]:
    """The keys that `verify` lets into a prompt whose ids have these digests."""
    segments = [(key, 10) for key in keys]
    found = store.verify(owner, segments, lambda start, stop: ids[start // 10].encode(), **options)
    return [entry.key for entry in found.entries]


def test_a_prompt_may_use_blobs_of_its_owner_and_of_the_public_owner(owned: BlobStore) -> None:
    keys = ["public 0", "alice 1", "alice 2"]
    assert verified(owned, "alice", keys, keys) == keys
    assert [owned.usable("alice", key) is not None for key in (*keys, "bob 4")] == [True, True, True, False]


@pytest.mark.parametrize("key", ["bob 4", "unknown"])
def test_a_prompt_is_verified_up_to_a_blob_that_is_missing_or_of_another_owner(
    owned: BlobStore, key: str
) -> None:
    keys = ["alice 1", key, "alice 2"]
    found = owned.verify("alice", [(key, 10) for key in keys], lambda start, _: keys[start // 10].encode())
    assert [entry.key for entry in found.entries] == ["alice 1"]
    assert not found.mismatch, "nobody can tell another owner's blob from a missing one"


def test_a_prompt_is_verified_up_to_a_blob_of_other_token_ids(owned: BlobStore) -> None:
    keys = ["alice 1", "alice 2", "alice 3"]
    ids = ["alice 1", "other", "alice 3"]
    found = owned.verify("alice", [(key, 10) for key in keys], lambda start, _: ids[start // 10].encode())
    assert ([entry.key for entry in found.entries], found.mismatch) == (["alice 1"], True)


def test_a_blob_of_another_length_is_a_mismatch(owned: BlobStore) -> None:
    found = owned.verify(
        "alice", [("alice 1", 10), ("alice 2", 9)], lambda start, _: [b"alice 1", b"alice 2"][start // 10]
    )
    assert (len(found.entries), found.mismatch) == (1, True)


def test_segments_that_passed_before_are_not_hashed_again(owned: BlobStore) -> None:
    keys, hashed = ["alice 1", "alice 2", "alice 3"], []

    def digest_of(start: int, stop: int) -> bytes:
        hashed.append((start, stop))
        return keys[start // 10].encode()

    assert len(owned.verify("alice", [(key, 10) for key in keys], digest_of, checked=2).entries) == 3
    assert hashed == [(20, 30)]


def test_segments_that_passed_before_still_need_their_blobs(owned: BlobStore) -> None:
    owned.forget("alice 1")
    assert verified(owned, "alice", ["alice 1", "alice 2"], ["alice 1", "alice 2"], checked=2) == []


def test_without_a_public_owner_a_prompt_may_use_blobs_of_its_owner_alone() -> None:
    store = BlobStore([RowAllocator("device", 10)])
    rows = store.reserve(10)
    assert rows is not None
    store.commit("key", "public", b"", rows)
    assert store.usable("alice", "key") is None


def test_an_owner_forgets_only_its_own_blobs(owned: BlobStore) -> None:
    assert owned.forget_of("alice", ["public 0", "bob 4", "unknown", "alice 1", "alice 2", "alice 1"]) == 2
    assert len(owned) == 3


# -- eviction -----------------------------------------------------------------------------------------------


def test_the_least_recently_used_blob_goes_first(two: Shelves) -> None:
    for name in "123":
        two.put(name, 10)
    two.store.touch(["1"])
    two.put("4", 10)
    assert two.on_device() == {"1", "3", "4"}


def test_as_many_go_as_are_needed_and_no_more(two: Shelves) -> None:
    for name in "123":
        two.put(name, 10)
    two.put("4", 11)
    assert two.on_device() == {"3", "4"}


def test_an_evicted_blob_is_kept_on_the_host(two: Shelves) -> None:
    for name in "1234":
        two.put(name, 10)
    assert two.tiers_of("1") == [1]


def test_without_a_host_an_evicted_blob_is_gone() -> None:
    shelves = Shelves(30)
    for name in "1234":
        shelves.put(name, 10)
    assert shelves.names() == ["2", "3", "4"]
    assert shelves.sound()


def test_when_the_host_is_full_its_least_recently_used_blob_is_gone(two: Shelves) -> None:
    for name in "12345678":
        two.put(name, 10)
    assert two.names() == ["2", "3", "4", "5", "6", "7", "8"]


def test_on_the_host_copies_of_what_the_device_holds_go_first() -> None:
    """Blobs that nobody has asked for yet are only on the host, so they stay."""
    shelves = Shelves(30, 50)
    names = [str(number) for number in range(13)]
    for name in names:
        assert shelves.put(name, 5)
    draw = random.Random(7)
    for _ in range(300):
        chosen = draw.sample(names, draw.randrange(1, 4))
        assert shelves.promote(*chosen)
        assert all(name in shelves.store for name in names)
    assert shelves.sound()


def test_a_blob_too_large_for_the_host_is_gone_when_evicted() -> None:
    shelves = Shelves(30, 5)
    shelves.put("1", 10)
    shelves.put("2", 5)
    shelves.put("3", 30)
    assert shelves.names() == ["2", "3"]
    assert shelves.tiers_of("2") == [1]
    assert shelves.sound()


def test_a_promoted_blob_keeps_its_copy_on_the_host(two: Shelves) -> None:
    for name in "1234":
        two.put(name, 10)
    assert two.promote("1")
    assert two.tiers_of("1") == [0, 1]


def test_evicting_a_blob_that_has_a_copy_below_moves_nothing(two: Shelves) -> None:
    for name in "1234":
        two.put(name, 10)
    two.promote("1")
    two.promote("3", "4")
    rows = two.store.reserve(10)
    assert two.store.take_moves() == []
    assert two.tiers_of("1") == [1]
    two.store.release(rows)  # type: ignore[arg-type]


def test_three_tiers_pass_a_blob_down_and_bring_it_up_in_one_move() -> None:
    shelves = Shelves(10, 10, 10)
    for name in "123":
        shelves.put(name, 10)
    assert [shelves.tiers_of(name) for name in "123"] == [[2], [1], [0]]
    assert shelves.promote("1")
    assert shelves.sound()
    assert shelves.tiers_of("1") == [0, 2]


# -- reading ------------------------------------------------------------------------------------------------


def test_a_blob_that_was_demoted_and_promoted_holds_what_was_written(two: Shelves) -> None:
    for name in "1234":
        two.put(name, 10)
    two.promote("1")
    assert (two.arenas[0].read(two.entry("1").rows[0]) == 1.0).all()


def test_a_blob_evicted_and_brought_back_in_one_step_holds_what_was_written(two: Shelves) -> None:
    """Its rows on the device go to another blob in between, so the moves must be carried out in order."""
    for name in "123":
        two.put(name, 10)
    rows = two.store.reserve(10)  # evicts 1 ...
    assert rows is not None
    two.store.release(rows)
    assert two.store.promote([two.entry("1")])  # ... and brings it back, before anything was carried out
    two.carry_out()
    two.store.unpin_all()
    assert two.sound()


def test_what_is_promoted_is_used_just_now(two: Shelves) -> None:
    for name in "123":
        two.put(name, 10)
    two.promote("2", "1")
    two.put("4", 10)
    assert two.on_device() == {"1", "2", "4"}


def test_the_end_of_what_was_promoted_gives_way_before_its_beginning(two: Shelves) -> None:
    for name in "123":
        two.put(name, 10)
    two.promote("2", "1", "3")
    two.put("4", 10)
    assert two.on_device() == {"2", "1", "4"}


def test_what_is_promoted_stays_until_it_is_unpinned(two: Shelves) -> None:
    for name in "123":
        two.put(name, 10)
    assert two.store.promote([two.entry("1"), two.entry("2")])
    assert two.store.reserve(11) is None
    two.store.unpin_all()
    assert two.put("4", 11)


def test_what_is_promoted_keeps_its_place_on_the_host_too_until_it_is_unpinned() -> None:
    """Its move up has not been carried out: its rows below must not be overwritten before it is."""
    shelves = Shelves(20, 10)
    shelves.put("1", 10)
    shelves.put("2", 10)
    shelves.put("3", 10)
    assert shelves.tiers_of("1") == [1]
    assert shelves.store.promote([shelves.entry("1")])  # 2 has to go, and finds no room below
    shelves.carry_out()
    shelves.store.unpin_all()
    assert shelves.names() == ["1", "3"]
    assert shelves.sound()


def test_a_composition_may_hold_a_blob_more_than_once(two: Shelves) -> None:
    for name in "1234":
        two.put(name, 10)
    entries = [two.entry(name) for name in "1211"]
    assert two.store.promotable(entries) == 4
    assert two.promote(*"1211")


def test_a_composition_as_large_as_the_device_fits(two: Shelves) -> None:
    for name in "123456":
        two.put(name, 10)
    assert two.promote(*"123")
    assert two.on_device() == {"1", "2", "3"}


def test_of_a_composition_larger_than_the_device_the_leading_part_fits(two: Shelves) -> None:
    for name in "123456":
        two.put(name, 10)
    entries = [two.entry(name) for name in "123456"]
    assert two.store.promotable(entries) == 3
    assert not two.promote(*"1234")
    assert two.store.promote(entries[:3])
    two.carry_out()
    two.store.unpin_all()
    assert two.on_device() == {"1", "2", "3"}


def test_the_end_of_a_composition_makes_room_for_its_beginning(two: Shelves) -> None:
    """The device holds 4, 5 and 6: were they kept for later, the leading part would never get in."""
    for name in "123456":
        two.put(name, 10)
    assert two.store.promotable([two.entry(name) for name in "412356"]) == 3
    assert two.store.promotable([two.entry(name) for name in "124563"]) == 3
    assert two.promote(*"124")


def test_promotable_counts_what_is_pinned_already_as_taken(two: Shelves) -> None:
    for name in "12345":
        two.put(name, 10)
    two.store.promote([two.entry("4"), two.entry("5")])
    assert two.store.promotable([two.entry(name) for name in "4512"]) == 3
    assert two.store.promotable([two.entry(name) for name in "12"]) == 1
    two.store.unpin_all()


def test_what_the_tier_holds_does_not_depend_on_pins(two: Shelves) -> None:
    for name in "12345":
        two.put(name, 10)
    two.store.promote([two.entry("4"), two.entry("5")])
    entries = [two.entry(name) for name in "1232"]
    assert two.store.promotable(entries) == 1
    assert two.store.holds(entries)
    assert not two.store.holds(entries, beside=1)
    assert not two.store.holds([two.entry(name) for name in "1234"])
    two.carry_out()
    two.store.unpin_all()
    rows = two.store.reserve(10)
    assert rows is not None
    assert not two.store.holds(entries), "what is reserved is not there"
    assert two.store.holds(entries[:2])
    two.store.release(rows)
    two.carry_out()


def test_promotable_changes_nothing(two: Shelves) -> None:
    for name in "123456":
        two.put(name, 10)
    two.store.promotable([two.entry(name) for name in "123456"])
    assert two.store.take_moves() == []
    assert two.on_device() == {"4", "5", "6"}


def test_a_promotion_that_does_not_fit_moves_and_pins_nothing(two: Shelves) -> None:
    for name in "1234":
        two.put(name, 10)
    assert not two.store.promote([two.entry(name) for name in "1234"])
    assert two.store.take_moves() == []
    assert two.put("5", 30)


def test_nothing_is_always_promotable(two: Shelves) -> None:
    assert two.store.promotable([]) == 0
    assert two.store.promote([])


def test_moves_are_handed_out_once(two: Shelves) -> None:
    for name in "123":
        two.put(name, 10)
    rows = two.store.reserve(10)
    assert len(two.store.take_moves()) == 1
    assert two.store.take_moves() == []
    assert rows is not None
    two.store.release(rows)
    two.store.forget("1")  # its move was not carried out here


# -- forgetting ---------------------------------------------------------------------------------------------


def test_a_forgotten_blob_is_gone_from_every_tier(two: Shelves) -> None:
    for name in "1234":
        two.put(name, 10)
    two.promote("1")
    assert two.tiers_of("1") == [0, 1]
    assert two.store.forget("1")
    assert "1" not in two.store
    assert two.store.get("1") is None


def test_forgetting_what_is_not_there_says_so(two: Shelves) -> None:
    assert not two.store.forget("1")
    two.put("1", 10)
    assert two.store.forget("1")
    assert not two.store.forget("1")


def test_a_forgotten_key_can_be_stored_again(two: Shelves) -> None:
    two.put("1", 10)
    two.store.forget("1")
    assert two.put("1", 10)


def test_a_blob_forgotten_while_pinned_gives_its_rows_back(two: Shelves) -> None:
    two.put("1", 10)
    two.store.promote([two.entry("1")])
    two.store.forget("1")
    assert two.store.tiers[0].free == 30
    two.store.unpin_all()


# -- everything at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacities", [(40,), (40, 60), (24, 1_000), (60, 30), (20, 30, 40)], ids=str)
def test_over_thousands_of_random_operations_the_store_is_right(capacities: tuple[int, ...]) -> None:
    """Against a model that is a dictionary: key -> tokens of what was written and not forgotten."""
    draw, shelves = random.Random(str(capacities)), Shelves(*capacities)
    written: dict[str, int] = {}
    reserved: list[tuple[str, Rows]] = []

    def put() -> None:
        name, tokens = str(draw.randrange(30)), draw.randrange(1, 13)
        tokens = written.get(name, tokens) if name in shelves.store else tokens
        rows = shelves.store.reserve(tokens)
        if rows is None:
            assert tokens + sum(len(r) for _, r in reserved) > capacities[0]
            return
        shelves.carry_out()
        shelves.arenas[0].write(rows, torch.full((1, 2, tokens, 1, 1), float(name)))
        reserved.append((name, rows))

    def settle() -> None:
        if reserved:
            name, rows = reserved.pop(draw.randrange(len(reserved)))
            known = shelves.store.get(name)
            if draw.random() < 0.2 or (known is not None and known.tokens != len(rows)):
                shelves.store.release(rows)
            else:
                shelves.store.commit(name, f"owner {int(name) % 3}", b"", rows)
                written[name] = len(rows)

    def compose() -> None:
        names = shelves.names()
        entries = [shelves.entry(draw.choice(names)) for _ in range(draw.randrange(9) if names else 0)]
        count = shelves.store.promotable(entries)
        leading = entries[:count]
        if count < len(entries):
            needed = {entry.key: entry.tokens for entry in entries[: count + 1]}
            assert sum(needed.values()) + sum(len(r) for _, r in reserved) > capacities[0]
        assert shelves.store.promote(leading)
        if draw.random() < 0.5:  # another request of the same step, or an encode
            rest = entries[count:]
            shelves.store.promote(rest[: shelves.store.promotable(rest)])
        shelves.carry_out()
        for entry in leading:
            assert (shelves.arenas[0].read(entry.rows[0]) == float(entry.key)).all()
        shelves.store.unpin_all()

    def forget() -> None:
        name = str(draw.randrange(30))
        known = name in shelves.store
        assert shelves.store.forget(name) == known
        written.pop(name, None)
        assert name not in shelves.store

    for count in range(3_000):
        draw.choices([put, settle, compose, forget], weights=[4, 4, 4, 1])[0]()
        assert set(shelves.names()) <= set(written), "a blob is at hand that nobody wrote"
        assert all(shelves.entry(name).tokens == written[name] for name in shelves.names())
        if count % 10 == 0:
            assert shelves.sound(out=[rows for _, rows in reserved])
    assert shelves.sound(out=[rows for _, rows in reserved])
    for _, rows in reserved:
        shelves.store.release(rows)
    for name in shelves.names():
        shelves.store.forget(name)
    assert [tier.free for tier in shelves.store.tiers] == list(capacities)
