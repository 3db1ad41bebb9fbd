"""Memories for LlamaIndex that are injected, not read again: see `InferScaleMemory` and `InferScaleChatEngine`."""

from llama_index.memory.inferscale.base import InferScaleMemory
from llama_index.memory.inferscale.chat_engine import InferScaleChatEngine
from llama_index.memory.inferscale.context import InferScaleContext

__all__ = ["InferScaleChatEngine", "InferScaleContext", "InferScaleMemory"]
