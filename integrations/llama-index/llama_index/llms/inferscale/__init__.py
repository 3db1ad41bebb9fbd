"""An LLM for LlamaIndex that answers with what it remembers: see `InferScaleLLM`."""

from llama_index.llms.inferscale.base import InferScaleLLM

__all__ = ["InferScaleLLM"]
