"""`inferscale bench composing`: what composing costs, on a real vLLM engine in this process.

Rotating and writing n tokens into the paged cache is timed against a plain copy of the same bytes, interleaved, after
warm-up, as medians. The whole demo (`inferscale demo --json FILE`) measures time to first token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of medians; `--json FILE` writes it too."""
    parser = argparse.ArgumentParser(prog="inferscale bench composing", description=main.__doc__)
    parser.add_argument("--model", type=Path, help="a model folder (default: SmolLM2-135M-Instruct, fetched)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[250, 1000, 1750])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block-size", type=int, help="of vLLM's paged cache (default: the backend's)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)

    from inferscale_memory.fetch import demo_model

    worker = _worker(options.model or demo_model(), options.dtype, options.block_size)
    served = worker.composer
    if served.direct is None:
        print("the engine's operators write: no other writer could be proved equal to them")
    rows = [_measure(worker, served, tokens, options.repeat) for tokens in options.tokens]
    for row in rows:
        print(
            f"{row['tokens']:6d} tokens {row['bytes'] / 1e6:6.1f} MB   plain copy {row['copy_ms']:6.2f} ms   "
            f"composing {row['compose_ms']:6.2f} ms ({row['compose_ratio']:4.2f}x)   "
            f"by the engine's operators {row['operators_ms']:6.2f} ms ({row['operators_ratio']:4.2f}x)"
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def _worker(model: Path, dtype: str, block_size: int | None) -> Any:
    """The connector's worker side in an engine of this process, checked and ready."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "INFERSCALE_SECRET": "bench"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    llm = LLM(
        str(model),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=4096,
        block_size=block_size,
        kv_transfer_config={
            "kv_connector": "InferScaleConnector",
            "kv_connector_module_path": "inferscale_memory.connector.connector",
            "kv_role": "kv_both",
        },
    )
    llm.generate([{"prompt_token_ids": list(range(10, 42))}], SamplingParams(max_tokens=2), use_tqdm=False)
    worker: Any = get_kv_transfer_group()._worker
    if worker.composer is None:
        raise SystemExit("blobs cannot be used with this model; the message above says why")
    return worker


def _measure(worker: Any, composer: Any, tokens: int, repeat: int) -> dict[str, Any]:
    """Medians of composing, and of composing by the engine's operators, each interleaved with copying.

    Facts of 35 tokens lie scattered in the arena.
    """
    import numpy as np
    import torch

    from inferscale_memory.connector.compose import Composer
    from inferscale_memory.connector.metadata import Load

    arena = worker.arenas[0]
    draw = np.random.default_rng(0)
    starts = draw.integers(0, arena.rows - 35, size=-(-tokens // 35))
    rows = (starts[:, None] + np.arange(35)).reshape(-1)[:tokens].astype(np.int64)
    positions = np.arange(tokens, dtype=np.int64)
    block = worker._block_size
    load = Load("bench", rows, positions, positions + block, ())
    arena.keys[: arena.rows].normal_()
    arena.values[: arena.rows].normal_()
    layers, _, heads, head_dim = arena.keys.shape
    source = torch.randn(layers, tokens, heads, head_dim, dtype=arena.keys.dtype)
    pair = (source, source.clone())
    target = (torch.empty_like(source), torch.empty_like(source))
    by_operators = Composer(arena, worker._layers, worker.rotations)

    def copy() -> None:
        for here, there in zip(pair, target, strict=True):
            there.copy_(here)

    row: dict[str, Any] = {"tokens": tokens, "bytes": 2 * source.numel() * source.element_size()}
    for name, way in (("operators", by_operators), ("compose", composer)):
        ours, theirs = _interleaved(lambda way=way: way.write([load]), copy, repeat)  # type: ignore[misc]
        row[f"{name}_ms"] = 1e3 * median(ours)
        row[f"{name}_ratio"] = median(a / b for a, b in zip(ours, theirs, strict=True))
        row["copy_ms"] = 1e3 * median(theirs)
    return row


def _interleaved(
    one: Callable[[], None], other: Callable[[], None], repeat: int
) -> tuple[list[float], list[float]]:
    """Seconds of each of `repeat` turns of both, after three to warm up."""
    seconds = []
    for _ in range(repeat + 3):
        began = perf_counter()
        one()
        between = perf_counter()
        other()
        seconds.append((between - began, perf_counter() - between))
    first, second = zip(*seconds[3:], strict=True)
    return list(first), list(second)


if __name__ == "__main__":
    sys.exit(main())
