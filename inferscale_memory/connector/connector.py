"""vLLM's KV-connector interface: hands each call to the side it belongs to.

Whatever goes wrong ends in prefilled text, never in a lost engine or a wrong answer. Only where going on would be a
wrong answer may a callback raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from inferscale_memory.connector import configuration, secret
from inferscale_memory.connector.groups import CacheOfGroups
from inferscale_memory.connector.metadata import Orders, Report, Slots
from inferscale_memory.connector.positions import repeated_slots, without_position
from inferscale_memory.connector.redaction import redact
from inferscale_memory.connector.scheduler.side import SchedulerSide
from inferscale_memory.connector.worker import WorkerSide
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.kv.arena import Shape
from inferscale_memory.kv.store import BlobStore
from inferscale_memory.kv.tier import RowAllocator
from inferscale_memory.model_files.fingerprint import model_fingerprint
from inferscale_memory.model_files.folder import cached_folder
from inferscale_memory.prompt.segments import PUBLIC_OWNER

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not followed: it is optional
    """Scheduler to worker, once a step."""

    orders: Orders


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler, once a step; ranks are merged by vLLM."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport(self.report.merge(other.report))


class InferScaleConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Encodes facts once and injects them ever after.

    A model with several KV cache groups starts and is served as text; `configuration.settle` sees to it that only
    models with recurrent layers have several.

    Options in `kv_connector_extra_config`: `device_bytes` and `host_bytes`, budgets of the two tiers per rank
    (default 1 GiB each; a host budget of 0 means no host tier). The secret comes from INFERSCALE_SECRET.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        # A failed load must be recomputed, and the user need not know: vLLM reads this after the constructor.
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        redact()
        refusal = configuration.refusal(vllm_config)  # again: the plug-in may not have been loaded
        if refusal is not None:
            raise ConfigurationError(refusal)
        self._groups = len(kv_cache_config.kv_cache_groups)
        self._unsupported = _unsupported(vllm_config, kv_cache_config)
        rows = _tier_rows(vllm_config) if self._unsupported is None else [0]
        self._block_size = block_size = _block_size(vllm_config, kv_cache_config)
        self._checked = False  # whether the workers have made their start-up check
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            names = ("device", "host")
            self._scheduler = SchedulerSide(
                secret=secret.from_environment(),
                fingerprint=_fingerprint(vllm_config),
                block_size=block_size,
                store=BlobStore(
                    [RowAllocator(name, count) for name, count in zip(names, rows, strict=False)],
                    public_owner=PUBLIC_OWNER,
                ),
                unsupported=self._unsupported,
                ahead=_loads_ahead(vllm_config, kv_cache_config),
            )
        else:
            config = vllm_config.model_config.hf_text_config
            self._worker = WorkerSide(
                rows,
                vllm_config.model_config.dtype,
                block_size,
                _rotary_modules,
                partial(without_position, config),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A blob that is not delivered costs a prefill; nothing needs to wait for it."""
        return False

    # -- scheduler ----------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            several = self._groups > 1
            self._scheduler.bind_cache(
                CacheOfGroups(gpu_block_pool, self._groups) if several else gpu_block_pool
            )

    def on_new_request(self, request: Any) -> None:
        side = self._scheduler
        assert side is not None
        self._guarded(None, lambda: side.arrived(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        side = self._scheduler
        assert side is not None
        nothing: tuple[int | None, bool] = (0, False)
        return self._guarded(nothing, lambda: side.match(request, num_computed_tokens))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side = self._scheduler
        assert side is not None
        # Not guarded: tokens were claimed, and to go on without writing them would be a wrong answer.
        side.allocated(request, _first(blocks.get_block_ids()), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        side = self._scheduler
        assert side is not None
        state = scheduler_output.kv_connector_block_state
        orders = side.build(
            scheduler_output.num_scheduled_tokens, lambda name: _first(state.resolve_block_ids(name))
        )
        return StepMetadata(replace(orders, repeated=self._evidence(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        side = self._scheduler
        assert side is not None
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, StepReport) else None
        self._checked |= report is not None and report.status is not None
        if report is not None and (stale := side.fail_stale_loads(report)):
            connector_output.finished_recving = (connector_output.finished_recving or set()) - stale
        self._guarded(None, lambda: side.observe(report))
        if report is not None and report.failed_loads and self._kv_cache_manager is not None:
            manager = self._kv_cache_manager
            # Not guarded: wrong blocks would be left in the prefix cache.
            bad = side.loads_failed(report.failed_loads, lambda name: _first(manager.get_block_ids(name)))
            manager.evict_blocks(bad | set(connector_output.invalid_block_ids or ()))

    def reset_cache(self) -> bool:
        """Forget every blob; vLLM asks for it when it sleeps, pauses or takes in new weights."""
        side = self._scheduler
        assert side is not None
        side.reset()  # not guarded: blobs of the old weights would meet the new ones
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        side = self._scheduler
        assert side is not None
        return False, self._guarded(None, lambda: side.finished(request))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, _first(block_ids))

    # -- worker -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        side = self._worker
        assert side is not None
        if self._unsupported is not None:  # nothing will be ordered, so nothing is allocated
            side.refuse(self._unsupported)
            return
        contexts = self._vllm_config.compilation_config.static_forward_context
        side.register([contexts[name] for name in kv_caches if name in contexts])

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        from vllm.forward_context import get_forward_context, is_forward_context_available

        side = self._worker
        assert side is not None
        assert isinstance(connector_metadata, StepMetadata)
        # The newer model runner binds outside a context where a step has no forward or replays a whole graph.
        context = get_forward_context() if is_forward_context_available() else None
        side.begin(connector_metadata.orders, context)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the forward of those who need them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is read back from the paged cache: keys are caught before rotation."""

    def wait_for_save(self) -> None:
        side = self._worker
        assert side is not None
        side.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        arrived, failed = self._worker.take_arrived()
        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self._worker is not None
        report = self._worker.report()
        return StepReport(report) if report is not None else None

    # -- inside -------------------------------------------------------------------------------------------------

    def _evidence(self, scheduler_output: Any) -> Slots | None:
        """What the workers' start-up check needs, until they have made it."""
        if self._checked:
            return None
        new, scheduled = scheduler_output.scheduled_new_reqs, scheduler_output.num_scheduled_tokens
        return self._guarded(None, lambda: repeated_slots(new, scheduled, self._block_size))

    def _guarded(self, fallback: T, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception:
            logger.exception("inferscale: a callback failed; its request is served as text")
            return fallback


def _tier_rows(vllm_config: Any) -> list[int]:
    """Rows of the device and host tier on every rank. Both sides must come to the same numbers."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = -(-model.get_total_num_hidden_layers() // parallel.pipeline_parallel_size)
    shape = Shape(layers, model.get_num_kv_heads(parallel), model.get_head_size(), model.dtype)
    budgets = configuration.budgets(vllm_config.kv_transfer_config)
    rows = [budget // shape.row_bytes for budget in budgets.values()]
    return rows if rows[1] else rows[:1]


def _fingerprint(vllm_config: Any) -> str:
    """The same for the same files and dtype in every process; a model that is neither a folder nor in the hub's cache
    is named by its config."""
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    extra = [str(model.quantization or ""), str(model.revision or "")]
    folder = cached_folder(model.model, revision=model.revision)
    if folder is not None:
        return model_fingerprint(folder, dtype=dtype, extra=[e for e in extra if e])
    from hashlib import blake2b

    text = "\0".join([str(model.model), model.hf_config.to_json_string(), dtype, *extra])
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of a block; where there are several groups, those of the pieces in which prompts are hashed."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])
    return int(groups[0].kv_cache_spec.block_size if groups else vllm_config.cache_config.block_size)


def _first(groups: Sequence[list[int]]) -> list[int]:
    """The block ids of the first group. A model without attention has no group at all."""
    return groups[0] if groups else []


def _loads_ahead(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether a request has to wait a step for its load. It needs not where vLLM, told of a load that failed in the
    very step that reads it, takes everything back that was computed from it: that takes one step at a time."""
    windows = [
        getattr(group.kv_cache_spec, "sliding_window", None) for group in kv_cache_config.kv_cache_groups
    ]
    return bool(
        vllm_config.max_concurrent_batches > 1  # async scheduling, or the stages of a pipeline
        or vllm_config.use_v2_model_runner
        or any(window is not None for window in windows)
    )


def _unsupported(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """What can be refused before anything runs."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    groups = len(kv_cache_config.kv_cache_groups)
    if model.is_hybrid or model.is_attention_free:
        return "it has recurrent layers, whose state is not kept token by token"
    if groups != 1:
        remedy = "; start vLLM with --disable-hybrid-kv-cache-manager" if groups else ""
        return f"its KV cache has {groups} groups, one is supported{remedy}"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is on"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name.removesuffix('_size').replace('parallel', 'parallelism').replace('_', ' ')} is on"
    if model.use_mla:
        return "it has MLA attention"
    return None


def _rotary_modules() -> Sequence[Any]:
    """vLLM's shared rotary modules."""
    from vllm.model_executor.layers import rotary_embedding

    return list(rotary_embedding._ROPE_DICT.values())
