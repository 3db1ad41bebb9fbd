"""`inferscale verify`: the arguments, the table and the JSON.

The exit status is 0 only when every check holds, 1 when one fails. What is printed on stdout is the table;
progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from inferscale_memory.commands.verify.evidence import BrokenEngineError, gather, longest
from inferscale_memory.commands.verify.judge import Check, judge
from inferscale_memory.commands.verify.material import Material
from inferscale_memory.engine.base import Engine
from inferscale_memory.engine.environment import installed_engine
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.model_files.fingerprint import model_fingerprint
from inferscale_memory.model_files.folder import model_folder

DTYPES = ("float32", "bfloat16", "float16")
LEAST_FACTS = 4
CONTEXT = 4096
"""Tokens that vLLM reserves its cache for, where the model has as many and the user says nothing else."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `inferscale verify ARGV` and returns its exit status.

    Raises:
        ConfigurationError: a folder, number or file that cannot work.
        EngineError: the engine or the reference cannot be loaded.
    """
    options = _parser().parse_args(argv)
    _check_options(options)
    checks = _verify(options)
    Console().print(_table(escape(f"{options.model.name} on {options.engine}"), checks))
    if options.json is not None:
        _write(options.json, checks)
    return 0 if all(check.passed for check in checks) else 1


def _verify(options: argparse.Namespace) -> list[Check]:
    from inferscale_memory.commands.verify.reference import (
        Reference,  # imports torch, which `--help` need not wait for
    )

    console = Console(stderr=True)

    def say(what: str) -> None:
        console.print(f"Verifying {options.model.name}: {what}", style="dim", markup=False, highlight=False)

    reference = Reference(options.model)
    with closing(_engine(options, reference.positions)) as engine:
        reason = engine.unsupported or reference.unsupported
        if reason is not None:
            return [Check("supported", "blobs can be used with this model", reason, None)]
        dtype = _dtype(options, engine)
        material = Material.write(engine.tokenizer, options.facts, options.seed)
        room = min(engine.max_model_len, options.max_model_len or engine.max_model_len)
        _check_length(longest(material), room)
        try:
            evidence = gather(engine, material, options.seed, say)
        except BrokenEngineError as error:
            return [Check("encode", "facts can be encoded", str(error), None)]
    # The engine is closed: a small machine has no room for it and the reference at once.
    say(f"the reference: loading in float32 what the engine held in {dtype}")
    reference.load(dtype)
    return judge(evidence, reference, dtype, say)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "inferscale verify",
        description="Prove on a model that injected facts give what the same facts give as text.",
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="PATH", help="folder of the model, or its id at the hub"
    )
    parser.add_argument(
        "--engine",
        choices=("vllm", "transformers"),
        default=installed_engine(),
        help="default: what is installed",
    )
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="float32 proves most")
    parser.add_argument("--facts", type=int, default=50, metavar="N", help="how many facts (default: 50)")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="longest prompt of the engine, in tokens"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other seeds, other facts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome there")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    options.model = model_folder(options.model)
    if options.facts < LEAST_FACTS:
        raise ConfigurationError(f"--facts {options.facts} is too few to change their order: pass at least 4")
    if options.max_model_len is not None and options.max_model_len < 1:
        raise ConfigurationError(f"--max-model-len {options.max_model_len} holds no prompt: pass more")
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise ConfigurationError(f"--json {options.json} is no file in a folder that exists: pass another")


def _engine(options: argparse.Namespace, positions: int | None) -> Any:
    if options.engine == "transformers":
        from inferscale_memory.engine.transformers import TransformersEngine

        return TransformersEngine(options.model, dtype=options.dtype)
    from inferscale_memory.engine.vllm import VLLMEngine

    most = options.max_model_len or min(CONTEXT, positions or CONTEXT)
    return VLLMEngine(options.model, dtype=options.dtype, enforce_eager=True, max_model_len=most)


def _dtype(options: argparse.Namespace, engine: Engine) -> str:
    """The dtype in which the engine computes: part of the fingerprint, which every engine makes alike."""
    if options.dtype != "auto":
        return str(options.dtype)
    for dtype in DTYPES:
        if model_fingerprint(options.model, dtype=dtype) == engine.fingerprint:
            return dtype
    raise ConfigurationError(f"the engine chose a dtype that is none of {', '.join(DTYPES)}: pass --dtype")


def _check_length(tokens: int, room: int) -> None:
    if tokens > room:
        raise ConfigurationError(
            f"the longest prompt takes {tokens} tokens with its answer, the engine takes {room}: "
            "pass fewer --facts, or a larger --max-model-len where the model allows it"
        )


def _table(title: str, checks: Sequence[Check]) -> Table:
    failed = sum(not check.passed for check in checks)
    caption = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks hold"
    table = Table(title=title, caption=caption, caption_style="bold red" if failed else "bold green")
    table.add_column("check")
    table.add_column("value", justify="right", overflow="fold")
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("passed", no_wrap=True)
    for check in checks:
        name = f"{check.name}\n[dim]{check.proves}[/dim]" if check.proves else check.name
        sign = "≥" if check.control else "≤"
        bound = "" if check.bound is None else f"{sign} {_number(check.bound)}"
        table.add_row(name, _number(check.value), bound, "[green]yes" if check.passed else "[bold red]NO")
    return table


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return escape(value)
    return str(value) if isinstance(value, int) else f"{value:.2g}"


def _write(path: Path, checks: Sequence[Check]) -> None:
    """Write the outcome whole or not at all. A difference that is no number is null."""
    rows = [{"name": c.name, "passed": c.passed, "value": _finite(c.value), "bound": c.bound} for c in checks]
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(
            json.dumps({"checks": rows}, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigurationError(f"--json {path} cannot be written ({error}): pass another file") from error


def _finite(value: float | str) -> float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
