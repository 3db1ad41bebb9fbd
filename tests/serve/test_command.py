"""`inferscale serve`: what it makes of its arguments, whom it lets in, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from inferscale_memory import cli
from inferscale_memory.connector import secret
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.serve import command

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
    with pytest.raises(ConfigurationError, match="leave it out"):
        command.main(["folder", "--kv_transfer_config", "{}"])
    with pytest.raises(ConfigurationError, match="model first"):
        command.main(["--max-model-len", "2048", "folder"])
    assert served == []


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


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_it_is_interrupted(tmp_path: Path, number: signal.Signals, stubborn: bool) -> None:
    """A process stands for the server: it ends with its child when it is told to, or only when it is killed."""
    script = tmp_path / "server.py"
    ending = "pass" if stubborn else "child.kill(); child.wait(); sys.exit(0)"
    script.write_text(dedent(STAND_IN).format(ending=ending))
    code = (
        "import sys; from inferscale_memory.serve.command import _serve\n"
        f"sys.exit(_serve([sys.executable, {str(script)!r}], 'http://127.0.0.1:9', lambda: None))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 2
        process.send_signal(number)
        if stubborn:
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(number)
        assert process.wait(timeout=20) == 130
    psutil.wait_procs(family, timeout=10)
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


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
