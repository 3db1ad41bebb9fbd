"""`inferscale bench extraction`, on a model that draws nothing out of anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import extraction
from tests.models import tiny_model

pytestmark = pytest.mark.engine


def test_every_add_is_a_row_whose_tokens_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = tiny_model("llama", tmp_path / "model"), tmp_path / "rows.json"
    arguments = ["--model", str(model), "--adds", "1", "--max-tokens", "8", "--json", str(file)]
    assert extraction.main(arguments) == 0
    ada, ben = json.loads(file.read_text())["rows"]
    assert [ada["user"], ben["user"]] == ["ada", "ben"]
    for row in (ada, ben):
        assert row["prompt"] == row["injected"] + row["cached"] + row["prefilled"]
        assert 0 < row["ttft_s"] < row["add_s"]
        assert row["facts"] is None, "8 tokens are no answer"
    assert ben["injected"] > 0, "the instructions were read for the first of all"
    assert "cut off" in capsys.readouterr().out
