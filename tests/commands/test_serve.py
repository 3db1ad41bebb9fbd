"""`inferscale serve`: what it makes of its arguments, whom it lets in, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from inferscale_memory import cli
from inferscale_memory.commands.serve import command
from inferscale_memory.connector import secret
from inferscale_memory.errors import ConfigurationError

pytest.importorskip("vllm", reason="without vLLM there is nothing to serve with, and the command says so")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(secret.VARIABLE, "")
    return tmp_path / "home"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be run: instead of starting a server, its command is kept."""
    commands: list[list[str]] = []

    def keep(arguments: list[str], *_: object) -> int:
        commands.append(list(arguments))
        return 0

    monkeypatch.setattr(command, "_serve", keep)
    monkeypatch.setattr(command, "_claim_port", lambda *_: None)  # the usual one may be taken here
    return commands


def value(arguments: list[str], name: str) -> str:
    assert arguments.count(name) == 1
    return arguments[arguments.index(name) + 1]


def test_it_serves_this_machine_with_our_connector(served: list[list[str]]) -> None:
    assert cli.main(["serve", "folder"]) == 0
    [arguments] = served
    assert arguments[arguments.index("serve") + 1] == "folder"
    assert (value(arguments, "--host"), value(arguments, "--port")) == ("127.0.0.1", "8000")
    transfer = json.loads(value(arguments, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "InferScaleConnector"
    assert transfer["kv_connector_extra_config"] == {"device_bytes": 1 << 30, "host_bytes": 1 << 30}
    assert "--enable-prompt-tokens-details" in arguments
    assert "--enable-per-request-metrics" in arguments


def test_arguments_of_vllm_are_handed_on(served: list[list[str]]) -> None:
    own = ["--max-model-len", "2048", "--dtype=float32", "--enforce-eager", "--api-key", "k", "-tp", "2"]
    cli.main(["serve", "folder", *own, "--port", "81", "--device-bytes", "8GiB", "--host-bytes", "0"])
    [arguments] = served
    assert arguments[-len(own) :] == own
    assert value(arguments, "--port") == "81"
    transfer = json.loads(value(arguments, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"] == {"device_bytes": 8 << 30, "host_bytes": 0}


def test_what_the_user_sets_is_not_set_again(served: list[list[str]]) -> None:
    own = ["--structured_outputs_config.backend", "guidance", "--no-enable-per-request-metrics"]
    cli.main(["serve", "folder", *own])
    [arguments] = served
    assert "--structured-outputs-config" not in arguments
    assert "--enable-per-request-metrics" not in arguments


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("2GiB", 2 << 30), ("1.5g", 3 << 29), ("8 MB", 8 << 20), ("1k", 1024)]
)
def test_sizes(text: str, size: int) -> None:
    assert command._size(text) == size


def test_what_is_no_size_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("much", "", "-1", "1 parsec"):
        with pytest.raises(SystemExit):
            cli.main(["serve", "folder", f"--device-bytes={text}"])
        assert "is no size" in capsys.readouterr().err


def test_a_secret_is_made_once_and_kept_for_the_user_alone(served: list[list[str]], home: Path) -> None:
    cli.main(["serve", "folder"])
    kept = (home / "secret").read_text()
    assert len(kept) == 64
    assert (home / "secret").stat().st_mode & 0o777 == 0o600
    assert os.environ[secret.VARIABLE] == kept
    assert secret.known(home) == secret.from_environment() != b""
    assert not any(kept in argument for argument in served[0])


def test_a_client_makes_up_no_secret(tmp_path: Path) -> None:
    assert secret.known(tmp_path / "nowhere") == b""
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu7.example.org"])
def test_other_machines_are_let_in_only_with_a_secret_of_the_users(
    host: str, served: list[list[str]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=secret.VARIABLE):
        command.main(["folder", "--host", host])
    assert served == []
    assert not home.exists()
    monkeypatch.setenv(secret.VARIABLE, "chosen")
    command.main(["folder", "--host", host])
    assert value(served[0], "--host") == host
    assert not home.exists()


def test_arguments_that_cannot_work_are_refused_with_their_remedy(served: list[list[str]]) -> None:
    with pytest.raises(ConfigurationError, match="Leave it out"):
        command.main(["folder", "--kv_transfer_config", "{}"])
    with pytest.raises(ConfigurationError, match="model first"):
        command.main(["--max-model-len", "2048", "folder"])
    assert served == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-offloading-size", "8"],
        ["--kv_offloading_size=8"],
        ["--kv-offloading-s", "8"],
        ["--kv-offloading-backend", "lmcache"],
        ["--kv-transfer-config", "{}"],
        ["--kv_transfer_config.kv_connector", "NixlConnector"],
        ["--kv-transfer-config.kv_role=kv_both"],
        ["-pcp", "2"],
        ["--prefill_context_parallel_size=2"],
        ["-dp", "2"],
        ["-dp=2"],
        ["--data-parallel-size", "2"],
        ["--data_parallel_size=4"],
        ["--data-parallel-rank", "0"],
        ["--data-parallel-external-lb"],
        ["--headless"],
    ],
    ids=" ".join,
)
def test_arguments_that_replace_or_blind_the_connector_are_refused_in_every_spelling(
    arguments: list[str], served: list[list[str]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="does not go with `inferscale serve`"):
        command.main(["folder", "--dtype", "float32", *arguments])
    # The same in a file.
    name, _, value = arguments[0].lstrip("-").partition("=")
    if arguments[0].startswith("--") and "." not in name and name != "kv-offloading-s":
        file = tmp_path / "arguments.yaml"
        file.write_text(f"dtype: float32\n{name}: {value or (arguments[1:] or ['true'])[0]}\n")
        with pytest.raises(ConfigurationError, match="does not go with `inferscale serve`"):
            command.main(["folder", "--config", str(file)])
    assert served == []


@pytest.mark.parametrize(
    "arguments", [["-dp", "1"], ["--data-parallel-size=1"], ["-tp", "2"], ["--kv-cache-dtype", "fp8"]]
)
def test_arguments_that_do_no_harm_are_handed_on(arguments: list[str], served: list[list[str]]) -> None:
    assert command.main(["folder", *arguments]) == 0
    assert served[0][-len(arguments) :] == arguments


def test_a_host_cannot_be_given_behind_the_commands_back(served: list[list[str]]) -> None:
    """vLLM takes the beginning of a name for all of it, and would listen to other machines."""
    for arguments in (["--hos", "0.0.0.0"], ["--por=81"]):
        with pytest.raises(ConfigurationError, match="in full"):
            command.main(["folder", *arguments])
    assert served == []


def test_what_a_file_sets_is_not_set_again(served: list[list[str]], tmp_path: Path) -> None:
    """vLLM prefers its command line to the file: what is added there would undo what the user wrote."""
    file = tmp_path / "arguments.yaml"
    file.write_text(
        "structured-outputs-config:\n  backend: guidance\nshutdown_timeout: 3\n"
        "enable-per-request-metrics: false\n"
    )
    command.main(["folder", "--config", str(file)])
    [arguments] = served
    for name in ("--structured-outputs-config", "--shutdown-timeout", "--enable-per-request-metrics"):
        assert name not in arguments
    assert value(arguments, "--config") == str(file)


def test_a_file_that_cannot_be_read_is_named(served: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    for arguments in (
        ["--config"],
        ["--config", str(tmp_path / "none.yaml")],
        ["--config", str(tmp_path / "list.yaml")],
    ):
        with pytest.raises(ConfigurationError, match="--config"):
            command.main(["folder", *arguments])
    assert served == []


def test_a_port_that_is_taken_is_refused_before_anything_starts(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"{port}.*--port"):
            command.main(["folder", "--port", str(port)])
    assert not home.exists()


def test_it_says_how_to_connect_and_never_the_secret(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret.ensure(home)
    command._say_how("http://127.0.0.1:8000", "127.0.0.1", home)
    said = capsys.readouterr().err
    assert "'base_url': 'http://127.0.0.1:8000'" in said
    assert "by themselves" in said
    monkeypatch.setenv(secret.VARIABLE, "chosen")
    command._say_how("http://127.0.0.1:8000", "0.0.0.0", home)
    said += capsys.readouterr().err
    assert "THIS-MACHINE:8000" in said
    assert f"set {secret.VARIABLE}" in said
    assert "chosen" not in said
    assert (home / "secret").read_text() not in said


STAND_IN = """
    import signal, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    def end(*_):
        {ending}
    signal.signal(signal.SIGTERM, end)
    print("up", flush=True)
    time.sleep(60)
"""


class Up(BaseHTTPRequestHandler):
    """What says of itself that it is up."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def health() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Up) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def interrupted(script: Path, url: str, signals: list[signal.Signals], *, says: bytes) -> None:
    """Run a process in place of vLLM's, wait until `says` was said, and interrupt the command; all must end."""
    code = (
        "import sys; from inferscale_memory.commands.serve.command import _serve\n"
        "ready = lambda: print('ready', flush=True)\n"
        f"sys.exit(_serve([sys.executable, {str(script)!r}], {url!r}, ready))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = {process.stdout.readline().strip()}
        while says not in said or b"up" not in said:
            said.add(process.stdout.readline().strip())
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 2
        for number in signals:
            assert process.poll() is None
            process.send_signal(number)
            time.sleep(0.5)
        assert process.wait(timeout=20) == 130
    psutil.wait_procs(family, timeout=10)
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def stand_in(folder: Path, ending: str) -> Path:
    script = folder / "server.py"
    script.write_text(dedent(STAND_IN).format(ending=ending))
    return script


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_is_up_is_told_to_end(tmp_path: Path, number: signal.Signals, health: str) -> None:
    ending = f"open({str(tmp_path / 'tidy')!r}, 'w').close(); child.kill(); child.wait(); sys.exit(0)"
    interrupted(stand_in(tmp_path, ending), health, [number], says=b"ready")
    assert (tmp_path / "tidy").exists()


def test_a_server_that_does_not_end_is_killed_the_second_time(tmp_path: Path, health: str) -> None:
    interrupted(stand_in(tmp_path, "pass"), health, [signal.SIGINT, signal.SIGINT], says=b"ready")


def test_a_server_that_is_not_up_yet_is_killed_at_once(tmp_path: Path) -> None:
    """vLLM does not hear of it while it starts."""
    interrupted(stand_in(tmp_path, "pass"), "http://127.0.0.1:9", [signal.SIGINT], says=b"up")


def test_a_server_that_ends_by_itself_hands_on_its_status(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    assert command._serve(failing, "http://127.0.0.1:9", lambda: None) == 3


def test_vllm_finds_the_connector_by_its_entry_point() -> None:
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as factory\n"
        "print(factory._registry['InferScaleConnector']().__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["inferscale_memory.connector.connector"], done.stderr[-2000:]
