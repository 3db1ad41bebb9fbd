"""`inferscale bench`: the benchmarks of a checkout. They are programs for those who work on the library, so the
distribution does not carry them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import inferscale_memory
from inferscale_memory.errors import ConfigurationError


def main(argv: Sequence[str] = ()) -> int:
    """Runs `inferscale bench ARGV`.

    Raises:
        ConfigurationError: the library was not installed from a checkout, or no benchmark has that name.
    """
    checkout = Path(inferscale_memory.__file__).resolve().parents[1]
    if not (checkout / "benchmarks" / "command.py").is_file():
        raise ConfigurationError(
            "the benchmarks are not part of the installed package: clone the repository, and run "
            "`pip install --editable .` there, or `make bench`"
        )
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    status: int = import_module("benchmarks.command").main(argv)
    return status
