"""For all tests: threads, examples that take long on a busy machine, and the marks."""

import fcntl
import gc
import itertools
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager

# Tensors of tests are small: more threads only wait for each other. torch reads it at import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
from hypothesis import settings

# `make soak` tries more examples.
settings.register_profile("stepmark", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=200)
settings.load_profile("stepmark")

TESTS = Path(__file__).parent
# Files whose tests look at the steps that real ranks are compared with: captured once.
TOGETHER = dict.fromkeys(
    ("capture/test_overlap", "capture/test_shortcuts", "capture/test_truth"), "ranks"
)


def has_ranks(item: pytest.Item) -> bool:
    """Return whether a test uses a pool of ranks.

    Tests that start ranks in another way, or look at the clock, have the mark themselves.
    """
    return hasattr(getattr(item, "module", None), "Pool")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use ranks, and have one worker run all of them, from the start.

    Ranks of two such tests would wait for each other. The others stay together by file.
    Where one of them fails it runs once more, and is reported as RERUN: it depends on when a
    shared machine runs which of its processes. No other test gets a second run.
    """
    for path, of_file in itertools.groupby(items, key=lambda item: item.path):
        name = path.relative_to(TESTS).with_suffix("").as_posix()
        group = pytest.mark.xdist_group(TOGETHER.get(name, name))
        for item in of_file:
            if has_ranks(item):
                item.add_marker("ranks")
            is_of_ranks = item.get_closest_marker("ranks") is not None
            if is_of_ranks or item.get_closest_marker("cluster"):
                item.add_marker(pytest.mark.flaky(reruns=1))
            item.add_marker(pytest.mark.xdist_group("ranks") if is_of_ranks else group)
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


@pytest.fixture(autouse=True)
def _keep_no_device_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Other processes, which later tests start, need the memory that torch caches."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a long text by its length: every report of a test has its name."""
    if isinstance(val, str | bytes) and len(val) > 200:
        return f"{argname} of {len(val)}"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What measures releases what was frozen: the next would collect all of it first."""
    if item.get_closest_marker("ranks"):
        gc.freeze()


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Fork the ranks of commands that run in this process."""
    from tests import fork_server

    from stepmark.measuring import local_ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_ranks, "_start", fork_server.start_rank)
        yield


# Alone


@contextmanager
def _turn(*, is_alone: bool) -> Iterator[None]:
    """Wait until a test of a worker may run: together with others, or while none does.

    Who waits to be alone holds the gate, so that no other test begins.
    """
    gate_path, tests_path = _locks(os.getppid())
    with gate_path.open("w") as gate, tests_path.open("w") as tests:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(tests, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Closing would not do where a test has left a process that it forked.
            fcntl.flock(tests, fcntl.LOCK_UN)


def _locks(pid: int) -> tuple[Path, Path]:
    """Return the gate and the lock of tests. pid: of the process that starts the workers."""
    folder = Path(tempfile.gettempdir())
    return folder / f"stepmark-{pid}.gate", folder / f"stepmark-{pid}.tests"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with _turn(is_alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the locks of workers, all of which have ended."""
    if not hasattr(session.config, "workerinput"):
        for path in _locks(os.getpid()):
            path.unlink(missing_ok=True)


def pytest_collection_finish() -> None:
    """Collect garbage rarely, and never look at what imports made: it takes 7 % of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
