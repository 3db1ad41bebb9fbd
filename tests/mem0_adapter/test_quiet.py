"""A start says nothing that an app's users could do nothing about."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from subprocess import run

import pytest
from mem0.utils import spacy_models

from inferscale_memory.memory import Memory  # noqa: F401  # which turns the noise off

PROGRAM = """
import sys
from inferscale_memory import Memory
with Memory(folder=sys.argv[1], engine={"provider": "transformers"}) as memory:
    memory.add("I am allergic to walnuts.", user_id="a", infer=False)
    assert memory.search("Which nuts?", filters={"user_id": "a"})["results"]
    memory.chat("Which nuts?", user_id="a", max_tokens=2)
"""


@pytest.fixture(autouse=True)
def no_spacy(monkeypatch: pytest.MonkeyPatch) -> None:
    """mem0 has not looked for it yet, and will not find it."""
    monkeypatch.setitem(sys.modules, "spacy", None)
    for name in ("_nlp_lemma", "_nlp_full"):
        monkeypatch.setattr(spacy_models, name, None)
    for name in ("_load_failed_lemma", "_load_failed_full"):
        monkeypatch.setattr(spacy_models, name, False)


def test_an_extra_that_is_not_installed_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert spacy_models.get_nlp_lemma() is spacy_models.get_nlp_full() is None
    assert caplog.records == []


def test_who_asks_for_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, spacy_models.logger.name):
        spacy_models.get_nlp_lemma()
    [said] = caplog.records
    assert "pip install mem0ai[nlp]" in said.getMessage()


def test_an_extra_that_is_installed_and_does_not_work_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("Failed to download spaCy model en_core_web_sm")

    monkeypatch.setattr(spacy_models, "_ensure_model_available", broken)
    with caplog.at_level(logging.WARNING, spacy_models.logger.name):  # a program before may have silenced mem0
        spacy_models.get_nlp_lemma()
    assert len(caplog.records) == 1


@pytest.mark.engine
def test_a_program_prints_what_it_prints_itself(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
