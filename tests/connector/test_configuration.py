"""Every configuration of vLLM that names our connector is settled before anything is loaded, however it was written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from inferscale_memory.connector import configuration, plugin
from inferscale_memory.connector.configuration import DEVICE_BYTES, lowered
from inferscale_memory.connector.worker import WorkerSide
from inferscale_memory.engine.vllm import VLLMEngine
from inferscale_memory.errors import ConfigurationError
from tests.models import tiny_model

GIB = 1 << 30
CARD = 80 * 10**9
"""Bytes of a card that is sold as one of 80 GB; most report somewhat more."""
VLLMS_DEFAULT = 0.92


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("llama", "gemma3_text", "granitemoehybrid")
    return {name: tiny_model(name, tmp_path_factory.mktemp(name)) for name in names}


@pytest.fixture(autouse=True)
def registered() -> None:
    plugin.register()  # as vLLM does in each of its processes


def transfer(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": configuration.NAME,
        "kv_connector_module_path": configuration.MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def made(model: Path, **options: Any) -> VllmConfig:
    """vLLM's configuration, as it is made for an engine."""
    options = {"kv_transfer_config": transfer(), "max_model_len": 512, **options}
    return EngineArgs(model=str(model), dtype="float32", **options).create_engine_config()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had a GPU of 80 GB. None was at hand: this was never run on one."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_: CARD)


# -- which KV cache manager -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "disabled"), [("llama", True), ("gemma3_text", True), ("granitemoehybrid", False)]
)
def test_layers_share_one_group_unless_some_are_recurrent(
    models: dict[str, Path], name: str, disabled: bool
) -> None:
    """In one group layers with a window and without are injected; recurrent ones cannot start there."""
    config = made(models[name])
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is disabled


def test_what_the_user_says_of_the_manager_stays(models: dict[str, Path]) -> None:
    config = made(models["gemma3_text"], disable_hybrid_kv_cache_manager=False)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


def test_an_engine_without_our_connector_is_left_alone(models: dict[str, Path]) -> None:
    config = made(models["gemma3_text"], kv_transfer_config=None)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_offloading_size": 1.0}, "another connector"),
        ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, "another connector"),
        ({"data_parallel_size": 2}, "one server for each replica"),
    ],
)
def test_vllm_does_not_start_where_the_connector_would_be_replaced_or_reached_in_part(
    models: dict[str, Path], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        made(models["llama"], **options)
    made(models["llama"], kv_transfer_config=None)  # without our connector it is vLLM's own affair


def test_a_file_of_arguments_is_judged_as_the_command_line_is(
    models: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "arguments.yaml"
    file.write_text(
        f"kv_transfer_config:\n  kv_connector: {configuration.NAME}\n  kv_role: kv_both\nkv-offloading-size: 1\n"
    )
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", str(models["llama"]), "--config", str(file)])
    with pytest.raises(ValueError, match="another connector"):
        EngineArgs.from_cli_args(arguments).create_engine_config()


def test_a_connector_among_several_is_refused(models: dict[str, Path]) -> None:
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [transfer(), {"kv_connector": "ExampleConnector"}]},
    }
    with pytest.raises(ValueError, match="MultiConnector hides"):
        made(models["llama"], kv_transfer_config=several)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_offloading_size": 1},
        {"kv_offloading_backend": "native"},
        {"kv_transfer_config": {}},
        {"data_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
    ],
    ids=str,
)
def test_an_engine_refuses_them_when_it_is_made(models: dict[str, Path], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}=.* does not go with VLLMEngine"):
        VLLMEngine(models["llama"], **options)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_blobs_are_taken_out_of_vllms_share() -> None:
    assert lowered(0.92, 8 * GIB, 80 * GIB) == pytest.approx(0.82)
    assert lowered(0.5, 0, 80 * GIB) == 0.5
    with pytest.raises(ConfigurationError, match=DEVICE_BYTES):
        lowered(0.1, 8 * GIB, 80 * GIB)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("asked", [None, 0.5])
def test_vllm_is_handed_a_lower_share_whoever_set_it(models: dict[str, Path], asked: float | None) -> None:
    share = {} if asked is None else {"gpu_memory_utilization": asked}
    config = made(models["llama"], kv_transfer_config=transfer(device_bytes=8 * 10**9), **share)
    left = pytest.approx((asked or VLLMS_DEFAULT) - 0.1)
    assert config.cache_config.gpu_memory_utilization == left
    configuration.settle(config)  # a copy of a configuration passes again
    assert config.cache_config.gpu_memory_utilization == left


def test_on_a_cpu_nothing_is_lowered(models: dict[str, Path]) -> None:
    """There the KV cache has a size of its own: VLLM_CPU_KVCACHE_SPACE."""
    plain = made(models["llama"], kv_transfer_config=None).cache_config.gpu_memory_utilization
    config = made(models["llama"], kv_transfer_config=transfer(device_bytes=8 * GIB))
    assert config.cache_config.gpu_memory_utilization == plain


def test_the_documented_examples_fit_a_card_of_80_gb() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    sizes = [int(number) for number in re.findall(r'"device_bytes": (\d+)', page)]
    sizes += [int(number) * GIB for number in re.findall(r"--device-bytes (\d+)GiB", page)]
    assert sizes, "the page has no example any more"
    weights = 8.03e9 * 2  # Llama 3.1 8B in bf16
    for size in sizes:
        assert size > (1 - VLLMS_DEFAULT) * CARD, "without lowering it would not fit"
        share = lowered(VLLMS_DEFAULT, size, CARD)
        assert share * CARD + size <= VLLMS_DEFAULT * CARD * 1.0001
        assert share * CARD - weights > 32 * GIB, "there is room for 250,000 tokens of KV cache"


@pytest.mark.parametrize(("rows", "option"), [([1 << 50], "device_bytes"), ([8, 1 << 50], "host_bytes")])
def test_a_tier_that_does_not_fit_names_its_option(rows: list[int], option: str) -> None:
    layer = SimpleNamespace(
        layer_name="model.layers.0.self_attn.attn",
        num_kv_heads=2,
        head_size=32,
        kv_cache=torch.empty(0),
        impl=SimpleNamespace(do_kv_cache_update=None),
        attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
    )
    plain = type("Attention", (SimpleNamespace,), {})(**layer.__dict__)
    side = WorkerSide(rows, torch.float32, 16, lambda: (), lambda _: False)
    with pytest.raises(ConfigurationError, match=f"lower {option}"):
        side.register([plain])
