"""What engines find around them: which is installed, the environment of vLLM's processes, the folder of our own files.

Defaults only: what the user has set stays as it is.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def vllm_defaults() -> dict[str, str]:
    """Variables that vLLM's processes run with unless they are set."""
    return {
        # A forked core inherits the locks and thread pools of a process that has computed; a fresh one does not.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_MAX_STOP_STRINGS": "128",  # as many as `SamplingOptions` takes; vLLM's own limit is 4
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "TOKENIZERS_PARALLELISM": "false",
    }


def installed_engine() -> str:
    """Which engine runs in this process where nobody has said: "vllm", or "transformers" where there is no vLLM."""
    return "vllm" if importlib.util.find_spec("vllm") else "transformers"


def home_folder(home: str | Path | None = None) -> Path:
    """`home`, else INFERSCALE_HOME, else ~/.inferscale."""
    return Path(home or os.environ.get("INFERSCALE_HOME") or Path.home() / ".inferscale")
