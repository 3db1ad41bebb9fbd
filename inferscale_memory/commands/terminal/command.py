"""The program behind `inferscale chat`: opens a memory, and lets somebody talk to it.

Lines come from the keyboard or from a pipe; answers go to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inferscale_memory.engine.environment import installed_engine
from inferscale_memory.errors import ConfigurationError, InferScaleError


def main(argv: Sequence[str] = ()) -> int:
    """Talk until the input ends. Exit status 0."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("MEM0_TELEMETRY", "False")
    logging.getLogger("mem0").setLevel(logging.ERROR)  # it advertises optional packages

    from mem0.exceptions import MemoryError as Mem0Error
    from rich.console import Console

    from inferscale_memory.commands.terminal.talk import Talk
    from inferscale_memory.memory import Memory

    console = Console(highlight=False)
    with Memory.from_config(_config(options)) as memory:
        try:
            talk = Talk(
                memory, console, user=options.user, extract=options.extract, max_tokens=options.max_tokens
            )
            talk.greet()
        except InferScaleError:
            raise
        except (ValueError, Mem0Error) as error:  # mem0's own, about the name of the user
            raise ConfigurationError(f"--user {options.user!r} cannot be used: {error}") from error
        memory.engine.start()  # it takes a while: not with the first question
        for line in _lines():
            if not talk.hear(line):
                break
    return 0


def _config(options: argparse.Namespace) -> dict[str, Any]:
    provider = options.engine or ("remote" if options.base_url else installed_engine())
    engine = {"provider": provider, "model": options.model}
    if provider == "vllm":
        engine |= {"max_model_len": options.max_model_len, "enforce_eager": True}
    if provider == "remote":
        engine |= {name: getattr(options, name) for name in ("base_url", "tokenizer", "api_key")}
    config: dict[str, Any] = {
        "engine": {name: value for name, value in engine.items() if value is not None},
        "injection": {"top_k": options.top_k, "system": options.system},
        "folder": options.folder,
    }
    config["injection"] = {name: value for name, value in config["injection"].items() if value is not None}
    return {name: value for name, value in config.items() if value}


def _lines() -> Iterator[str]:
    """What is typed, until the input ends or is interrupted."""
    asked = "> " if sys.stdin.isatty() else ""
    if asked:
        import readline  # noqa: F401  # arrow keys and history
    while True:
        try:
            yield input(asked)
        except (EOFError, KeyboardInterrupt):
            return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("inferscale chat", description="Talk to a model that remembers you.")
    parser.add_argument("--user", default="me", help="whose memory (default: me)")
    parser.add_argument(
        "--model", help="folder of a model (default: the demo model), or the server's name for one"
    )
    parser.add_argument(
        "--engine", metavar="PROVIDER", help="vllm, transformers or remote (default: what is installed)"
    )
    parser.add_argument("--base-url", help="of the server, for the remote engine")
    parser.add_argument("--tokenizer", help="folder of its model's tokenizer, unless the model's is here too")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("INFERSCALE_API_KEY"),
        help="what the server was started with (default: INFERSCALE_API_KEY)",
    )
    parser.add_argument(
        "--folder", type=Path, help="where memories lie (default: INFERSCALE_HOME or ~/.inferscale)"
    )
    parser.add_argument("--top-k", "-k", type=int, help="how many memories a question recalls")
    parser.add_argument("--system", help="system text")
    parser.add_argument("--max-tokens", type=int, default=200, help="most tokens of an answer (default: 200)")
    parser.add_argument("--max-model-len", type=int, default=4096, help="vLLM's context (default: 4096)")
    parser.add_argument(
        "--extract",
        action="store_true",
        help="let the model draw facts out of what you say; otherwise your words are kept as they are, questions not",
    )
    return parser
