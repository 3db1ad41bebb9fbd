"""The secret with which owners are signed and keys and salts are made.

It reaches the engine's own process through the environment, never through vLLM's configuration, which is logged.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex

VARIABLE = "INFERSCALE_SECRET"


def from_environment() -> bytes:
    """The secret of this process, 32 bytes; empty when none is set."""
    return _digest(os.environ.get(VARIABLE, ""))


def known(home: Path) -> bytes:
    """The secret of this process; when none is set, the one kept under `home`, which is not made. Empty when there is
    neither. For a client: a secret made up here would be no server's."""
    text = os.environ.get(VARIABLE, "")
    path = home / "secret"
    if not text and path.is_file():
        text = path.read_text(encoding="utf-8").strip()
    return _digest(text)


def ensure(home: Path) -> bytes:
    """The secret of this process; when none is set, the one kept under `home`, made on first use (mode 0600)."""
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = _kept(home / "secret")
    return from_environment()


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=32).digest() if text else b""


def _kept(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(token_hex(32))
    except FileExistsError:
        pass
    return path.read_text(encoding="utf-8").strip()
