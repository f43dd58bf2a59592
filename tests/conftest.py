"""For all tests: threads, examples that take long on a busy machine, and the marks."""

import gc
import os

# Tensors of tests are small: more threads only wait for each other. torch reads it at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("stepmark", deadline=None)
settings.load_profile("stepmark")

TESTS = Path(__file__).parent


def measures_ranks(item: pytest.Item) -> bool:
    """Return whether a test is of launch, or uses a pool of ranks to measure collectives.

    Tests elsewhere that start ranks to measure, or look at the clock, have the mark themselves.
    """
    folders = item.path.relative_to(TESTS).parts
    has_pool = hasattr(getattr(item, "module", None), "Pool")
    return folders[0] == "launch" or (folders[:2] == ("bench", "collectives") and has_pool)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if measures_ranks(item):
            item.add_marker("ranks")


def pytest_collection_finish() -> None:
    """Collect garbage rarely, and never look at what imports made: it takes 7 % of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
