"""Suspension of Python's search for reference cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend garbage collection; then as it was.

    It takes a third of the time of tables that only grow, and would delay a sample on one rank.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
