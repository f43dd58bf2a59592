"""For all tests: threads, examples that take long on a busy machine, and the marks."""

import os

# Tensors of tests are small: more threads only wait for each other. torch reads it at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("stepmark", deadline=None)
settings.load_profile("stepmark")

TESTS = Path(__file__).parent
# Folders whose tests start commands or ranks.
STARTING = ("cli", "launch", "app")


def starts_processes(item: pytest.Item) -> bool:
    """Return whether a test is of a folder of STARTING, or uses a pool of ranks."""
    folder = item.path.relative_to(TESTS).parts[0]
    module = getattr(item, "module", None)
    return folder in STARTING or hasattr(module, "Pool")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if starts_processes(item):
            item.add_marker("ranks")
