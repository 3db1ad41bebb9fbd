"""The names at the root of the package: what users import, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import inferscale_memory

HEAVY = ("torch", "transformers", "vllm", "mem0", "sentence_transformers", "faiss")


@pytest.mark.parametrize("name", inferscale_memory.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(inferscale_memory, name) is not None
    assert name in dir(inferscale_memory)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Memroy'"):
        inferscale_memory.Memroy  # noqa: B018


@pytest.mark.parametrize(("old", "new"), inferscale_memory._RENAMED.items())
def test_an_earlier_name_works_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"is now {new}"):
        assert getattr(inferscale_memory, old) is getattr(inferscale_memory, new)


def test_the_version_is_the_distributions() -> None:
    assert inferscale_memory.__version__ == version("inferscale-memory")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import sys, inferscale_memory; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_remote_client_needs_no_torch() -> None:
    code = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm", "transformers", "sentence_transformers"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Blocked())
from inferscale_memory import AsyncMemory, Memory, RemoteEngine, SamplingOptions
print(Memory.__name__, RemoteEngine.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["Memory", "RemoteEngine"]), done.stderr[-2000:]
