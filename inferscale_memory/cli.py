"""The command `inferscale`.

What a subcommand prints on stdout is its result and nothing else; progress and errors go to stderr. A known
error is one plain line and exit status 2, an interruption is status 130; neither ever shows a traceback.
Subcommands are imported when they are called, so that `inferscale fetch` does not wait for torch.
"""

from __future__ import annotations

import argparse
import codecs
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper

from inferscale_memory.errors import InferScaleError

_PROGRAMS = {
    "demo": ("inferscale_memory.commands.demo.run", "answer questions from memory, injected and as text"),
    "chat": ("inferscale_memory.commands.terminal.command", "talk to a model that remembers you"),
    "verify": ("inferscale_memory.commands.verify", "prove on a model that injection is exact"),
    "serve": (
        "inferscale_memory.commands.serve.command",
        "start a vLLM server with injected memory, for apps without weights",
    ),
    "bench": ("inferscale_memory.commands.bench", "measure time, throughput and accuracy"),
    "migrate": ("inferscale_memory.commands.migrate.command", "copy the facts of a mem0 memory into another"),
    "doctor": ("inferscale_memory.commands.doctor", "find what is wrong with an installation, and how to mend it"),
}
"""Subcommands that read their own arguments: name -> (module with `main(argv)`, help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `inferscale ARGV` and returns its exit status."""
    _degrade()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in _PROGRAMS:
            return import_module(_PROGRAMS[arguments[0]][0]).main(arguments[1:]) or 0
        return _fetch(_parser().parse_args(arguments))
    except InferScaleError as error:
        print(f"inferscale: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("inferscale: interrupted", file=sys.stderr)
        return 130


def _degrade() -> None:
    """What a terminal cannot show is escaped, and what is no text on the input is replaced: neither ends the program.
    A locale without an encoding of its own says nothing about what is typed: that is UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        plain = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if plain else None, errors="replace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("inferscale", description="A memory whose facts are never read twice.")
    own_version = f"inferscale-memory {version('inferscale-memory')}"
    parser.add_argument("--version", action="version", version=own_version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="print the folder of the demo model, fetching it when missing")
    fetch.add_argument("--embedder", action="store_true", help="the embedder instead of the demo model")
    for name, (_, text) in _PROGRAMS.items():
        commands.add_parser(name, help=text)
    return parser


def _fetch(options: argparse.Namespace) -> int:
    from inferscale_memory import fetch

    print(fetch.embedder() if options.embedder else fetch.demo_model())
    return 0


if __name__ == "__main__":
    sys.exit(main())
