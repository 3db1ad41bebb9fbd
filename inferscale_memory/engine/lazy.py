"""The engine of a memory, started when it is first needed.

It must never start an engine just because a memory was made, or to forget what no engine can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from inferscale_memory.engine.base import Engine
from inferscale_memory.engine.environment import installed_engine
from inferscale_memory.engine.options import check_options
from inferscale_memory.errors import ClosedError, ConfigurationError
from inferscale_memory.lifetime import renew_after_fork
from inferscale_memory.model_files.size import parameters
from inferscale_memory.prompt import PromptTemplate

_IN_PROCESS = (None, "vllm", "transformers")
"""What holds blobs ends with its process."""


class LazyEngine:
    """Either an engine somebody made, which stays theirs, or how to make one.

    Attributes:
        eager: whether writing a fact is reason enough to start it. It is where the user chose an engine, and
            not where an app only uses mem0's own functions with an LLM of its own.
        chosen: whether the user said which engine.
    """

    def __init__(
        self,
        spec: Engine | Mapping[str, Any] | None,
        *,
        chosen: bool,
        eager: bool,
        heading: str,
        default_system: str,
    ) -> None:
        """Raises ConfigurationError on an engine that cannot be made of `spec`; see `check_options`."""
        self.eager = eager
        self.chosen = chosen
        self._words = {"heading": heading, "default_system": default_system}
        self._lock = Lock()
        self._engine: Engine | None = None
        self._template: PromptTemplate | None = None
        self._options: dict[str, Any] = {}
        self._ours = spec is None or isinstance(spec, Mapping)
        self._closed = False
        renew_after_fork(self)
        if spec is None or isinstance(spec, Mapping):
            self._options = dict(spec or {})
            check_options(self._options)
            if self._options.get("provider") == "remote":
                # Its blobs outlive this process: to forget must reach them before anything was recalled. Making it
                # sends nothing.
                self._engine = _make(self._options)
        elif callable(getattr(spec, "generate", None)) and callable(getattr(spec, "encode", None)):
            self._engine = spec
        else:
            raise ConfigurationError(
                f"engine is a {type(spec).__name__}: pass an Engine, or a dict such as "
                "{'provider': 'vllm', 'model': folder}"
            )

    @property
    def started(self) -> Engine | None:
        """The engine, if there is one already that can be asked here: not that of the process this one was forked
        from."""
        return None if getattr(self._engine, "forked", False) else self._engine

    @property
    def outlives_us(self) -> bool:
        """Whether what it holds stays when this process ends: it is served by another one."""
        return self._engine is None and self._options.get("provider") not in _IN_PROCESS

    @property
    def model_name(self) -> str:
        """The name of the model's folder; known before the engine is started, except for that of a server whose
        model was not named."""
        named = self._options.get("model") or self._options.get("tokenizer")
        if named is None and self._engine is not None:
            named = getattr(self._engine.tokenizer, "name_or_path", None) or self._engine.fingerprint
        if named is None:
            from inferscale_memory.fetch import DEMO_MODEL

            return DEMO_MODEL.name
        return Path(str(named)).name

    @property
    def parameters(self) -> int | None:
        """How many parameters its model has; None where that cannot be told. Starts nothing."""
        if self._ours and self._engine is None:
            named = self._options.get("model")
            if named is None:
                from inferscale_memory.fetch import DEMO_PARAMETERS

                return DEMO_PARAMETERS
            if Path(str(named)).expanduser().is_dir():
                return parameters(Path(str(named)).expanduser())
        folder = getattr(self.get(), "model_folder", None)
        return None if folder is None else parameters(folder)

    def get(self) -> Engine:
        """The engine; made now if there is none. Raises what making it raises, and ClosedError after `close` unless
        the engine is the caller's."""
        if self._closed and self._ours:
            raise ClosedError("the engine was closed with what it belongs to: open that again")
        with self._lock:
            if self._engine is None:
                self._engine = _make(self._options)
            return self._engine

    @property
    def template(self) -> PromptTemplate:
        """Its chat template, with the memory's own system text and heading."""
        engine = self.get()
        with self._lock:
            if self._template is None:
                self._template = PromptTemplate(engine.tokenizer, **self._words)
            return self._template

    def _renew(self) -> None:
        """In a forked child nobody holds the lock of the parent."""
        self._lock = Lock()

    @property
    def forked(self) -> bool:
        """Whether the engine runs in the process from which this one was forked."""
        return bool(getattr(self._engine, "forked", False))

    def close(self) -> None:
        """End the engine, if this object made it."""
        self._closed = True
        with self._lock:
            if self._ours and self._engine is not None:
                self._engine.close()


def _make(spec: Mapping[str, Any]) -> Engine:
    options = dict(spec)
    blobs = dict(options.pop("blobs", {}))
    provider = options.pop("provider", None)
    if provider == "remote":
        from inferscale_memory.engine.remote import RemoteEngine

        return RemoteEngine(**options)
    if provider is None:
        provider = installed_engine()
    model = options.pop("model", None)
    if model is None:
        from inferscale_memory.fetch import demo_model

        model = demo_model()
        if provider == "vllm":  # compiling takes longer than anybody waits for a first answer of this one
            options.setdefault("enforce_eager", True)
    engine: Engine
    if provider == "vllm":
        from inferscale_memory.engine.vllm import VLLMEngine

        engine = VLLMEngine(model, **{**blobs, **options})
    else:
        from inferscale_memory.engine.transformers import TransformersEngine

        if "device_bytes" in blobs:  # it has one tier
            options = {"blob_bytes": blobs["device_bytes"], **options}
        engine = TransformersEngine(model, **options)
    return engine
