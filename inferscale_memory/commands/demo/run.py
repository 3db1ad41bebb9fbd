"""The program behind `inferscale demo`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from inferscale_memory.commands.demo.conversations import load
from inferscale_memory.commands.demo.copying import PlainCopy, row_bytes
from inferscale_memory.commands.demo.remembering import alternating, remember
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.progress import bar


def main(argv: Sequence[str] = ()) -> int:
    """Remember a conversation, ask about it along four paths, show what each cost."""
    options = _options(argv)
    users = load(options.data)
    questions = alternating(users)[: options.questions]
    if not questions:
        raise ConfigurationError("the conversation has no questions with answers; pass another --data")
    os.environ.setdefault("MEM0_TELEMETRY", "False")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("mem0").setLevel(logging.ERROR)  # it advertises optional packages

    from rich.console import Console

    from inferscale_memory.commands.demo import screen
    from inferscale_memory.commands.demo.paths import Asker, Row
    from inferscale_memory.engine.vllm import VLLMEngine
    from inferscale_memory.fetch import demo_model
    from inferscale_memory.memory import Memory

    console = Console()
    model = options.model or demo_model()
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "enforce_eager": True,
    }
    if options.dtype == "auto":
        settings["dtype"] = _dtype()
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="inferscale-demo-") as folder,
        VLLMEngine(model, device_bytes=2 << 30, home=folder, **settings) as engine,
    ):
        memory = Memory(engine=engine, folder=folder)
        try:
            engine.start()
            if engine.unsupported:
                console.print(f"[yellow]Blobs cannot be used with this model: {engine.unsupported}")
            began = perf_counter()
            total = remember(memory, users)
            console.print(
                f"{total} memories of {len(users)} users written and encoded in {perf_counter() - began:.0f} s.\n"
            )
            asker = Asker(memory, max_tokens=options.max_tokens)
            ks = sorted(set(options.k))
            asker.warm_up(*questions[0], ks)
            with bar("Asking", len(questions) * len(ks) * 4) as advance:
                for turn, (user, question) in enumerate(questions):
                    for k in ks:
                        for row in asker.ask(user, question, k, turn=turn):
                            rows.append(row)
                            advance()
        finally:
            memory.close()
    copy, size = PlainCopy(), row_bytes(model, settings["dtype"])
    copy_s = {k: copy.seconds(size * _injected(rows, k)) for k in ks}
    screen.answers(console, rows)
    screen.times(console, rows, copy_s)
    if options.json:
        written = json.dumps({"rows": [_as_json(row) for row in rows]}, indent=1) + "\n"
        options.json.write_text(written, encoding="utf-8")
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="inferscale demo", description=main.__doc__)
    parser.add_argument(
        "--top-k", "--k", dest="k", type=int, nargs="+", default=[5, 20, 50], help="how many memories to recall"
    )
    parser.add_argument("--questions", type=int, default=9, help="how many questions to ask (default 9)")
    parser.add_argument(
        "--data", type=Path, help="a conversation file: ours (the default) or one of LoCoMo's"
    )
    parser.add_argument("--model", type=Path, help="a model folder (default: SmolLM2-135M-Instruct, fetched)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--max-model-len", type=int, default=4096, help="context length (default 4096)")
    parser.add_argument("--max-tokens", type=int, default=12, help="most tokens of an answer (default 12)")
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    options = parser.parse_args(argv)
    if min(options.k) < 1 or options.questions < 1 or options.max_tokens < 1:
        parser.error("--top-k, --questions and --max-tokens must be at least 1")
    return options


def _dtype() -> str:
    """float32 on a CPU, where bf16 is slower; what the model says on a GPU."""
    import torch

    return "auto" if torch.cuda.is_available() else "float32"


def _injected(rows: Sequence[Any], k: int) -> int:
    """Median of the injected tokens."""
    tokens = [row.completion.injected_tokens for row in rows if (row.k, row.path) == (k, "injected")]
    return int(median(tokens))


def _as_json(row: Any) -> dict[str, Any]:
    completion = row.completion
    return {
        "k": row.k,
        "path": row.path,
        "ttft_ms": round(1e3 * row.ttft_s, 3),
        "injected_tokens": completion.injected_tokens,
        "prefilled_tokens": completion.prefilled_tokens,
        "answer": row.answer,
        "cached_tokens": completion.cached_tokens,
        "prompt_tokens": completion.prompt_tokens,
        "compose_ms": round(1e3 * completion.compose_s, 3),
        "user": row.user,
        "question": row.question,
        "right": row.right,
        "found": row.found,
        "dropped": row.dropped,
        "refused": completion.refused,
    }
