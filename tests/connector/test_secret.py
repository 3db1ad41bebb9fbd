"""The secret under a home: made once, whole, and never an empty one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferscale_memory.connector import secret
from inferscale_memory.errors import ConfigurationError


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secret.VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(secret.VARIABLE)


def test_a_home_gets_one_secret_that_only_its_user_reads(tmp_path: Path) -> None:
    made = secret.ensure(tmp_path / "home")
    path = tmp_path / "home" / "secret"
    assert len(made) == 32
    assert secret.known(tmp_path / "home") == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["secret"]
    assert secret.is_kept(tmp_path / "home")


def test_those_who_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = set(pool.map(lambda _: secret._made(tmp_path), range(64)))
    assert made == {secret.kept(tmp_path)}
    assert os.listdir(tmp_path) == ["secret"]


def test_a_file_system_without_links_keeps_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert secret.ensure(tmp_path) == secret.known(tmp_path)


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"])
def test_a_damaged_file_is_refused_and_not_taken_for_no_secret(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    for use in (secret.ensure, secret.known):
        with pytest.raises(ConfigurationError, match="delete the file") as refused:
            use(tmp_path)
        assert str(tmp_path / "secret") in str(refused.value)


def test_a_home_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="INFERSCALE_HOME"):
        secret.ensure(tmp_path / "file" / "home")


def test_a_home_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert secret.known(tmp_path) == b""
