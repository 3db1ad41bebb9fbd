"""The secret with which owners are signed and keys and salts are made.

It reaches the engine's own process through the environment, never through vLLM's configuration, which is logged.
"""

from __future__ import annotations

import hmac
import os
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex

from inferscale_memory.errors import ConfigurationError, first_line

VARIABLE = "INFERSCALE_SECRET"


def from_environment() -> bytes:
    """The secret of this process, 32 bytes; empty when none is set."""
    return _digest(os.environ.get(VARIABLE, ""))


def known(home: Path) -> bytes:
    """The secret of this process; when none is set, the one kept under `home`, which is not made. Empty when there is
    neither. For a client: a secret made up here would be no server's."""
    text = os.environ.get(VARIABLE, "")
    return _digest(text or kept(home))


def ensure(home: Path) -> bytes:
    """The secret of this process; when none is set, the one kept under `home`, made on first use (mode 0600).

    Raises:
        ConfigurationError: the file can be neither read nor made, or is empty.
    """
    if not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = kept(home) or _made(home)
    return from_environment()


def is_kept(home: Path) -> bool:
    """Whether the secret of this process is the one under `home`, where clients of this user look for it."""
    return hmac.compare_digest(kept(home).encode(), os.environ.get(VARIABLE, "").encode())


def kept(home: Path) -> str:
    """The text of the secret under `home`; empty when there is no such file. Raises ConfigurationError when the file
    cannot be read or is empty: an empty secret protects nobody."""
    path = _path(home)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, first_line(error)) from error
    if not text:
        raise _unusable(path, "it is empty")
    return text


def _made(home: Path) -> str:
    """A new secret under `home`. The file is linked into place once it is whole, so no process reads half of it; where
    another process was quicker, its secret counts."""
    path = _path(home)
    draft = path.with_name(f"secret.{token_hex(8)}")
    try:
        home.mkdir(parents=True, exist_ok=True)
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            _place(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(path, first_line(error)) from error
    return kept(home)


def _place(draft: Path, path: Path) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        os.replace(draft, path)


def _path(home: Path) -> Path:
    return home / "secret"


def _unusable(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the secret {path} cannot be used ({why}): delete the file if it is damaged, set INFERSCALE_HOME to a folder "
        f"that can be written, or set {VARIABLE} to a long random text"
    )


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=32).digest() if text else b""
