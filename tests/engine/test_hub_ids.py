"""A model named by its id at the hub is the one in the hub's cache: for engines, fingerprints and commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inferscale_memory.commands.serve.command import _arguments, _parser
from inferscale_memory.engine.base import SamplingOptions
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.engine.vllm import VLLMEngine
from inferscale_memory.errors import ConfigurationError
from inferscale_memory.model_files.fingerprint import model_fingerprint
from inferscale_memory.model_files.folder import cached_folder, check_model, model_folder
from inferscale_memory.prompt.segments import Prompt, Segment
from tests.models import tiny_model

ID, COMMIT = "org/tiny-llama", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("plain") / "tiny-llama")


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, as its client lays it out: files by content, and snapshots of links to them."""
    cache = tmp_path / "hub"
    repo = cache / f"models--{ID.replace('/', '--')}"
    snapshot, blobs = repo / "snapshots" / COMMIT, repo / "blobs"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return snapshot


def test_what_is_in_the_cache_is_taken(hub: Path) -> None:
    assert model_folder(ID).resolve() == hub.resolve()
    assert model_folder(ID, revision=COMMIT).resolve() == hub.resolve()
    assert cached_folder(ID) is not None


def test_the_same_files_have_the_same_fingerprint(hub: Path, folder: Path) -> None:
    assert model_fingerprint(model_folder(ID), dtype="float32") == model_fingerprint(folder, dtype="float32")


@pytest.mark.engine
def test_the_transformers_engine_takes_it(hub: Path, folder: Path) -> None:
    asked, options = Prompt("ada", (Segment((5, 6, 7)),)), SamplingOptions(max_tokens=4)
    with TransformersEngine(ID, device="cpu") as engine, TransformersEngine(folder, device="cpu") as plain:
        assert engine.fingerprint == plain.fingerprint
        assert engine.generate(asked, options).token_ids == plain.generate(asked, options).token_ids


@pytest.mark.engine
def test_vllm_takes_it(hub: Path, folder: Path, tmp_path: Path) -> None:
    settings = {
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "num_gpu_blocks_override": 40,
    }
    with VLLMEngine(ID, home=tmp_path, **settings) as engine:
        assert engine.fingerprint == model_fingerprint(folder, dtype="float32")
        assert engine.unsupported is None
        assert (
            len(
                engine.generate(Prompt("ada", (Segment((5, 6, 7)),)), SamplingOptions(max_tokens=4)).token_ids
            )
            > 0
        )
        assert engine.tokenizer.name_or_path.endswith(COMMIT)


def test_a_server_is_started_with_the_folder_under_the_name_of_the_id(hub: Path, folder: Path) -> None:
    options, rest = _parser().parse_known_args([ID])
    arguments = _arguments(options, rest)
    assert Path(arguments[1]).resolve() == hub.resolve()
    assert arguments[arguments.index("--served-model-name") + 1] == ID
    options, rest = _parser().parse_known_args([str(folder)])
    assert "--served-model-name" not in _arguments(options, rest)


def test_a_cache_without_all_weights_is_not_taken_for_a_model(hub: Path) -> None:
    (hub / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE"):
        model_folder(ID)
    assert model_folder(ID, weights=False).resolve() == hub.resolve()


def test_what_is_not_there_offline_names_every_remedy(hub: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)HF_HUB_OFFLINE.*hf download org/other.*folder"):
        check_model("org/other")


@pytest.mark.parametrize("name", ["/nowhere", "./org/name", "a/b/c", "org/name/", ""])
def test_a_path_is_no_id(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no model folder|no config"):
        model_folder(name)
