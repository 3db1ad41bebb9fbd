"""vLLM's own scheduler with the connector's scheduler side, and a worker that computes no tensors.

Instead of keys and values, a slot contains a *mark*: a number computed from the token and everything that it attended
to. A slot that was not written, was written too late, or was written for another position changes every token that is
sampled later. So the bookkeeping of a whole engine (chunks, preemption, prefix cache, both model runners, async
scheduling, failures) is tested in milliseconds per request.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["INFERSCALE_SECRET"] = "the secret of the tests"

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from inferscale_memory.connector import protocol, secret
from inferscale_memory.connector.connector import StepReport
from inferscale_memory.connector.metadata import Load, Orders, Report
from inferscale_memory.connector.protocol import Ask, Encode, Inject, Probe
from inferscale_memory.connector.scheduler.side import SchedulerSide
from inferscale_memory.kv.store import BlobStore
from tests.kv.store_view import entries

Ids = tuple[int, ...]
MASK = (1 << 61) - 1
ROW_BYTES = 2 * 1 * 1 * 32 * 4
"""Of the one-layer model below: keys and values, one layer, one head, 32 floats."""
EMPTY = 0xDEAD


def mark_of(token: int, attended: int) -> int:
    """The mark of a token that attended to `attended`: it replaces its keys and values."""
    return hash((token, attended)) & MASK


def seen_at(mark: int, position: int) -> int:
    """A mark as attention sees it: rotated to a position."""
    return hash((mark, position)) & MASK


def sampled(mark: int) -> int:
    """The token that follows one with this mark."""
    return 8 + mark % 499


def prefill(ids: Sequence[int], injected: Sequence[int] = (), window: int | None = None) -> list[int]:
    """The marks of a prompt whose leading tokens have the marks `injected`."""
    marks = list(injected)
    views = [seen_at(mark, position) for position, mark in enumerate(marks)]
    for position in range(len(marks), len(ids)):
        first = 0 if window is None else max(0, position - window + 1)
        marks.append(mark_of(ids[position], sum(views[first:position]) & MASK))
        views.append(seen_at(marks[-1], position))
    return marks


def answer(ids: Sequence[int], tokens: int, injected: Sequence[int] = (), window: int | None = None) -> Ids:
    """What a correct engine generates."""
    ids, marks = list(ids), list(injected)
    for _ in range(tokens):
        marks = prefill(ids, marks, window)
        ids.append(sampled(marks[-1]))
    return tuple(ids[len(ids) - tokens :])


@dataclass
class Rank:
    """One worker: arenas, paged cache, and the state that vLLM's model runners keep of each request."""

    rows: Sequence[int]
    block_size: int
    window: int | None
    runner: str
    prompts: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    arenas: list[dict[int, int]] = field(default_factory=list)
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    checked: bool = False
    fails: Callable[[str], bool] = lambda name: False
    loses: Callable[[str], bool] = lambda name: False

    def __post_init__(self) -> None:
        self.arenas = [{} for _ in self.rows]

    def execute(self, output: Any, scrubbed: set[int]) -> tuple[dict[str, int], Report, set[int]]:
        """Run one step: (sampled token per request, report, blocks whose load failed)."""
        report, bad = Report(), set()
        orders: Orders = output.kv_connector_metadata.orders
        for block in scrubbed:
            for slot in range(block * self.block_size, (block + 1) * self.block_size):
                self.slots.pop(slot, None)
        self._move(orders)
        waited = [load for load in orders.loads if load.ahead]
        assert not (waited and output.has_sync_kv_loads), "vLLM would load before the forward"
        bad |= self._load([load for load in orders.loads if not load.ahead], report)
        self._update(output)
        fresh, made = {}, {}
        for name, count in output.num_scheduled_tokens.items():
            made[name] = self._forward(name, count, fresh)
        for capture in orders.captures:
            name = capture.piece[0]
            assert len(capture.slots) == len(capture.rows) == capture.piece[2] - capture.piece[1]
            if not self.checked or self.loses(name):
                report.lost[name] = "it was lost on purpose"
                continue
            for slot, row in zip(capture.slots, capture.rows, strict=True):
                self.arenas[0][int(row)] = fresh[int(slot)]  # KeyError: not computed in this step
            report.captured.add(capture.piece)
        assert not {load.request for load in waited} & set(output.num_scheduled_tokens)
        self._load(waited, report)
        if output.num_scheduled_tokens and not self.checked:
            self.checked, report.status = True, ""
        return {name: token for name, token in made.items() if token is not None}, report, bad

    def _load(self, loads: Sequence[Load], report: Report) -> set[int]:
        """Carry out loads; the blocks of those that failed."""
        bad: set[int] = set()
        for load in loads:
            if load.broken or self.fails(load.request):
                report.failed_loads.add(load.request)
                bad |= set(load.blocks)
                continue
            assert len(set(load.slots.tolist())) == len(load.slots), "two tokens in one slot"
            for row, position, slot in zip(load.rows, load.positions, load.slots, strict=True):
                assert slot >= self.block_size, "the null block was written"
                self.slots[int(slot)] = (self.arenas[0][int(row)], int(position))
            report.loaded[load.request] = 0.001
        return bad

    def _move(self, orders: Orders) -> None:
        for move in orders.moves:
            held = [self.arenas[move.source][int(row)] for row in move.source_rows]
            self.arenas[move.target].update(zip(map(int, move.target_rows), held, strict=True))
        read = {int(row) for load in orders.loads for row in load.rows}
        for wipe in orders.wipes:
            assert wipe.tier or not read & set(wipe.rows.tolist()), "what is loaded in this step was wiped"
            for row in wipe.rows:
                self.arenas[wipe.tier].pop(int(row), None)

    def _update(self, output: Any) -> None:
        """As the model runners do. V1 is told of resumed requests among the cached ones, V2 among the new
        ones, and V2 counts computed tokens itself: it does not listen when the scheduler takes some back."""
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                self.blocks[name] = list(blocks[0])
            elif blocks is not None:
                self.blocks[name] += blocks[0]
            if self.runner == "v1":
                self.tokens[name] = list(cached.all_token_ids.get(name, self.tokens[name]))
                del self.tokens[name][self.prompts[name] + cached.num_output_tokens[index] :]
                self.computed[name] = cached.num_computed_tokens[index]

    def _forward(self, name: str, count: int, fresh: dict[int, int]) -> int | None:
        tokens, table, start = self.tokens[name], self.blocks[name], self.computed[name]
        assert start + count <= len(tokens), "a token was scheduled that nobody has sampled"
        self.computed[name] = start + count
        first = 0 if self.window is None else max(0, start - self.window + 1)
        views = [self._view(table, position) for position in range(first, start)]
        attended = sum(views) & MASK
        for position in range(start, start + count):
            mark, slot = mark_of(tokens[position], attended), self._slot(table, position)
            self.slots[slot], fresh[slot] = (mark, position), mark
            views.append(seen_at(mark, position))
            if self.window is not None and len(views) == self.window:
                attended -= views.pop(0)
            attended = (attended + views[-1]) & MASK
        if start + count < len(tokens):
            return None
        tokens.append(sampled(mark))
        return tokens[-1]

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _view(self, table: Sequence[int], position: int) -> int:
        return seen_at(*self.slots.get(self._slot(table, position), (EMPTY, EMPTY)))


