"""LangChain and LangGraph on InferScale Memory: what is remembered is injected into the model's KV cache.

Everything public has its name here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_inferscale.chat_models import ChatInferScale
    from langchain_inferscale.middleware import InferScaleMemoryMiddleware
    from langchain_inferscale.retrievers import InferScaleRetriever
    from langchain_inferscale.stores import InferScaleStore

__all__ = ["ChatInferScale", "InferScaleMemoryMiddleware", "InferScaleRetriever", "InferScaleStore"]
_PLACES = {
    "ChatInferScale": "chat_models",
    "InferScaleMemoryMiddleware": "middleware",
    "InferScaleRetriever": "retrievers",
    "InferScaleStore": "stores",
}


def __getattr__(name: str) -> Any:
    """Names on first use: not everybody who wants the chat model wants LangChain's agents imported."""
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
