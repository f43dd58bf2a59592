"""Cost of a breakdown in relation to parsing the file, measured in turns in one process."""

import contextlib
import gc
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepmark.cli.main import status
from stepmark.traces import trace_cache

pytestmark = pytest.mark.ranks

ROUNDS = 3
# A breakdown takes 0.5 to 0.9 times what json.loads does, a second question a seventh to a
# third of the first one; a busy machine disturbs one of two more than the other.
MOST_OF_LOADS, MOST_OF_FIRST = 1.3, 0.6
SCRIPT = Path(__file__).with_name("big_trace.py")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big")
    subprocess.run([sys.executable, SCRIPT, folder, "--size", "12MB"], check=True)
    return folder / "rank0.json"


def ask(verb: str, trace: Path, *flags: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert status(["trace", verb, str(trace), *flags]) == 0


def cpu_s(work: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def test_a_breakdown_costs_little_more_than_parsing(trace: Path) -> None:
    ask("breakdown", trace, "--no-cache")  # imports
    loads, breakdown = [], []
    for _ in range(ROUNDS):
        loads.append(cpu_s(lambda: json.loads(trace.read_bytes())))
        breakdown.append(cpu_s(lambda: ask("breakdown", trace, "--no-cache")))
    assert min(breakdown) < MOST_OF_LOADS * min(loads)


def test_a_second_question_costs_a_part_of_the_first(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_cache, "LEAST_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "imports"))
    for verb in ("breakdown", "messages"):
        ask(verb, trace)
    first, second = [], []
    for number in range(ROUNDS):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))
        first.append(cpu_s(lambda: ask("breakdown", trace)))
        second.append(cpu_s(lambda: ask("messages", trace)))
    assert min(second) < MOST_OF_FIRST * min(first)
