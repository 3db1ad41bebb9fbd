"""What lies in files, found by another program than the one under test."""

from __future__ import annotations

from pathlib import Path
from subprocess import run


def files_with(folder: Path, text: str) -> list[str]:
    """Names of the files under `folder` that hold `text`, in any case. In a process of its own: opening a
    database's file here would give up SQLite's locks on it."""
    done = run(["grep", "-rlaiF", "--", text, str(folder)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return sorted(Path(line).name for line in done.stdout.splitlines())
