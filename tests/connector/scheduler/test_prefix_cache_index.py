"""Forgetting reaches every cached block computed from a fact, in vLLM's own block pool, and no other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from inferscale_memory.connector.scheduler.prefix_cache_index import PrefixCacheIndex

BLOCK = 4
ALICE = ("alice", "fact")


class Cache:
    """vLLM's block pool, and requests that fill blocks of it."""

    def __init__(self, blocks: int = 200) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK)

    def request(self, ids: Sequence[int], salt: str = "salt") -> Request:
        sampling = SamplingParams(max_tokens=1)
        sampling.update_from_generation_config({}, eos_token_id=3)
        hasher = get_request_block_hasher(BLOCK, sha256)
        return Request("r", list(ids), sampling, None, cache_salt=salt, block_hasher=hasher)

    def fill(self, ids: Sequence[int], salt: str = "salt") -> tuple[Request, list[Any]]:
        """Prefill a prompt: its blocks, full ones cached. Duplicates are not shared, as in vLLM."""
        request = self.request(ids, salt)
        blocks = self.pool.get_new_blocks(-(-len(ids) // BLOCK))
        self.pool.cache_full_blocks(request, blocks, 0, len(ids) // BLOCK, BLOCK, 0)
        return request, blocks

    def hit(self, ids: Sequence[int], salt: str = "salt") -> list[bool]:
        """Which blocks of a prompt somebody could hit."""
        hashes = self.request(ids, salt).block_hashes
        return [self.pool.get_cached_block(block_hash, [0]) is not None for block_hash in hashes]


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def index(cache: Cache) -> PrefixCacheIndex:
    return PrefixCacheIndex(cache.pool, BLOCK)


IDS = tuple(range(100, 118))  # four full blocks and two tokens more


def test_forgetting_evicts_from_the_first_block_that_holds_the_fact_to_the_end(
    cache: Cache, index: PrefixCacheIndex
) -> None:
    request, _ = cache.fill(IDS)
    index.note([(ALICE, 9)], request.block_hashes)
    index.evict(ALICE)
    assert cache.hit(IDS) == [True, True, False, False]


@pytest.mark.parametrize(("position", "first"), [(0, 0), (3, 0), (4, 1), (7, 1), (12, 3), (15, 3)])
def test_a_fact_is_held_from_the_block_in_which_it_begins(
    cache: Cache, index: PrefixCacheIndex, position: int, first: int
) -> None:
    request, _ = cache.fill(IDS)
    index.note([(ALICE, position)], request.block_hashes)
    index.evict(ALICE)
    assert cache.hit(IDS) == [index < first for index in range(4)]


def test_a_fact_that_fills_no_block_is_held_by_none(cache: Cache, index: PrefixCacheIndex) -> None:
    request, _ = cache.fill(IDS)
    index.note([(ALICE, 16), (ALICE, 10_000)], request.block_hashes)
    index.evict(ALICE)
    assert cache.hit(IDS) == [True] * 4
    assert len(index) == 0


def test_every_duplicate_of_a_block_is_evicted(cache: Cache, index: PrefixCacheIndex) -> None:
    request, _ = cache.fill(IDS)
    cache.fill(IDS)
    cache.fill(IDS)
    index.note([(ALICE, 4)], request.block_hashes)
    index.evict(ALICE)
    assert cache.hit(IDS) == [True, False, False, False]
    cached = [block for block in cache.pool.blocks if block.block_hash is not None]
    assert len(cached) == 3  # the three first blocks


def test_blocks_in_use_stay_in_use(cache: Cache, index: PrefixCacheIndex) -> None:
    request, blocks = cache.fill(IDS)
    index.note([(ALICE, 0)], request.block_hashes)
    index.evict(ALICE)
    assert all(block.ref_cnt == 1 for block in blocks)
    cache.pool.free_blocks(reversed(blocks))
    assert cache.pool.get_num_free_blocks() == 199


def test_the_same_prompt_under_another_salt_is_left_alone(cache: Cache, index: PrefixCacheIndex) -> None:
    request, _ = cache.fill(IDS, "alice's")
    cache.fill(IDS, "bob's")
    index.note([(ALICE, 0)], request.block_hashes)
    index.evict(ALICE)
    assert cache.hit(IDS, "alice's") == [False] * 4
    assert cache.hit(IDS, "bob's") == [True] * 4


@pytest.mark.parametrize("other", [("bob", "fact"), ("alice", "fact2"), ("fact", "alice"), ("", "")], ids=str)
def test_another_name_evicts_nothing(cache: Cache, index: PrefixCacheIndex, other: tuple[str, str]) -> None:
    request, _ = cache.fill(IDS)
    index.note([(ALICE, 0)], request.block_hashes)
    index.evict(other)
    assert cache.hit(IDS) == [True] * 4


def test_a_fact_in_many_prompts_is_evicted_from_all(cache: Cache, index: PrefixCacheIndex) -> None:
    prompts = [(*range(start, start + 4), 1, 2, 3, 4, start) for start in range(100, 200, 10)]
    for prompt in prompts:
        request, _ = cache.fill(prompt)
        index.note([(ALICE, 4)], request.block_hashes)
    index.evict(ALICE)
    assert [cache.hit(prompt) for prompt in prompts] == [[True, False]] * 10


def test_a_prompt_that_goes_on_after_another_is_evicted_with_it(
    cache: Cache, index: PrefixCacheIndex
) -> None:
    """A chat's next turn: the same beginning, other tokens after it."""
    first, _ = cache.fill(IDS[:8])
    second, _ = cache.fill((*IDS[:8], 1, 2, 3, 4))
    third, _ = cache.fill((*IDS[:8], 5, 6, 7, 8, 9, 10, 11, 12))
    for request in (first, second, third):
        index.note([(ALICE, 6)], request.block_hashes)
    index.evict(ALICE)
    assert cache.hit((*IDS[:8], 1, 2, 3, 4)) == [True, False, False]
    assert cache.hit((*IDS[:8], 5, 6, 7, 8, 9, 10, 11, 12)) == [True, False, False, False]


def test_of_a_fact_that_stands_in_a_prompt_twice_the_first_counts(
    cache: Cache, index: PrefixCacheIndex
) -> None:
    for mentions in ([(ALICE, 13), (ALICE, 5)], [(ALICE, 5), (ALICE, 13)]):
        request, _ = cache.fill(IDS)
        index.note(mentions, request.block_hashes)
        index.evict(ALICE)
        assert cache.hit(IDS) == [True, False, False, False]


def test_two_facts_of_a_prompt_are_forgotten_each_for_itself(cache: Cache, index: PrefixCacheIndex) -> None:
    request, _ = cache.fill(IDS)
    index.note([(("alice", "early"), 2), (("alice", "late"), 9)], request.block_hashes)
    index.evict(("alice", "late"))
    assert cache.hit(IDS) == [True, True, False, False]
    index.evict(("alice", "early"))
    assert cache.hit(IDS) == [False] * 4


def test_a_fact_forgotten_and_remembered_again_can_be_forgotten_again(
    cache: Cache, index: PrefixCacheIndex
) -> None:
    for _ in range(3):
        request, _ = cache.fill(IDS)
        index.note([(ALICE, 0)], request.block_hashes)
        assert cache.hit(IDS) == [True] * 4
        index.evict(ALICE)
        assert cache.hit(IDS) == [False] * 4


def test_a_block_evicted_and_cached_again_is_still_known(cache: Cache, index: PrefixCacheIndex) -> None:
    """Its place was needed, and another request has computed it since: the name is as true as before."""
    request, blocks = cache.fill(IDS)
    index.note([(ALICE, 0)], request.block_hashes)
    cache.pool.evict_blocks({block.block_id for block in blocks})
    cache.fill(IDS)
    index.evict(ALICE)
    assert cache.hit(IDS) == [False] * 4


def test_a_prompt_without_hashes_is_nothing_to_remember(cache: Cache, index: PrefixCacheIndex) -> None:
    """Prefix caching is off."""
    index.note([(ALICE, 0)], [])
    index.evict(ALICE)
    assert len(index) == 0


def test_blocks_are_evicted_by_their_hashes(cache: Cache, index: PrefixCacheIndex) -> None:
    request, _ = cache.fill(IDS)
    cache.fill(IDS)
    index.evict_hashes(request.block_hashes[1:3])
    assert cache.hit(IDS) == [True, False, False, True]


# -- memory --------------------------------------------------------------------------------------------------


def test_the_same_prompt_asked_for_ever_costs_no_memory(cache: Cache) -> None:
    index = PrefixCacheIndex(cache.pool, BLOCK, limit=10)
    request, _ = cache.fill(IDS)
    for _ in range(1_000):
        index.note([(ALICE, 0), (("alice", "other"), 9)], request.block_hashes)
    assert len(index) == 4
    index.evict(ALICE)
    assert cache.hit(IDS) == [False] * 4


def test_ever_new_questions_after_the_same_facts_cost_only_what_is_cached() -> None:
    """The facts stay cached, every question is soon evicted: only what can be hit is remembered."""
    cache = Cache(blocks=40)
    index = PrefixCacheIndex(cache.pool, BLOCK, limit=100)
    facts, _held = cache.fill(IDS[:16])
    index.note([(ALICE, 0)], facts.block_hashes)
    for question in range(2_000):
        request = cache.request(IDS[:16] + (1_000 + question,) * 8)
        blocks = cache.pool.get_new_blocks(2)
        prefix = [cache.pool.get_cached_block(h, [0])[0] for h in request.block_hashes[:4]]  # type: ignore[index]
        cache.pool.cache_full_blocks(request, prefix + blocks, 4, 6, BLOCK, 0)
        index.note([(ALICE, 0), (("alice", f"tag{question}"), 17)], request.block_hashes)
        cache.pool.free_blocks(reversed(blocks))
        assert len(index) <= 101
    assert len(index._first) <= 101
    index.evict(ALICE)
    assert all(block.block_hash is None for block in cache.pool.blocks)


def test_what_is_cached_is_remembered_however_much_it_is(cache: Cache) -> None:
    index = PrefixCacheIndex(cache.pool, BLOCK, limit=5)
    prompts = [tuple(range(start, start + 12)) for start in range(0, 600, 20)]
    for number, prompt in enumerate(prompts):
        request, _ = cache.fill(prompt)
        index.note([(("alice", str(number)), 4)], request.block_hashes)
    for number, prompt in enumerate(prompts):
        assert cache.hit(prompt) == [True] * 3
        index.evict(("alice", str(number)))
        assert cache.hit(prompt) == [True, False, False]


def test_a_block_is_reached_over_one_before_it_that_is_cached_no_more(cache: Cache) -> None:
    index = PrefixCacheIndex(cache.pool, BLOCK, limit=4)
    request, blocks = cache.fill(IDS)
    index.note([(ALICE, 0)], request.block_hashes)
    cache.pool.evict_blocks({blocks[1].block_id})
    index.note([(("alice", "other"), 0)], cache.fill(IDS[::-1])[0].block_hashes)  # more than the limit
    index.evict(ALICE)
    assert cache.hit(IDS) == [False] * 4


def test_over_thousands_of_requests_nothing_forgotten_can_be_hit() -> None:
    """Prompts out of few words share many beginnings; blocks come and go; names are forgotten at random."""
    draw, cache = random.Random(7), Cache(blocks=60)
    index = PrefixCacheIndex(cache.pool, BLOCK, limit=30)
    prompts: dict[tuple[int, ...], tuple[Request, list[tuple[str, int]]]] = {}

    def mentions(prompt: tuple[int, ...]) -> list[tuple[str, int]]:
        """A fact in every third place, which one depends on what stands before it."""
        return [(str(hash(prompt[: at + 1]) % 6), at) for at in range(0, len(prompt), 3)]

    for _ in range(1_500):
        if draw.random() < 0.85:
            prompt = tuple(draw.choice((1, 2)) for _ in range(BLOCK)) * draw.randrange(1, 5)
            prompt += tuple(draw.choice((3, 4)) for _ in range(draw.randrange(9)))
            request, blocks = cache.fill(prompt)
            index.note([(("alice", tag), at) for tag, at in mentions(prompt)], request.block_hashes)
            cache.pool.free_blocks(reversed(blocks))
            prompts[prompt] = request, mentions(prompt)
            continue
        forgotten = str(draw.randrange(6))
        index.evict(("alice", forgotten))
        for request, facts in prompts.values():
            first = min(
                (at // BLOCK for tag, at in facts if tag == forgotten), default=len(request.block_hashes)
            )
            assert not any(cache.pool.get_cached_block(h, [0]) for h in request.block_hashes[first:])
    assert len(index) <= 2 * 60
