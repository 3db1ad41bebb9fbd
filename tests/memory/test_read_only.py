"""A memory that cannot be written is opened to be read, with one warning; what can neither be written nor read is
refused by name."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import pytest

from inferscale_memory import InferScaleError, StoreError
from inferscale_memory.memory import Memory
from tests.memory.conftest import OpenFace, OpenMemory
from tests.memory.disks import Disk, small_disk

ADA = {"user_id": "ada"}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "memory") as disk:
        yield disk


def texts(memory: Memory) -> list[str]:
    return [row["memory"] for row in memory.get_all(filters=ADA)["results"]]


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_it_is_read_with_one_warning(
    disk: Disk, open_face: OpenFace, caplog: pytest.LogCaptureFixture, killed: bool
) -> None:
    """A process that was killed leaves what it wrote last in the logs of its files."""
    before = open_face(folder=disk.folder)
    [made] = before.add("I own a horse", infer=False, **ADA)["results"]
    if killed:
        names = [file.name for file in disk.folder.iterdir() if file.is_file()]
        kept = {name: (disk.folder / name).read_bytes() for name in names if not name.endswith("-shm")}
        before.close()
        for name, data in kept.items():
            (disk.folder / name).write_bytes(data)
    else:
        before.close()
    with disk.read_only():
        memory = open_face(folder=disk.folder)
        warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len([record for record in warned if "for reading alone" in record.getMessage()]) == 1
        assert str(disk.folder) in caplog.text
        assert "INFERSCALE_HOME" in caplog.text
        assert texts(memory) == ["I own a horse"]
        assert memory.search("a horse", filters=ADA)["results"][0]["memory"] == "I own a horse"
        reply = memory.chat("What do I own?", **ADA, max_tokens=1)
        assert [one.text for one in reply.memories] == ["I own a horse"]
        assert [event["event"] for event in memory.history(made["id"])] == ["ADD"]
        for call in (
            lambda: memory.add("I own a dog", infer=False, **ADA),
            lambda: memory.update(made["id"], "I own a dog"),
            lambda: memory.delete(made["id"]),
            lambda: memory.delete_all(**ADA),
            lambda: memory.reset(),
        ):
            with pytest.raises(StoreError, match=r"nothing can be stored or deleted: .*memory"):
                call()
        assert texts(memory) == ["I own a horse"]
        memory.close()
    assert texts(open_face(folder=disk.folder)) == ["I own a horse"]


def test_a_folder_where_nothing_is_yet_is_refused_by_name(disk: Disk, open_memory: OpenMemory) -> None:
    for folder in (disk.folder, disk.folder / "deeper"):
        with disk.read_only(), pytest.raises(InferScaleError, match=rf"{folder}.*INFERSCALE_HOME"):
            open_memory(folder=folder)


def test_a_home_that_cannot_be_written_is_no_reason_for_the_import_to_fail(
    disk: Disk, tmp_path: Path
) -> None:
    """mem0 makes a folder when it is imported; with a folder of its own a memory needs no home."""
    (tmp_path / "writable").mkdir()
    program = (
        "import sys; from inferscale_memory import Memory\n"
        "from mem0.utils.factory import EmbedderFactory\n"
        "EmbedderFactory.provider_to_class['huggingface'] = 'tests.memory.hashing.HashingEmbedder'\n"
        "embedder = {'provider': 'huggingface', 'config': {'model': 'hashing', 'embedding_dims': 64}}\n"
        "with Memory.from_config({'embedder': embedder, 'folder': sys.argv[1]}) as memory:\n"
        "    memory.add('I own a horse', infer=False, user_id='ada')\n"
        "    print(memory.get_all(filters={'user_id': 'ada'})['results'][0]['memory'])\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MEM0_DIR", "INFERSCALE_HOME")
    }
    environment |= {"HOME": str(disk.folder), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with disk.read_only():
        done = run(
            [sys.executable, "-c", program, str(tmp_path / "writable")],
            env=environment,
            capture_output=True,
            text=True,
        )
    assert done.stdout.splitlines() == ["I own a horse"], done.stderr
    assert done.stderr.count("cannot be written") == 1
    assert "INFERSCALE_HOME" in done.stderr
