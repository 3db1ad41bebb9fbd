"""What a memory is made from: mem0's own configuration, completed with local defaults, and three words of
ours.

A dictionary written for mem0 works as it is. It must never make up a service: what is not configured is
local.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

from mem0.configs.base import MemoryConfig
from mem0.configs.embeddings.base import BaseEmbedderConfig
from mem0.configs.llms.base import BaseLlmConfig
from mem0.embeddings.configs import EmbedderConfig
from mem0.llms.configs import LlmConfig
from mem0.utils.factory import EmbedderFactory, LlmFactory, VectorStoreFactory
from mem0.vector_stores.configs import VectorStoreConfig
from pydantic import BaseModel

from inferscale_memory.arguments import as_count, as_mapping, check_keys, refusal
from inferscale_memory.engine.lazy import LazyEngine
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.extraction.engine_llm import OWN_OPTIONS, PROVIDER, register
from inferscale_memory.mem0_adapter.environment import home
from inferscale_memory.mem0_adapter.legacy_options import current_options
from inferscale_memory.mem0_adapter.vector_store_config import StoreConfig
from inferscale_memory.memory.store_files import StoreFiles, name_of
from inferscale_memory.recall.injection import Injection

log = logging.getLogger(__name__)

EMBEDDING_DIMENSIONS = 384
_IN_PROCESS_STORES = ("qdrant", "faiss", "chroma")
_FACTS = "facts.sqlite"
_PLACES = ("host", "url", "client", "path")
_BLOBS = ("device_bytes", "host_bytes")
_OURS = ("engine", "injection", "folder", "blobs")
_PARTS = ("vector_store", "llm", "embedder")


@dataclass(frozen=True, slots=True)
class Settings:
    """A memory's configuration, read.

    Attributes:
        own_history: whether mem0's history is to lie where the store's other files do: nobody has said where.
    """

    mem0: MemoryConfig
    engine: LazyEngine
    injection: Injection
    folder: Path
    own_history: bool

    @classmethod
    def read(
        cls,
        config: MemoryConfig | Mapping[str, Any] | None,
        engine: Any = None,
        injection: Injection | Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> Settings:
        """Settings from mem0's configuration (object or dictionary) and ours, as arguments or in the
        dictionary.

        Raises ConfigurationError, and pydantic's ValidationError for mem0's part.
        """
        mine = config is None or isinstance(config, Mapping)
        if not mine and not hasattr(config, "vector_store"):
            raise refusal("the configuration", config, "mem0's dictionary or its MemoryConfig")
        options = _known(current_options(as_mapping(config, "the configuration"))) if config and mine else {}
        engine = options.pop("engine", None) if engine is None else engine
        chosen = engine is not None
        engine = _with_blobs(engine, options.pop("blobs", None))
        how = Injection.read(options.pop("injection", None) if injection is None else injection)
        folder = options.pop("folder", None) if folder is None else folder
        if not isinstance(folder, str | Path | None):
            raise refusal("folder", folder, "the path of a folder")
        where = Path(folder or home()).expanduser().absolute()
        own_llm = not mine or _provider(options.get("llm")) not in (None, PROVIDER)
        lazy = LazyEngine(
            engine, chosen=chosen, eager=chosen or not own_llm, heading=how.heading, default_system=how.system
        )
        own_history = mine and "history_db_path" not in options
        # What is no dictionary is mem0's own object, or stands for one in a test: it is taken as it is.
        mem0 = _mem0_config(options, lazy, where) if mine else cast(MemoryConfig, config)
        if (
            own_history
        ):  # the store may be the second of its folder; if it is new, that is settled when it opens
            history = StoreFiles.of(where, name_of(mem0.vector_store, where)).history
            mem0.history_db_path = str(history) if history.exists() else mem0.history_db_path
        return cls(mem0, lazy, how, where, own_history)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """`options`, none of which is misspelt: mem0 and pydantic pass over what they do not know."""
    check_keys(options, (*MemoryConfig.model_fields, *_OURS), "the configuration")
    for name, part in options.items():
        if name not in _PARTS or part is None or isinstance(part, BaseModel):
            continue
        if not isinstance(part, Mapping):
            raise refusal(name, part, 'a dictionary such as {"provider": ..., "config": {...}}')
        check_keys(as_mapping(part, name), ("provider", "config"), name)
        config = part.get("config")
        if isinstance(config, Mapping) and (known := _options_of(name, part.get("provider"))):
            check_keys(as_mapping(config, f"{name}.config"), known, f"{name}.config")
    return options


def _options_of(part: str, provider: Any) -> Collection[str]:
    """What the `config` of a part may have; nothing where only its provider knows."""
    if part == "embedder":
        return _parameters(BaseEmbedderConfig)
    if part == "llm":
        if provider in (None, PROVIDER):
            return [*_parameters(BaseLlmConfig), *OWN_OPTIONS]
        if isinstance(provider, str) and provider in LlmFactory.provider_to_class:
            return _parameters(LlmFactory.provider_to_class[provider][1])
    return ()


def _parameters(config: Any) -> Collection[str]:
    """The keywords that a class of mem0's is made with; nothing where it takes any."""
    taken = signature(config).parameters
    return () if any(one.kind is one.VAR_KEYWORD for one in taken.values()) else list(taken)