class Simulation:
    """One engine. Every option has the value of a small one.

    With `asynchronous` scheduling one step is in flight while the next is scheduled, with `stages` of a pipeline one
    for each stage but the last.
    """

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int = 16,
        blocks: int = 128,
        batch: int = 64,
        device: int = 512,
        host: int = 0,
        ranks: int = 1,
        runner: str = "v1",
        window: int | None = None,
        asynchronous: bool = False,
        stages: int = 1,
        caching: bool = True,
        start: bool = True,
    ) -> None:
        model = ModelConfig(
            model=str(_model(folder)), dtype="float32", skip_tokenizer_init=True, max_model_len=2048
        )
        config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=batch,
                max_model_len=2048,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=asynchronous,
            ),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=caching),
            kv_transfer_config=KVTransferConfig(
                kv_connector="InferScaleConnector",
                kv_connector_module_path="inferscale_memory.connector.connector",
                kv_role="kv_both",
                kv_connector_extra_config={
                    "device_bytes": device * ROW_BYTES,
                    "host_bytes": host * ROW_BYTES,
                },
            ),
        )
        config.scheduler_config.async_scheduling = asynchronous  # vLLM turns it off on the CPU
        config.cache_config.num_gpu_blocks = blocks
        shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
        spec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
        init_none_hash(sha256)
        self.block_hasher = get_request_block_hasher(block_size, sha256) if caching else None
        # vLLM refuses the newer runner where there is no Triton; its scheduler needs none.
        self._ahead = 1 if asynchronous else stages - 1
        with (
            patch.object(VllmConfig, "use_v2_model_runner", runner == "v2"),
            patch.object(VllmConfig, "max_concurrent_batches", self._ahead + 1),
        ):
            self.scheduler: Any = (AsyncScheduler if asynchronous else Scheduler)(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
                structured_output_manager=StructuredOutputManager(config),
                block_size=block_size,
                hash_block_size=block_size,
                log_stats=False,
            )
        assert self.scheduler.use_v2_model_runner == (runner == "v2")
        rows = [device, host] if host else [device]
        self.ranks = [Rank(rows, block_size, window, runner) for _ in range(ranks)]
        self.window = window
        self.secret = secret.from_environment()
        self.fingerprint = self.side.admission.fingerprint
        self.requests: dict[str, Request] = {}
        self.replies: dict[str, dict[str, Any]] = {}
        self.generated: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self._flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._scrubbed: set[int] = set()
        self._serial = 0
        self._watch_allocations()
        if start:
            self.ask(Probe("anyone"), (7, 8, 9))

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def side(self) -> SchedulerSide:
        return self.scheduler.connector._scheduler

    @property
    def last(self) -> Request:
        """The request that was added last."""
        return self.requests[f"r{self._serial}"]

    @property
    def store(self) -> BlobStore:
        return self.side.store

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def _watch_allocations(self) -> None:
        """A block handed out holds nothing: whatever is right in it must be written first."""
        take = self.pool.get_new_blocks

        def watched(count: int) -> Any:
            blocks = take(count)
            self._scrubbed |= {block.block_id for block in blocks}
            return blocks

        self.pool.get_new_blocks = watched

    def hittable(self, ids: Sequence[int], salt: str) -> int:
        """Tokens of this prompt that another request would find in the prefix cache."""
        request = self._request(f"look{self._serial}", ids, salt, None, 1)
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    # -- asking ----------------------------------------------------------------------------------------------

    def salt(self, ask: Ask) -> str:
        """The salt under which `ask` is served."""
        match ask:
            case Encode():
                return protocol.encode_salt(
                    self.secret, self.fingerprint, ask.owner, ask.segments, nonce=ask.nonce
                )
            case Inject():
                return protocol.compose_salt(
                    self.secret, self.fingerprint, ask.owner, ask.segments, nonce=ask.nonce
                )
            case _:
                self._serial += 1
                return f"control{self._serial}"

    def add(
        self,
        ids: Sequence[int],
        ask: Ask | None = None,
        *,
        tokens: int = 4,
        salt: str | None = None,
        raw: Any = None,
    ) -> str:
        """Hand a request to the scheduler; its name."""
        self._serial += 1
        name = f"r{self._serial}"
        if salt is None:
            salt = self.salt(ask) if ask is not None else f"text{self._serial}"
        params = raw if ask is None else protocol.params(ask, self.secret)
        request = self._request(name, ids, salt, params, tokens)
        self.requests[name], self.generated[name] = request, []
        for rank in self.ranks:
            rank.prompts[name] = len(ids)
        self.scheduler.add_request(request)
        return name

    def _request(self, name: str, ids: Sequence[int], salt: str, params: Any, tokens: int) -> Request:
        sampling = SamplingParams(
            max_tokens=tokens,
            min_tokens=tokens,
            ignore_eos=True,
        )
        sampling.update_from_generation_config({}, eos_token_id=3)
        request = Request(
            name, list(ids), sampling, None, cache_salt=salt, arrival_time=0.0, block_hasher=self.block_hasher
        )
        request.kv_transfer_params = params
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.finished.add(name)

    def ask(
        self, ask: Ask, ids: Sequence[int] = (7,), *, tokens: int = 1, salt: str | None = None
    ) -> dict[str, Any]:
        """Serve one request alone; its reply."""
        name = self.add(ids, ask, tokens=tokens, salt=salt)
        self.drain()
        return self.replies[name]

    def encode(
        self,
        owner: str,
        ids: Sequence[int],
        *spans: tuple[int, int],
        mentions: Sequence[tuple[str, int]] = (),
        base: Sequence[tuple[str, int]] = (),
    ) -> list[str]:
        """Encode; the keys."""
        reply = self.ask(Encode(owner, spans, tuple(mentions), tuple(base)), ids, tokens=2)
        assert reply["error"] is None, reply["error"]
        return [key for key, _ in reply["blobs"]]

    def at_hand(self, owner: str, *keys: str) -> set[str]:
        return set(self.ask(Probe(owner, keys))["at_hand"])

    # -- running ---------------------------------------------------------------------------------------------

    def schedule(self) -> Any:
        """One step of the scheduler, executed by the workers; its output is taken in later, by `take`."""
        output = self.scheduler.schedule()
        scrubbed, self._scrubbed = self._scrubbed, set()
        results = [rank.execute(output, scrubbed) for rank in self.ranks]
        made = results[0][0]
        failed = any(report.failed_loads for _, report, _ in results)
        assert failed or all(other == made for other, _, _ in results[1:]), "the ranks disagree"
        reports = [StepReport(report) for _, report, _ in results if report]
        merged = reports[0] if reports else None
        for report in reports[1:]:
            merged = merged.aggregate(report)
        names = list(output.num_scheduled_tokens)
        # The executor waits until all ranks have; here they do it in the same step.
        arrived = {load.request for load in output.kv_connector_metadata.orders.loads if load.ahead}
        failures = set().union(*(report.failed_loads for _, report, _ in results))
        self._flight.append(
            (
                output,
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=[[made[name]] if name in made else [] for name in names],
                    kv_connector_output=KVConnectorOutput(
                        invalid_block_ids=set().union(*(bad for _, _, bad in results)),
                        kv_connector_worker_meta=merged,
                        finished_recving=arrived or None,
                        failed_recving=failures & arrived,
                    ),
                ),
            )
        )
        return output

    def take(self) -> None:
        """Take in the output of the oldest step in flight."""
        for outputs in self.scheduler.update_from_output(*self._flight.popleft()).values():
            for output in outputs.outputs:
                self.generated[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.finished.add(output.request_id)
                    reply = output.kv_transfer_params or {}
                    self.replies[output.request_id] = reply.get(protocol.NAME, {})

    def step(self) -> Any:
        """Schedule and execute a step, and take in what is due: this step, or the one before it."""
        output = self.schedule()
        self.take_due()
        return output

    def take_due(self) -> None:
        """Take in the output of all steps but those that may be in flight."""
        while len(self._flight) > self._ahead:
            self.take()

    def take_all(self) -> None:
        """Take in the output of all steps."""
        while self._flight:
            self.take()

    def drain(self, limit: int = 2000) -> None:
        """Run until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                self.take_all()
                return
            self.step()
        raise AssertionError("requests do not come to an end")

    def free(self) -> list[int]:
        """Free rows of each tier."""
        return [tier.free for tier in self.store.tiers]

    def stray(self) -> list[tuple[int, int, int]]:
        """(rank, tier, row) of marks in free rows, after rows that were given back have been wiped."""
        self.step()
        self.take_all()
        held: list[set[int]] = [set() for _ in self.store.tiers]
        for entry in entries(self.store):
            for tier, rows in entry.rows.items():
                held[tier].update(rows.tolist())
        return [
            (number, tier, row)
            for number, rank in enumerate(self.ranks)
            for tier, arena in enumerate(rank.arenas)
            for row in arena.keys() - held[tier]
        ]

    def marks(self, key: str) -> list[int]:
        """The marks of a stored blob, on its fastest tier."""
        entry = self.store.get(key)
        assert entry is not None, "no such blob"
        tier = min(entry.rows)
        return [self.ranks[0].arenas[tier][int(row)] for row in entry.rows[tier]]


def _model(folder: Path) -> Path:
    """A model's configuration. There are no weights: nothing is loaded."""
    from transformers import LlamaConfig

    if not (folder / "config.json").exists():
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=512,
            hidden_size=32,
            intermediate_size=32,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
            num_hidden_layers=1,
            max_position_embeddings=4096,
            dtype="float32",
        ).save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"")
    return folder
