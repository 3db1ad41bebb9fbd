"""A model that cannot be injected starts all the same, is served as text, and what is forgotten leaves its cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscale_memory.connector.groups import CacheOfGroups
from inferscale_memory.prompt.segments import Prompt, Segment
from tests.connector.rig import Rig
from tests.connector.test_positions import served_as_text
from tests.models import tiny_model


@pytest.mark.engine
def test_gated_delta_nets_are_served_as_text(tmp_path: Path) -> None:
    """Qwen3-Next. vLLM's CPU build runs it in bf16 alone."""
    options = {"block_size": None, "num_gpu_blocks_override": None}
    with Rig.open(tiny_model("qwen3_next", tmp_path), dtype="bfloat16", **options) as rig:
        assert "recurrent layers" in rig.unsupported
        served_as_text(rig)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Granite 4 H: Mamba layers and attention in one model."""
    model = tiny_model("granitemoehybrid", tmp_path_factory.mktemp("granite"))
    options = {
        "block_size": None,
        "num_gpu_blocks_override": None,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        "max_num_batched_tokens": 128,  # vLLM's CPU build computes one chunk of a Mamba layer at a time,
    }
    with Rig.open(model, **options) as rig:
        yield rig


@pytest.mark.engine
def test_a_model_with_recurrent_layers_is_served_as_text(rig: Rig) -> None:
    assert len(rig.scheduler.kv_cache_config.kv_cache_groups) > 1
    assert "recurrent layers" in rig.unsupported
    assert rig.worker.arenas == [], "no memory is set aside for blobs that never come"
    served_as_text(rig)


@pytest.mark.engine
def test_what_is_forgotten_leaves_the_cache_of_every_group(rig: Rig) -> None:
    before = rig.cached_blocks()
    prompt = Prompt("alice", (Segment(rig.words(200, 1), None, "a-tag"), Segment(rig.words(9, 2)))).salted(
        "s"
    )
    first = rig.inject(prompt)
    pool = rig.scheduler.kv_cache_manager.block_pool
    groups = {
        int.from_bytes(block.block_hash[-4:], "big") for block in pool.blocks if block.block_hash is not None
    }
    assert len(groups) > 1
    assert rig.inject(prompt).known > 0
    rig.forget("alice", tags=["a-tag"])
    assert rig.cached_blocks() <= before
    again = rig.inject(prompt)
    assert (again.known, again.tokens) == (0, first.tokens)


def test_a_hash_is_cached_where_any_group_has_it() -> None:
    class Pool:
        """Hash `both` is in two groups, `one` in the second alone."""

        def __init__(self):
            self.held = {("both", 0): "a", ("both", 1): "b", ("one", 1): "c"}

        def get_cached_block(self, block_hash, groups):
            block = self.held.get((block_hash, groups[0]))
            return [block] if block else None

        def evict_blocks(self, block_ids):
            self.held = {key: block for key, block in self.held.items() if block not in block_ids}

    cache = CacheOfGroups(Pool(), 2)
    assert cache.get_cached_block("both", [0]) == ["a", "b"]
    assert cache.get_cached_block("one", [0]) == ["c"]
    assert cache.get_cached_block("none", [0]) is None
    cache.evict_blocks({"b"})
    assert cache.get_cached_block("both", [0]) == ["a"]
