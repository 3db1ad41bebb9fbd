"""Copies share the memory or engine behind an object; what is written down within one process finds it again.

LlamaIndex writes its parts down between two runs of a workflow, as JSON, and reads them again in the same process. An
open memory or a running engine has no place in JSON. So a name stands for it there, which nobody can guess and which
means nothing in another process.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from inferscale_memory.errors import CopyError


class Named:
    """What is open in this process, by name. A name keeps nothing open."""

    _open: ClassVar[WeakValueDictionary[str, Any]] = WeakValueDictionary()

    @classmethod
    def add(cls, thing: Any) -> str:
        """A new name for `thing`. It reads like the repr of an object, because LlamaIndex's caches leave those out of
        their keys: a cache on disk still hits after a restart."""
        name = f"<InferScale at 0x{secrets.token_hex(16)}>"
        cls._open[name] = thing
        return name

    @classmethod
    def find(cls, name: Any) -> Any | None:
        """What has this name; None if it was closed and let go, or is in another process."""
        return cls._open.get(name) if isinstance(name, str) else None


def unpicklable(name: str, remedy: str) -> CopyError:
    """The error that refuses to pickle an object over an open memory or engine."""
    return CopyError(f"{name} cannot be pickled with an open memory or engine behind it: {remedy}")


def is_plain(value: Any) -> bool:
    """Whether a configuration names everything, and holds nothing that is open."""
    if isinstance(value, Mapping):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(is_plain(item) for item in value)
    return value is None or isinstance(value, str | bytes | int | float | PurePath)
