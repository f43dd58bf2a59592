"""A rank under an outer launcher that hangs: it ends by itself, and says where."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from stepmark.cases.case import OpCase
from stepmark.cases.plan import Plan
from stepmark.cases.record import Failed, Record
from stepmark.measuring import rank
from stepmark.measuring.rank import Rank
from stepmark.model.ops import Gemm

from .fakes import entries

pytestmark = pytest.mark.ranks

SCRIPT = """
import sys, time
from stepmark.measuring.heartbeat import Watchdog

def stuck_in_this_function():
    time.sleep(100)

def record(position):
    print("recorded", position, flush=True)
    if "fails" in sys.argv:
        raise RuntimeError("disk full")

guard = Watchdog(record)
assert (guard.first, guard.restart_at(3)) == (0, False)
for position in range(3):
    guard.begin(position, 0.5)
    time.sleep(0.3)
    guard.idle(10.0)
if "closed" in sys.argv:
    guard.begin(3, 0.1)
    guard.close(0)
    time.sleep(0.6)
    sys.exit(0)
if "idle" in sys.argv:
    guard.idle(0.3)
else:
    guard.begin(3, 0.3)
stuck_in_this_function()
"""


def go(*words: str) -> tuple["subprocess.CompletedProcess[str]", float]:
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done, time.monotonic() - began_s


def test_a_rank_that_hangs_records_it_and_ends() -> None:
    done, took_s = go()
    assert (done.returncode, done.stdout) == (3, "recorded 3\n")
    assert "in stuck_in_this_function" in done.stderr
    assert "hangs at position 3" in done.stderr
    assert took_s < 5


def test_it_ends_even_if_it_cannot_record() -> None:
    done, _ = go("fails", "idle")
    assert (done.returncode, done.stdout) == (3, "recorded None\n")
    assert "disk full" in done.stderr


def test_nothing_ends_a_rank_that_is_done() -> None:
    done, _ = go("closed")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("gone", "cause"), [((1,), "lost rank"), ((), "timeout")])
def test_a_hang_behind_a_death_is_a_lost_rank(
    gone: tuple[int, ...], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's SIGTERM cannot be handled by a rank that waits in C for the dead one."""
    monkeypatch.setattr(rank, "Watchdog", lambda on_timeout: SimpleNamespace(first=0))
    records: list[Record] = []
    only = entries([OpCase(op=Gemm(m=1, n=1, k=1), backend="x", device="cpu")])
    plan = Plan(command="op", device="cpu", world_size=2, options={}, entries=tuple(only))
    one = Rank(plan, None, None, force=False)
    monkeypatch.setattr(one, "_peers", SimpleNamespace(gone=gone, stopped=[]))
    monkeypatch.setattr(one, "_progress", records.append)
    one._on_timeout(0)
    (record,) = records
    assert isinstance(record, Failed)
    assert (record.cause, record.ranks) == (cause, gone)
