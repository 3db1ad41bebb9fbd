"""The memories of `tests/memory`."""

from tests.memory.conftest import *  # noqa: F403
