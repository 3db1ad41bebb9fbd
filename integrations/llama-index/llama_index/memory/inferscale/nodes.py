"""Memories as LlamaIndex's sources: what an answer knew, with scores, and whether it was injected.

A node must never call a memory injected before the engine has said so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.schema import NodeWithScore, TextNode

from llama_index.llms.inferscale.recollection import Recollection

_CARRIED = ("user_id", "agent_id", "run_id", "created_at", "updated_at")


def memory_nodes(found: Recollection | None) -> list[NodeWithScore]:
    """One node a memory, best first, under the memory's own id. `metadata["injected"]` is False until `settle`."""
    return [] if found is None else [_node(result) for result in found.results]


def settle(nodes: Sequence[NodeWithScore], raw: Any) -> None:
    """Write into nodes of memories what became of them, from the `raw` of an `InferScaleLLM`'s response.
    `metadata["in_prompt"]` is False for those that did not fit."""
    if not isinstance(raw, Mapping) or "memories" not in raw:
        return
    injected = {memory["id"]: memory["injected"] for memory in raw["memories"]}
    dropped = {memory["id"] for memory in raw["dropped"]}
    for node in nodes:
        node.node.metadata["injected"] = injected.get(node.node.node_id, False)
        node.node.metadata["in_prompt"] = node.node.node_id not in dropped


def _node(result: Mapping[str, Any]) -> NodeWithScore:
    metadata = {"source": "memory", "injected": False, "in_prompt": True}
    metadata.update({name: result[name] for name in _CARRIED if result.get(name) is not None})
    text = str(result.get("memory") or "")
    node = TextNode(id_=str(result["id"]), text=text, metadata=metadata)
    node.excluded_llm_metadata_keys = list(metadata)
    node.excluded_embed_metadata_keys = list(metadata)
    return NodeWithScore(node=node, score=float(result.get("score") or 0.0))
