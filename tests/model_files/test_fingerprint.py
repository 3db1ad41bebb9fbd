"""The fingerprint changes with everything that keys, values or token ids depend on, and with nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferscale_memory.errors import ConfigurationError
from inferscale_memory.model_files.fingerprint import CHUNK, CHUNKS, model_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(os.urandom(1000))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(os.urandom(3 * CHUNK * CHUNKS + 17))
    return tmp_path


def name(folder: Path, *extra: str, dtype: str = "float32") -> str:
    return model_fingerprint(folder, dtype=dtype, extra=extra)


def test_it_is_32_hex_digits_and_always_the_same(folder: Path) -> None:
    assert name(folder) == name(folder)
    assert len(bytes.fromhex(name(folder))) == 16


def test_layout_of_the_configuration_and_foreign_files_do_not_matter(folder: Path) -> None:
    before = name(folder)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "model_type": "llama"}, indent=4))
    (folder / "README.md").write_text("hello")
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    assert name(folder) == before


def test_dtype_and_extra_matter(folder: Path) -> None:
    names = [
        name(folder),
        name(folder, dtype="bfloat16"),
        name(folder, "a"),
        name(folder, "a", "b"),
        name(folder, "ab"),
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "file",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"],
)
def test_configuration_tokenizer_and_template_matter(folder: Path, file: str) -> None:
    before = name(folder)
    (folder / file).write_text('{"model_type": "qwen2"}')
    assert name(folder) != before


@pytest.mark.parametrize("place", [0, 999])
def test_every_byte_of_a_small_weight_file_matters(folder: Path, place: int) -> None:
    before = name(folder)
    flip(folder / "model-00001-of-00002.safetensors", place)
    assert name(folder) != before


@pytest.mark.parametrize("place", [0, CHUNK - 1, -1, -CHUNK])
def test_both_ends_of_a_large_weight_file_matter(folder: Path, place: int) -> None:
    before = name(folder)
    flip(folder / "model-00002-of-00002.safetensors", place)
    assert name(folder) != before


def test_a_change_of_any_sixty_fourth_of_a_large_weight_file_matters(folder: Path) -> None:
    """So do fine-tunes: they change nearly everything."""
    path = folder / "model-00002-of-00002.safetensors"
    raw = path.read_bytes()
    names = {name(folder)}
    part = len(raw) // 60
    for number in range(60):
        start = number * part
        path.write_bytes(raw[:start] + bytes(part) + raw[start + part :])
        names.add(name(folder))
    assert len(names) == 61


def test_size_and_name_of_a_weight_file_matter(folder: Path) -> None:
    before = name(folder)
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    after = name(folder)
    path.rename(folder / "other.safetensors")
    assert len({before, after, name(folder)}) == 3


def test_a_large_file_is_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.gguf").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte with no blocks
    assert len(name(tmp_path)) == 32


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (None, "inferscale fetch"),
        ({}, "no config"),
        ({"config.json": "{"}, "unreadable"),
        ({"config.json": "[]"}, "not a JSON object"),
        ({"config.json": "{}"}, "no weights"),
    ],
)
def test_what_is_no_model_is_said_with_a_remedy(
    tmp_path: Path, files: dict[str, str] | None, why: str
) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text)
    with pytest.raises(ConfigurationError, match=why):
        name(folder)


def test_it_needs_no_tensor_library() -> None:
    code = (
        "import sys, inferscale_memory.model_files.fingerprint; "
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)
