"""The program behind `inferscale bench`: finds the measurement that was asked for. Each takes `--json FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from inferscale_memory.errors import ConfigurationError

_PROGRAMS = {
    "ttft": ("ttft", "time to the first token: text, injected, a prefix-cache hit, no memory"),
    "throughput": ("throughput", "requests a second of many users at once"),
    "chat": ("chat", "a conversation of 20 turns: a session, sticky, recomposed, and as text"),
    "accuracy": ("accuracy.command", "how close injected memories come to text, on LoCoMo"),
    "composing": ("composing", "rotating and writing tokens, against a plain copy"),
    "encoding": ("encoding", "tokens a second of encoding long facts, beside a plain prefill"),
    "index": ("index", "the vector store, against numpy and mem0's FAISS store"),
    "extraction": ("extraction", "what an `add` costs when the engine extracts"),
}


def main(argv: Sequence[str] = ()) -> int:
    """Runs `inferscale bench ARGV`."""
    listed = "\n".join(f"  {name:<12}{text}" for name, (_, text) in _PROGRAMS.items())
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: inferscale bench PROGRAM ...; each takes --help\n\n{listed}")
        return 0
    if argv[0] not in _PROGRAMS:
        raise ConfigurationError(f"there is no benchmark {argv[0]!r}: {', '.join(_PROGRAMS)} are")
    status: int = import_module(f"benchmarks.{_PROGRAMS[argv[0]][0]}").main(list(argv[1:]))
    return status or 0
