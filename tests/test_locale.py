"""Files are UTF-8 whatever the locale, and a terminal that cannot show or say a character ends nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAIN = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

CHAT = """
import sys
from types import ModuleType
program = ModuleType("inferscale_memory.commands.demo.run")
def main(argv):
    for line in sys.stdin:
        print("heard", line.strip())
    print("shown", argv[0])
program.main = main
sys.modules[program.__name__] = program
from inferscale_memory import cli
sys.exit(cli.main(["demo", *sys.argv[1:]]))
"""


def inferscale(
    program: list[str], locale: dict[str, str], said: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "MEM0_TELEMETRY": "False", "HF_HUB_OFFLINE": "1", **locale}
    return subprocess.run(
        [sys.executable, *program], input=said, capture_output=True, env=environment, check=False, timeout=300
    )


@pytest.mark.parametrize("locale", [PLAIN, {"LC_ALL": "C.UTF-8"}], ids=["C", "UTF-8"])
def test_one_byte_that_is_no_text_does_not_end_a_talk(locale: dict[str, str]) -> None:
    done = inferscale(["-c", CHAT, "Zoë"], locale, "Grüße\n".encode() + b"caf\xe9\nbye\n")
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 4
    assert lines[0] in ("heard Grüße", r"heard Gr\xfc\xdfe"), "what was typed is UTF-8 in either"
    assert lines[2] == "heard bye"


def test_a_configuration_and_its_folder_may_have_any_name(tmp_path: Path) -> None:
    """In a locale without an encoding the name itself cannot be printed; the file is read all the same."""
    folder = tmp_path / "Erinnerungen für Zoë"
    folder.mkdir()
    config = folder / "größe.json"
    config.write_text(
        json.dumps({"folder": str(folder / "nichts"), "note": "ü"}, ensure_ascii=False), encoding="utf-8"
    )
    for locale in (PLAIN, {"LC_ALL": "C.UTF-8"}):
        done = inferscale(["-m", "inferscale_memory.cli", "migrate", "--reembed", str(config)], locale)
        assert done.returncode == 2
        assert b"Traceback" not in done.stderr
        assert b"inferscale: " in done.stderr


def test_no_file_is_opened_in_the_encoding_of_the_locale() -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--preview",
            "--select",
            "PLW1514",
            "--isolated",
            "inferscale_memory",
            "integrations",
            "examples",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    assert found.returncode == 0, found.stdout