def _with_blobs(engine: Any, blobs: Any) -> Any:
    """`engine` with the budgets that `blobs` names: bytes for blobs on the device and in host memory."""
    if blobs is None:
        return engine
    check_keys(as_mapping(blobs, "blobs"), _BLOBS, "blobs")
    blobs = {name: as_count(size, f"blobs[{name!r}]") for name, size in blobs.items()}
    if engine is not None and not isinstance(engine, Mapping):
        raise ConfigurationError("blobs belong to the engine: it is made already, give them to it")
    return {**(engine or {}), "blobs": dict(blobs)}


def _mem0_config(options: dict[str, Any], engine: LazyEngine, folder: Path) -> MemoryConfig:
    """mem0's configuration of `options`, with local defaults for whatever they leave out."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be made ({error}): pass another folder, or set INFERSCALE_HOME"
        ) from error
    embedder = options.get("embedder")
    if _provider(embedder) in (None, PROVIDER):
        options["embedder"] = _local_embedder(embedder)
    store = _local_store(options.pop("vector_store", None), _dimensions(options["embedder"]), folder)
    own_store = isinstance(store, VectorStoreConfig) and store.provider == PROVIDER
    if not own_store:
        options["vector_store"] = store
    options.setdefault("history_db_path", str(folder / "history.db"))
    llm = options.pop("llm", None)
    own_llm = _provider(llm) in (None, PROVIDER)
    config = MemoryConfig(**options if own_llm else {**options, "llm": llm})
    if own_store:
        config.vector_store = store  # not validated: mem0 knows a fixed list of providers
    if not own_llm:
        return config
    register()
    own = llm.get("config") if isinstance(llm, Mapping) else None
    config.llm = LlmConfig.model_construct(provider=PROVIDER, config={**(own or {}), "engine": engine})
    return config


def _local_embedder(own: Any) -> EmbedderConfig:
    EmbedderFactory.provider_to_class[PROVIDER] = "inferscale_memory.mem0_adapter.embedder.LocalEmbedder"
    options = dict(own.get("config") or {}) if isinstance(own, Mapping) else {}
    if "model" not in options:  # fetched by the embedder itself, when it is made
        options["embedding_dims"] = EMBEDDING_DIMENSIONS
    # mem0 validates providers against a fixed list; model_construct leaves that out.
    return EmbedderConfig.model_construct(provider=PROVIDER, config=options)


def _local_store(store: Any, dimensions: int | None, folder: Path) -> Any:
    """`store`, or ours; one that lies in a file gets its place under `folder` unless it has one."""
    if store is None:
        store = {"provider": _default_store(folder)}
    if not isinstance(store, Mapping) or not isinstance(store.get("config") or {}, Mapping):
        return store
    provider, config = store.get("provider", "qdrant"), dict(store.get("config") or {})
    if provider in _IN_PROCESS_STORES and not any(config.get(name) for name in _PLACES):
        config["path"] = str(folder / provider)
    if provider in ("qdrant", "faiss", PROVIDER) and dimensions is not None:
        config.setdefault("embedding_model_dims", dimensions)
    if provider != PROVIDER:
        return {**store, "provider": provider, "config": config}
    VectorStoreFactory.provider_to_class[PROVIDER] = "inferscale_memory.mem0_adapter.vector_store.Store"
    config.setdefault("path", str(folder / _FACTS))
    return VectorStoreConfig.model_construct(provider=PROVIDER, config=StoreConfig(**config))


def _default_store(folder: Path) -> str:
    """Ours, except where a folder holds facts in the embedded Qdrant that used to be the default."""
    if (folder / "qdrant").is_dir() and not (folder / _FACTS).exists():
        log.info("the facts in %s stay in its embedded Qdrant: no %s is there", folder, _FACTS)
        return "qdrant"
    return PROVIDER


def _provider(part: Any) -> str | None:
    found = part.get("provider") if isinstance(part, Mapping) else getattr(part, "provider", None)
    return None if found is None else str(found)


def _dimensions(embedder: Any) -> int | None:
    config = embedder.get("config") if isinstance(embedder, Mapping) else getattr(embedder, "config", None)
    found = (config or {}).get("embedding_dims")
    return None if found is None else int(found)
