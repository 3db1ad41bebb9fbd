"""`make bench`: what composing costs, on a real vLLM engine in this process.

Rotating and writing n tokens into the paged cache is timed against a plain copy of the same bytes, interleaved, after
warm-up, as medians. The whole demo (`inferscale demo --json FILE`) measures time to first token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table of medians; `--json FILE` writes it too."""
    parser = argparse.ArgumentParser(prog="python -m inferscale_memory.bench", description=main.__doc__)
    parser.add_argument("--model", type=Path, help="a model folder (default: SmolLM2-135M-Instruct, fetched)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[250, 1000, 1750])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--block-size", type=int, help="of vLLM's paged cache (default: the backend's)")
    parser.add_argument("--stage-bytes", type=int, nargs="+", help="sizes of the staging buffer to compare")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)

    from inferscale_memory.connector.compose import Composer
    from inferscale_memory.fetch import demo_model

    worker = _worker(options.model or demo_model(), options.dtype, options.block_size)
    base: Composer = worker.composer
    rows = []
    for stage_bytes in options.stage_bytes or [base.stage_bytes]:
        composer = Composer(worker.arenas[0], worker._layers, worker.rotations, stage_bytes=stage_bytes)
        rows += [_measure(worker, composer, tokens, options.repeat) for tokens in options.tokens]
    for row in rows:
        print(
            f"{row['tokens']:6d} tokens  {row['bytes'] / 1e6:7.1f} MB   composing {row['compose_ms']:7.2f} ms   "
            f"plain copy {row['copy_ms']:6.2f} ms   ratio {row['ratio']:5.2f}   stage {row['stage_bytes'] >> 10} KiB"
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
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
    """Medians of composing and of copying, interleaved. Facts of 35 tokens lie scattered in the arena."""
    import numpy as np
    import torch

    from inferscale_memory.connector.metadata import Load

    arena = worker.arenas[0]
    draw = np.random.default_rng(0)
    starts = draw.integers(0, arena.rows - 35, size=-(-tokens // 35))
    rows = (starts[:, None] + np.arange(35)).reshape(-1)[:tokens].astype(np.int64)
    positions = np.arange(tokens, dtype=np.int64)
    block = worker._layers[0].kv_cache.shape[2]
    load = Load("bench", rows, positions, positions + block, ())
    arena.keys[: arena.rows].normal_()
    arena.values[: arena.rows].normal_()
    layers, _, heads, head_dim = arena.keys.shape
    source = torch.randn(layers, tokens, heads, head_dim, dtype=arena.keys.dtype)
    pair = (source, source.clone())
    target = (torch.empty_like(source), torch.empty_like(source))
    compose, copy = [], []
    for turn in range(repeat + 3):
        began = perf_counter()
        composer.write([load])
        middle = perf_counter()
        for here, there in zip(pair, target, strict=True):
            there.copy_(here)
        end = perf_counter()
        if turn >= 3:
            compose.append(middle - began)
            copy.append(end - middle)
    return {
        "tokens": tokens,
        "bytes": 2 * source.numel() * source.element_size(),
        "compose_ms": 1e3 * median(compose),
        "copy_ms": 1e3 * median(copy),
        "ratio": median(a / b for a, b in zip(compose, copy, strict=True)),
        "stage_bytes": composer.stage_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
