"""What of vLLM's configuration concerns the connector, settled before vLLM acts on it.

vLLM asks a connector nothing until the model is loaded and the memory is given away, and not at all where another
option has put a second connector in its place. So our plug-in, which vLLM loads in each of its processes, has every
configuration that names our connector pass by here, whichever way it was written: command line, file or Python.
"""

from __future__ import annotations

import logging
from typing import Any

from inferscale_memory.connector.redaction import redact
from inferscale_memory.errors import ConfigurationError

logger = logging.getLogger(__name__)

NAME = "InferScaleConnector"
MODULE = "inferscale_memory.connector.connector"
DEVICE_BYTES = "device_bytes"
HOST_BYTES = "host_bytes"
DEFAULT_BYTES = {DEVICE_BYTES: 1 << 30, HOST_BYTES: 1 << 30}
LOWERED = "gpu_memory_utilization_lowered_by"
"""Where it is kept in the connector's own options how much was taken: configurations are copied, and pass again."""

_ONE_ENGINE = (
    "what is to be forgotten would reach one of several engines alone. Start one server for each replica "
    "(docs/serving.md)"
)
_ANOTHER = (
    f"vLLM would put another connector in the place of {NAME}. Leave it out: {HOST_BYTES} is what blobs may take of "
    "host memory"
)
REFUSED = {
    "kv_transfer_config": f"it names {NAME} itself. Leave it out, or use `vllm serve` (docs/serving.md)",
    "kv_offloading_size": _ANOTHER,
    "kv_offloading_backend": _ANOTHER,
    "prefill_context_parallel_size": "no rank would have a whole prompt's keys. Use --tensor-parallel-size",
    **dict.fromkeys(
        [
            "data_parallel_size",
            "data_parallel_size_local",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            "data_parallel_multi_port_external_lb",
            "headless",
        ],
        _ONE_ENGINE,
    ),
}
"""vLLM's options under which the connector would be replaced, see only a part, or promise what it cannot keep."""


def refused_option(name: str, value: object) -> str | None:
    """Why an option of vLLM (in Python's spelling) is not taken with this value, if it is not. The value of a flag on a
    command line is None."""
    one = name in ("data_parallel_size", "data_parallel_size_local", "prefill_context_parallel_size")
    if one and str(value) == "1":
        return None
    return REFUSED.get(name)


def watch() -> None:
    """Have every `VllmConfig` pass by `settle` from now on. May be called again."""
    from vllm.config import VllmConfig

    before = getattr(VllmConfig, "_post_init_kv_transfer_config", None)
    if before is None:  # of another release: then only what the connector itself checks is checked
        logger.warning("inferscale: this vLLM release is not known; memory for blobs is not set aside")
        return
    if getattr(before, "settles", False):
        return

    def settled(self: Any) -> None:
        settle(self)
        before(self)

    settled.settles = True  # type: ignore[attr-defined]
    VllmConfig._post_init_kv_transfer_config = settled


def settle(config: Any) -> None:
    """Refuse what would be a lie, and set what has to be decided before the model is loaded.

    Raises:
        ConfigurationError: the connector would be replaced, could not keep what it promises, or has no room.
    """
    transfer = config.kv_transfer_config
    if transfer is None or not _names_ours(transfer):
        return
    redact()  # in the processes of the API server, which make no connector
    problem = refusal(config)
    if problem is not None:
        raise ConfigurationError(problem)
    model, scheduler = config.model_config, config.scheduler_config
    if model is not None and scheduler.disable_hybrid_kv_cache_manager is None and not model.is_hybrid:
        # Layers with a window and layers without share one group then, and can be injected. Recurrent layers cannot,
        # and vLLM does not start with them in one group.
        scheduler.disable_hybrid_kv_cache_manager = True
    _make_room(config)


def refusal(config: Any) -> str | None:
    """Why vLLM must not start with this configuration and our connector, if it must not."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer.kv_connector != NAME:
        return (
            f"{transfer.kv_connector} hides from {NAME} what becomes of its blobs: name {NAME} as the kv_connector "
            "itself, and no other beside it"
        )
    if getattr(config.cache_config, "kv_offloading_size", None) is not None:
        return f"--kv-offloading-size: {_ANOTHER}"
    if parallel.data_parallel_size > 1:
        return f"--data-parallel-size {parallel.data_parallel_size}: {_ONE_ENGINE}"
    return None


def budgets(transfer: Any) -> dict[str, int]:
    """Bytes of each tier on every rank, by option."""
    extra = transfer.kv_connector_extra_config or {}
    return {name: max(0, int(extra.get(name, default))) for name, default in DEFAULT_BYTES.items()}


def lowered(utilization: float, device_bytes: int, total_bytes: int) -> float:
    """vLLM's share of a device's memory that leaves `device_bytes` of what it was for blobs.

    Raises:
        ConfigurationError: nothing would be left for vLLM.
    """
    left = utilization - device_bytes / total_bytes
    if left <= 0:
        raise ConfigurationError(
            f"{DEVICE_BYTES}={device_bytes} is more than vLLM may use of this device ({utilization:.0%} of "
            f"{total_bytes} bytes): lower {DEVICE_BYTES}"
        )
    return left


def _names_ours(transfer: Any) -> bool:
    connectors = (transfer.kv_connector_extra_config or {}).get("connectors") or ()
    children = [each.get("kv_connector") for each in connectors if isinstance(each, dict)]
    return NAME in (transfer.kv_connector, *children)


def _make_room(config: Any) -> None:
    """Take what the device tier needs out of vLLM's share: vLLM gives all of its share to its KV cache, and our arena
    is allocated after that."""
    from vllm.platforms import current_platform

    extra = config.kv_transfer_config.kv_connector_extra_config
    if current_platform.is_cpu() or LOWERED in extra:  # on a CPU the KV cache has a size of its own
        return
    total, cache = current_platform.get_device_total_memory(), config.cache_config
    size = budgets(config.kv_transfer_config)[DEVICE_BYTES]
    share = lowered(cache.gpu_memory_utilization, size, total)
    extra[LOWERED] = cache.gpu_memory_utilization - share
    logger.warning(
        "inferscale: gpu_memory_utilization is lowered from %.3f to %.3f: %s=%d is set aside for blobs",
        cache.gpu_memory_utilization,
        share,
        DEVICE_BYTES,
        size,
    )
    cache.gpu_memory_utilization = share
