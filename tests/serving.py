"""Real servers for tests: `inferscale serve` and plain `vllm serve`, each in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx

from inferscale_memory.engine.environment import vllm_defaults

SETTINGS = (
    *("--dtype", "float32", "--max-model-len", "2048", "--block-size", "32"),
    *("--num-gpu-blocks-override", "300", "--enforce-eager"),
)
START_S = 400


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Server:
    """A server that is up when the block begins, and gone with all its processes when it ends.

    Args:
        arguments: of `inferscale serve`, without the port; with `plain`, of `vllm serve`.
        log: where its output goes.
    """

    def __init__(self, *arguments: str, log: Path, port: int | None = None, plain: bool = False) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        module = "inferscale_memory.commands.serve.vllm_command" if plain else "inferscale_memory.cli"
        self._command = [sys.executable, "-m", module, "serve", *arguments, "--port", str(self.port)]
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with self._log.open("wb") as log:
            # A session of its own, so that what is sent to it does not reach the test.
            self.process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**vllm_defaults(), **os.environ},
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return self
            except httpx.HTTPError:
                time.sleep(0.5)
        self.stop()
        # What went wrong first stands where the first error does; what follows is its consequences.
        output = self.output()
        first = max(0, output.find("ERROR"))
        raise AssertionError(
            f"the server did not start:\n{output[first : first + 4000]}\n...\n{output[-2000:]}"
        )

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def stop(self) -> int:
        """Ctrl-C; returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=120)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def running(self) -> int:
        """Requests that are under way in the engine."""
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        assert lines, "vLLM has renamed its metric"
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)
