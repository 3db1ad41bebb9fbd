"""Registers the connector with vLLM, so that `--kv-transfer-config` may name it: entry point vllm.general_plugins."""

from __future__ import annotations

from inferscale_memory.connector import configuration


def register() -> None:
    """Called by vLLM in every one of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if configuration.NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(configuration.NAME, configuration.MODULE, configuration.NAME)
    configuration.watch()
