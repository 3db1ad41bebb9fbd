"""What both faces are: how they are made, the stores mem0 sees, the engine, a conversation, the end.

A face adds the methods, whose bodies are in `operations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from errno import ENOSPC, EROFS
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar, Generic, Self, TypeVar

from mem0.configs.base import MemoryConfig
from mem0.memory.main import Memory as Mem0sMemory
from mem0.memory.storage import SQLiteManager
from mem0.utils.factory import VectorStoreFactory
from mem0.vector_stores.base import VectorStoreBase

from inferscale_memory.arguments import refusal
from inferscale_memory.engine.base import Engine
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.extraction.engine_llm import EngineLLM
from inferscale_memory.extraction.recording_llm import heard
from inferscale_memory.facts.filters import conjunction
from inferscale_memory.facts.scope import Scope
from inferscale_memory.forget.history import HistoryFile
from inferscale_memory.journal import FailedAdd
from inferscale_memory.lifetime import leave_behind, renew_after_fork
from inferscale_memory.memory import operations
from inferscale_memory.memory.argument_checks import at_face
from inferscale_memory.memory.config import Settings
from inferscale_memory.memory.core import Core
from inferscale_memory.memory.instance import INHERITED, Inherited, core_of, never_had_core, open_here
from inferscale_memory.memory.operations import Filters, Kind
from inferscale_memory.recall.injection import Injection
from inferscale_memory.recall.prepare import checked_scope
from inferscale_memory.sharing import Shared

Session = TypeVar("Session")


class Face(Shared, Generic[Session]):
    """A mem0 memory with an engine behind it. Stands before mem0's class in a face's bases."""

    _remedy = "pass its configuration, and open a memory from it in the process that is to use it"

    _kind: ClassVar[Kind]
    _session: ClassVar[Any]

    # Instances that mem0's own code or tests make without __init__ have neither, and behave as mem0's.
    _settings: Settings | None = None
    _core: Core | None = None

    config: MemoryConfig  # mem0's own
    embedding_model: Any  # mem0's own

    def __init__(
        self,
        config: MemoryConfig | Mapping[str, Any] | None = None,
        *,
        engine: Engine | Mapping[str, Any] | None = None,
        injection: Injection | Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """Open a memory.

        Args:
            config: mem0's configuration; as a dictionary it may leave out anything, and hold the three below.
            engine: `{"provider": "vllm" | "transformers" | "remote", "model": folder, ...}`, or an `Engine`, which
                stays the caller's. By default vLLM where it is installed, with the demo model.
            injection: how memories are encoded and placed; see `Injection`.
            folder: where everything is written; by default `INFERSCALE_HOME`, or ~/.inferscale.

        Raises:
            ConfigurationError: an engine, option or folder that cannot work.
            pydantic.ValidationError: as mem0 does, about its own part of the configuration.
        """
        self._settings = settings = Settings.read(config, engine, injection, folder)
        try:
            self._kind.mem0.__init__(self, settings.mem0)
            if not settings.engine.chosen and not isinstance(self.__dict__.get("llm"), EngineLLM):
                settings.engine.eager = False  # nobody asked for an engine, and mem0 does not work with it
            operations.recover(self)
            renew_after_fork(self)
        except BaseException as error:
            core, self._core = core_of(self), None
            if core is not None:
                core.close()
            operations.close_stores(self)
            if isinstance(error, PermissionError) or getattr(error, "errno", None) in (EROFS, ENOSPC):
                raise ConfigurationError(
                    f"the memory in {settings.folder} cannot be opened ({error}): make the folder writable, pass "
                    "another one, or set INFERSCALE_HOME"
                ) from error
            if isinstance(error, RuntimeError) and "already accessed" in str(error):  # says Qdrant
                raise ConfigurationError(
                    f"the memory in {settings.folder} is open already: close it, pass another folder, or use "
                    "a vector store that is a server"
                ) from error
            raise

    @classmethod
    def from_config(cls, config_dict: Mapping[str, Any]) -> Self:
        """A memory from mem0's configuration dictionary, with `engine`, `injection` and `folder` added at
        will; an empty one makes a local memory."""
        if config_dict is None:  # an empty YAML file, say
            raise refusal("config_dict", config_dict, "a dictionary; an empty one makes a local memory")
        return cls(config_dict)

    # -- the stores, as mem0 is to see them ------------------------------------------------------------------

    # They lie where mem0 would put them, so that an instance that has none raises AttributeError like mem0's.

    @property
    def vector_store(self) -> Any:
        return _attribute(self, "vector_store")

    @vector_store.setter
    def vector_store(self, store: Any) -> None:
        if never_had_core(self) and self._settings is not None and issubclass(type(store), VectorStoreBase):
            self.__dict__["vector_store"] = store  # to be closed if what comes now fails
            self._core = Core(self._settings, self)
        core = core_of(self)
        self.__dict__["vector_store"] = store if core is None else core.mirror_facts(store)
        if core is not None:
            core.check_embedder(store)

    @property
    def _entity_store(self) -> Any:
        return _attribute(self, "_entity_store")

    @_entity_store.setter
    def _entity_store(self, store: Any) -> None:
        core = core_of(self)
        self.__dict__["_entity_store"] = store if core is None else core.guard_entities(store)

    @property
    def entity_store(self) -> Any:
        # mem0's own tests call this with stand-ins for an instance.
        kind = self._kind.mem0 if issubclass(type(self), Face) else Mem0sMemory
        opening = kind.entity_store.fget
        core = core_of(self)
        if core is None:
            return opening(self)
        with core.opening_entities:
            return opening(self)

    @property
    def db(self) -> Any:
        return _attribute(self, "db")

    @db.setter
    def db(self, manager: Any) -> None:
        core = core_of(self)
        if core is not None:
            core.fill_history(manager)
            HistoryFile.guard(manager)
        self.__dict__["db"] = manager

    @property
    def llm(self) -> Any:
        return heard(self, _attribute(self, "llm"))

    @llm.setter
    def llm(self, llm: Any) -> None:
        self.__dict__["llm"] = llm

    def _process_metadata_filters(self, metadata_filters: Any) -> Any:
        # mem0's own tests call this with stand-ins for an instance.
        kind = self._kind.mem0 if issubclass(type(self), Face) else Mem0sMemory
        read = partial(kind._process_metadata_filters, self)
        return read(metadata_filters) if core_of(self) is None else conjunction(metadata_filters, read)

    # -- what needs no waiting -------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, made if it was not. It loads its model at the first use, or with `start()`, which blocks until it
        serves."""
        return operations.behind(self).engine.get()

    @at_face
    def session(
        self,
        *,
        user_id: str | None = None,
        agent_id: str | None = None,
        run_id: str | None = None,
        top_k: int | None = None,
        k: int | None = None,
        filters: Filters | None = None,
        system: str | None = None,
        sticky: bool = False,
    ) -> Session:
        """A conversation in which each turn prefills as little as it can. It goes on from the prompt so far, with what
        is newly recalled as text, or is composed anew, with what is recalled now injected before the conversation.

        Args:
            user_id, agent_id, run_id: whose memories; at least one.
            top_k, filters: as in `chat`, for every turn. `k` is short for `top_k`.
            system: the app's own system text.
            sticky: always go on while that is possible: then every memory that was recalled stays in the prompt.

        Raises:
            ConfigurationError: no id, or an argument that cannot be taken.
        """
        ids = {"user_id": user_id, "agent_id": agent_id, "run_id": run_id}
        checked_scope(ids)
        self._check_open()
        search = partial(operations.search, self._kind, self, ids=ids)
        session: Session = self._session(
            self, self._kind.wait, search, Scope.of(ids), k=top_k, filters=filters, system=system, sticky=sticky
        )
        return session

    def failed_adds(self) -> list[FailedAdd]:
        """The calls to `add` whose facts could not be extracted, oldest first: what `retry_failed` makes again.
        The messages stay in the turn log until they are forgotten."""
        return operations.behind(self).journal.failed_adds.all()

    def close(self) -> None:
        """Stop encoding, end the engine if this memory made it, and give back every file. Closing twice is harmless.
        Every other call raises ClosedError from then on, and so do those that are under way. It waits for one encode at
        most; what is not encoded yet is encoded when it is next recalled."""
        operations.close(self._kind, self)

    # -- being open ------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        core_of(self)

    def _renew(self) -> None:
        """In a forked child: what the parent has open stays its own, and the first use opens it again."""
        if vars(self).get("_core") is not None:
            leave_behind(*(vars(self).get(name) for name in _OPENED))
            vars(self)[INHERITED] = Inherited()

    def _open_again(self, inherited: Inherited) -> None:
        """Open in this process what the parent had opened: the stores, the history, and all that stands on them."""
        with inherited.lock:
            if vars(self).get(INHERITED) is not inherited:
                return
            inherited.opened_by = get_ident()
            try:
                for name in _OPENED:
                    vars(self).pop(name, None)
                store = self.config.vector_store
                self.vector_store = VectorStoreFactory.create(store.provider, store.config)
                self.db = SQLiteManager(self.config.history_db_path)
                self._entity_store = None
                operations.recover(self)
                del vars(self)[INHERITED]
            finally:
                inherited.opened_by = None


_OPENED = ("_core", "vector_store", "_entity_store", "db")
"""What is open, of the attributes of a memory."""


def _attribute(memory: Any, name: str) -> Any:
    open_here(memory)
    try:
        return vars(memory)[name]
    except KeyError:
        raise AttributeError(f"{type(memory).__name__!r} object has no attribute {name!r}") from None
