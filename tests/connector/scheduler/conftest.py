"""Small engines for the tests of the scheduler side."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscale_memory.connector.scheduler import admission
from tests.connector.simulation import Simulation


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(autouse=True)
def small_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers here are as small as what one encode keeps: a quarter of one would hold nothing."""
    monkeypatch.setattr(admission, "ENCODE_SHARE", 1)


@pytest.fixture
def sim(folder: Path) -> Simulation:
    return Simulation(folder)
