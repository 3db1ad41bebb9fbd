"""Days of traffic, in seconds: the scheduler side remembers no more after it than it did after the first hour."""

from __future__ import annotations

import gc
import random
import resource
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferscale_memory.connector import protocol
from inferscale_memory.connector.metadata import Report
from inferscale_memory.connector.protocol import Encode, Forget, Inject, Outcome, Probe
from inferscale_memory.connector.scheduler.receipts import MOST
from inferscale_memory.connector.scheduler.side import SchedulerSide
from inferscale_memory.kv.store import BlobStore
from inferscale_memory.kv.tier import RowAllocator
from inferscale_memory.prompt.segments import PUBLIC_OWNER
from tests.kv.store_view import sizes

OPERATIONS = 50_000
BLOCK, CACHED = 16, 500
SECRET = b"a secret of the test"


class Cache:
    """A prefix cache of `CACHED` blocks, the one used longest ago evicted first."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, Any] = OrderedDict()

    def fill(self, hashes: list[int]) -> None:
        for block_hash in hashes:
            self.blocks[block_hash] = SimpleNamespace(block_id=block_hash)
            self.blocks.move_to_end(block_hash)
        while len(self.blocks) > CACHED:
            self.blocks.popitem(last=False)

    def get_cached_block(self, block_hash: int, kv_cache_group_ids: list[int]) -> list[Any] | None:
        block = self.blocks.get(block_hash)
        return None if block is None else [block]

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self.blocks.pop(block_id, None)


class Traffic:
    """Ever new owners, facts, questions, receipts, nonces and tags; some requests are aborted or fail."""

    def __init__(self, seed: int) -> None:
        store = BlobStore(
            [RowAllocator("device", 2000), RowAllocator("host", 4000)], public_owner=PUBLIC_OWNER
        )
        self.side = SchedulerSide(
            secret=SECRET, fingerprint="m", block_size=BLOCK, store=store, unsupported=None, ahead=True
        )
        self.cache = Cache()
        self.side.bind_cache(self.cache)
        self.draw = random.Random(seed)
        self.serial = 0
        self.known: list[tuple[str, str, tuple[int, ...], str]] = []  # owner, key, ids, tag

    def operate(self) -> None:
        self.serial += 1
        kinds = [self.encode, self.inject, self.text, self.forget, self.probe, self.outcome, self.nonsense]
        self.draw.choices(kinds, weights=[5, 8, 4, 1, 1, 1, 1])[0]()
        if self.serial % 9_999 == 0:
            self.side.reset()
            self.known.clear()

    def request(self, ask: protocol.Ask | None, ids: tuple[int, ...], salt: str, raw: Any = None) -> Any:
        hashes = [hash((salt, ids[: stop * BLOCK])) for stop in range(1, len(ids) // BLOCK + 1)]
        request = SimpleNamespace(
            request_id=f"r{self.serial}",
            prompt_token_ids=list(ids),
            num_prompt_tokens=len(ids),
            prompt_embeds=None,
            mm_features=[],
            lora_request=None,
            cache_salt=salt,
            kv_transfer_params=raw if ask is None else protocol.params(ask, SECRET),
            sampling_params=None,
            block_hashes=hashes,
            num_computed_tokens=0,
            skip_reading_prefix_cache=False,
        )
        self.side.arrived(request)
        return request

    def serve(self, request: Any, blocks: list[int], *, fails: bool = False, aborted: bool = False) -> Any:
        """One request alone, from its match to its end."""
        name = request.request_id
        external, _ = self.side.match(request, 0)
        self.side.allocated(request, blocks, external or 0)
        request.num_computed_tokens = external or 0
        orders = self.side.build({name: len(request.prompt_token_ids) - (external or 0)}, lambda _: blocks)
        if not aborted:
            report = Report()
            for load in orders.loads:
                if fails:
                    report.failed_loads.add(load.request)
                else:
                    report.loaded[load.request] = 0.001
            report.captured = {capture.piece for capture in orders.captures}
            self.side.observe(report)
            self.side.loads_failed(report.failed_loads, lambda _: blocks)
            self.cache.fill(request.block_hashes)
        reply = self.side.finished(request)
        if aborted:  # what was ordered is reported all the same
            self.side.observe(Report(loaded={load.request: 0.001 for load in orders.loads}))
        return None if reply is None else reply[protocol.NAME]

    def words(self, count: int) -> tuple[int, ...]:
        return tuple(self.draw.randrange(500) for _ in range(count))

    def encode(self) -> None:
        owner, ids, tag = f"o{self.serial // 200}", self.words(40), f"t{self.serial}"
        ask = Encode(owner, ((10, 40),), ((tag, 10),))
        salt = protocol.encode_salt(SECRET, "m", owner)
        reply = self.serve(self.request(ask, ids, salt), [1, 2, 3], aborted=self.draw.random() < 0.05)
        for key, _ in reply["blobs"]:
            self.known = [*self.known[-99:], (owner, key, ids[10:], tag)]

    def inject(self) -> None:
        if not self.known:
            return
        owner = self.draw.choice(self.known)[0]
        own = [fact for fact in self.known if fact[0] == owner][: self.draw.randrange(1, 6)]
        ids = tuple(token for _, _, part, _ in own for token in part) + self.words(20)
        segments = tuple((key, 30) for _, key, _, _ in own)
        mentions = tuple((tag, 30 * n) for n, (_, _, _, tag) in enumerate(own))
        ask = Inject(owner, segments, f"n{self.serial}", mentions, f"r{self.serial}")
        salt = protocol.compose_salt(SECRET, "m", owner, segments, nonce=ask.nonce)
        blocks = list(range(1, len(ids) // BLOCK + 2))
        fails, aborted = self.draw.random() < 0.05, self.draw.random() < 0.05
        self.serve(self.request(ask, ids, salt), blocks, fails=fails, aborted=aborted)

    def text(self) -> None:
        """The same prompt for ever, with ever new names in it; or ever new prompts."""
        ids = tuple(range(64)) if self.draw.random() < 0.5 else self.words(64)
        ask = Inject("o", (), "text", tuple((f"t{self.serial}/{n}", 16 * n) for n in range(4)))
        salt = protocol.compose_salt(SECRET, "m", "o", (), nonce="text")
        self.serve(self.request(ask, ids, salt), [1, 2, 3, 4, 5])

    def forget(self) -> None:
        owner, key, _, tag = self.draw.choice(self.known) if self.known else ("o", "k", (), "t")
        self.serve(self.request(Forget(owner, (key, "unknown"), (tag, f"t{self.serial}")), (7,), ""), [1])

    def probe(self) -> None:
        keys = tuple(f"{self.draw.random()}" for _ in range(5))
        self.serve(self.request(Probe(f"o{self.serial}", keys), (7,), ""), [1])

    def outcome(self) -> None:
        self.serve(self.request(Outcome("o", f"r{self.serial}"), (7,), ""), [1])

    def nonsense(self) -> None:
        raw = {protocol.NAME: {"op": "inject", "owner": f"m{self.serial}", "keys": ["k"] * 50}}
        self.serve(self.request(None, (7,), f"salt{self.serial}", raw), [1])

    def sizes(self) -> dict[str, int]:
        """How much of everything is remembered."""
        side, index = self.side, self.side.forgetter.index
        assert index is not None
        return {
            "requests": len(side.requests)
            + len(side.forgetter.running)
            + len(side.forgetter.running._holders),
            "loads": len(side.injector.loading) + len(side.injector.planned) + len(side.encoder.recomputed),
            "receipts": len(side.receipts),
            "hashes": len(index),
            "names": index.names + len(index._first),
            **sizes(side.store),
        }


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


def test_after_fifty_thousand_operations_no_more_is_remembered_than_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    traffic = Traffic(seed=5)
    limits = {
        "requests": 0,
        "loads": 0,
        "receipts": MOST,
        "blobs": 6000 // 30,
        "owners": 2 * (5 * 6000 // 30 + 64),
        "moves": 0,
        "hashes": 4096 + 2 * CACHED,
        "names": 2 * (4096 + (4096 + 2 * CACHED) * BLOCK // 4),
    }
    steps, sizes = [], {}
    for _ in range(10):
        for _ in range(OPERATIONS // 10):
            traffic.operate()
        sizes = traffic.sizes()
        for what, most in limits.items():
            assert sizes[what] <= most, (what, sizes)
        steps.append(resident())
    with capsys.disabled():
        print(
            f"\n{OPERATIONS} operations: {sizes}; MB from tenth to tenth: {[step // 10**6 for step in steps]}"
        )
    assert steps[-1] - steps[2] < 5e6, "it goes on growing"
