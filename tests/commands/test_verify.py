"""`inferscale verify`: sound engines of every family pass, and each fault is found by its own check."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from inferscale_memory import cli
from inferscale_memory.commands import verify
from inferscale_memory.commands.verify import command
from inferscale_memory.engine import transformers
from inferscale_memory.engine.base import Completion, EncodeRequest, EncodeResult, SamplingOptions, Span
from inferscale_memory.engine.hf import families as hf_families
from inferscale_memory.engine.transformers import TransformersEngine
from inferscale_memory.kv.store import BlobStore
from inferscale_memory.prompt.segments import Prompt
from tests.models import FAMILIES, tiny_model

pytestmark = pytest.mark.engine

FACTS = 5
GREEDY = SamplingOptions()
MOVED = {"moved", f"k = {FACTS}", "order", "repetition"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


class Verify:
    """Runs the command on a folder and reads what it wrote."""

    def __init__(self, scratch: Path) -> None:
        self._file = scratch / "outcome.json"

    def __call__(self, folder: Path, *options: str, engine: str = "transformers") -> int:
        arguments = ["--model", str(folder), "--engine", engine, "--facts", str(FACTS)]
        return verify.main([*arguments, "--json", str(self._file), *options])

    @property
    def checks(self) -> dict[str, dict[str, Any]]:
        outcome = json.loads(self._file.read_text())
        assert set(outcome) == {"checks"}
        assert all(set(check) == {"name", "passed", "value", "bound"} for check in outcome["checks"])
        return {check["name"]: check for check in outcome["checks"]}

    @property
    def failed(self) -> set[str]:
        return {name for name, check in self.checks.items() if not check["passed"]}


@pytest.fixture
def run(tmp_path: Path) -> Verify:
    return Verify(tmp_path)


# -- sound engines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_on_transformers(
    family: str, run: Verify, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_model(family, tmp_path / family), "--dtype", "float32") == 0
    checks = run.checks
    assert run.failed == set()
    assert {"plain", "whole prefix", "k = 0", "k = 1", "other ids", "another owner", "forgotten"} < set(
        checks
    )
    assert set(checks) > MOVED
    assert checks["whole prefix"]["bound"] == 1e-4
    assert all(checks[name]["value"] <= checks[name]["bound"] == 1e-3 for name in MOVED)
    assert all(check["value"] == 0 for name, check in checks.items() if name.endswith("off by"))
    printed = capsys.readouterr().out
    assert f"all {len(checks)} checks hold" in printed
    assert "whole prefix" in printed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_held_to_its_own_noise(dtype: str, run: Verify, tmp_path: Path) -> None:
    assert run(tiny_model("llama", tmp_path / "model", dtype=dtype)) == 0
    checks = run.checks
    assert checks["moved"]["bound"] == pytest.approx(3 * checks["plain"]["value"])
    assert 0 < checks["plain"]["value"] <= checks["plain"]["bound"]


def test_another_seed_asks_about_other_facts_and_the_same_seed_about_the_same(
    folder: Path, run: Verify
) -> None:
    values = []
    for seed in "7", "8", "7":
        assert run(folder, "--seed", seed) == 0
        values.append(run.checks["control: no memory"]["value"])
    assert values[0] == values[2] != values[1]


def test_vllm_is_exact_on_a_tiny_model(
    folder: Path, run: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("INFERSCALE_HOME", str(tmp_path / "home"))
    assert run(folder, "--dtype", "float32", engine="vllm") == 0, run.failed
    assert run.checks["moved"]["value"] <= 1e-3


# -- broken engines ------------------------------------------------------------------------------------------


class Shifted(TransformersEngine):
    """Keeps the keys of the tokens after those it was told to keep."""

    def _capture(self, loaded: Any, layers: Any, request: EncodeRequest) -> torch.Tensor:
        ids = (*request.ids, request.ids[0])
        spans = tuple(Span(span.start + 1, span.stop + 1) for span in request.spans)
        return super()._capture(loaded, layers, replace(request, ids=ids, spans=spans))


class Stored(TransformersEngine):
    """Keeps keys as rotated where they were encoded, and does not move them."""

    def _capture(self, loaded: Any, layers: Any, request: EncodeRequest) -> torch.Tensor:
        data = super()._capture(loaded, layers, request)
        places = torch.cat([torch.arange(span.start, span.stop) for span in request.spans])
        keys = data[:, 0].transpose(1, 2)  # [layers, kv_heads, tokens, head_dim]
        cos, sin = loaded.model.model.rotary_emb(keys, places[None])
        data[:, 0] = apply_rotary_pos_emb(keys, keys, cos, sin)[0].transpose(1, 2)
        return data


class Forgetless(TransformersEngine):
    """Says that it forgot."""

    def forget(self, owner: str, keys: Sequence[str] = (), tags: Sequence[str] = ()) -> int:
        return len(keys)


class Reader(TransformersEngine):
    """Never injects, and answers rightly."""

    def generate(self, prompt: Prompt, options: SamplingOptions = GREEDY) -> Completion:
        return super().generate(prompt.as_text(), options)


class Boaster(TransformersEngine):
    """Answers without the facts that it says it injected."""

    def generate(self, prompt: Prompt, options: SamplingOptions = GREEDY) -> Completion:
        told = super().generate(prompt, options)
        rest = prompt.segments[len(prompt.composition) :]
        return replace(
            super().generate(replace(prompt, segments=rest), options), injected_tokens=told.injected_tokens
        )


class Failing(TransformersEngine):
    """Cannot encode."""

    def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeResult]:
        return [EncodeResult((), "the hooks saw nothing")] * len(requests)


class Numberless(TransformersEngine):
    """Answers with no number."""

    def generate(self, prompt: Prompt, options: SamplingOptions = GREEDY) -> Completion:
        got = super().generate(prompt, options)
        return replace(got, logprobs=tuple(dict.fromkeys(row, float("nan")) for row in got.logprobs or ()))


def unrotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's rotation turns nothing where blobs are composed."""
    compose = hf_families.AttentionLayers.compose

    def by_nothing(rotary: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = type(rotary).forward(rotary, *arguments)
        return torch.ones_like(cos), torch.zeros_like(sin)

    def unrotated_compose(self: Any, *arguments: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(self._rotary, "forward", partial(by_nothing, self._rotary))
            return compose(self, *arguments)

    monkeypatch.setattr(hf_families.AttentionLayers, "compose", unrotated_compose)


def everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks whose blob it is."""
    monkeypatch.setattr(BlobStore, "usable", lambda store, owner, key: store.get(key) if key in store else None)


def any_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody compares the prompt's ids with the blob's."""
    monkeypatch.setattr(transformers, "digest_ids", lambda ids: b"")


def in_place_of(engine: type[TransformersEngine]) -> Callable[[pytest.MonkeyPatch], None]:
    def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transformers, "TransformersEngine", engine)

    return replaced


def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    unrotated(monkeypatch)
    in_place_of(Stored)(monkeypatch)


@pytest.mark.parametrize(
    ("fault", "found", "sound"),
    [
        (in_place_of(Shifted), {"whole prefix", "k = 1", *MOVED}, {"plain"}),
        (unrotated, {"whole prefix", *MOVED}, {"plain"}),
        (stored, MOVED, {"plain", "whole prefix", "k = 0", "k = 1"}),
        (everybodys, {"another owner: injected tokens off by"}, {"whole prefix", "other ids", *MOVED}),
        (any_ids, {"other ids", "other ids: injected tokens off by"}, {"whole prefix", *MOVED}),
        (
            in_place_of(Forgetless),
            {"forgotten: blobs still at hand", "forgotten: injected tokens off by"},
            {"whole prefix", *MOVED},
        ),
        (
            in_place_of(Reader),
            {f"{name}: injected tokens off by" for name in ("whole prefix", "k = 0", *MOVED)},
            {"plain", "whole prefix"},
        ),
        (in_place_of(Boaster), {"whole prefix", "k = 1", *MOVED}, {"plain"}),
        (in_place_of(Failing), {"encode"}, set()),
        (in_place_of(Numberless), {"plain", "whole prefix", "moved"}, set()),
    ],
    ids=[
        *(
            "shifted spans",
            "no rotation",
            "keys kept rotated",
            "owner ignored",
            "ids ignored",
            "nothing forgotten",
        ),
        *("nothing injected", "nothing remembered", "encode fails", "not a number"),
    ],
)
def test_a_broken_engine_is_found_by_the_check_meant_for_it(
    fault: Callable[[pytest.MonkeyPatch], None],
    found: set[str],
    sound: set[str],
    folder: Path,
    run: Verify,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    assert run(folder) == 1
    assert run.failed >= found
    assert not run.failed & sound


def test_a_model_to_which_facts_make_no_difference_proves_nothing(run: Verify, tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "model") / "model.safetensors"
    weights = {
        name: torch.zeros_like(weight) if "o_proj" in name else weight
        for name, weight in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    assert run(path.parent) == 1
    assert run.failed == {"control: no memory", "control: order", "control: position"}


def test_an_unsupported_model_fails_one_check_that_says_why(
    run: Verify, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert run(tiny_model("llama", tmp_path / "model", rope_parameters=rope)) == 1
    assert list(run.checks) == ["supported"]
    assert "dynamic" in run.checks["supported"]["value"]
    assert "dynamic" in capsys.readouterr().out


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", ["vllm", "transformers"])
def test_the_engine_is_the_one_that_is_installed(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr("inferscale_memory.commands.verify.command.installed_engine", lambda: installed)
    assert command._parser().parse_args(["--model", "folder"]).engine == installed


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--facts", "3"], "at least 4"),
        (["--facts", "500"], "fewer --facts"),
        (["--max-model-len", "0"], "pass more"),
        (["--max-model-len", "100"], "larger --max-model-len"),
        (["--json", "/nowhere/outcome.json"], "/nowhere"),
        (["--json", "/"], "no file"),
        (["--model", "/nowhere"], "inferscale fetch"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    options: list[str], why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "--model", str(folder), "--engine", "transformers", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert why in captured.err.splitlines()[-1]
