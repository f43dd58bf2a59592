"""The load of a host from a made-up /proc."""

from pathlib import Path

import pytest

from stepmark.measuring.telemetry import HostReadings, cpu_ticks, num_runnable


def write(proc: Path, running: int, steal: int, total: int) -> None:
    (proc / "loadavg").write_text(f"0.20 0.18 0.12 {running}/80 11206\n")
    ticks = [total - steal - 30, 0, 10, 20, 0, 0, 0, steal, 5, 0]
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3 4 5 6 7 8 9 10\n")


def test_the_run_queue_and_what_was_stolen(tmp_path: Path) -> None:
    write(tmp_path, running=4, steal=100, total=10_000)
    readings = HostReadings(tmp_path)
    for running in (9, 2, 7):
        write(tmp_path, running=running, steal=150, total=10_200)
        readings.read()
    load = readings.load(own_threads=2)
    assert load is not None
    assert (load.runnable_before, load.runnable, load.own_threads) == (3, 6, 2)
    assert load.steal == pytest.approx(50 / 200)


def test_a_host_that_says_nothing_is_unknown(tmp_path: Path) -> None:
    assert HostReadings(tmp_path / "none").load(1) is None
    (tmp_path / "loadavg").write_text("0.00 0.00 0.00 0/0 0\n")  # gVisor
    (tmp_path / "stat").write_text("cpu  1 2 3\n")
    assert num_runnable(tmp_path) is None
    assert cpu_ticks(tmp_path) is None
    readings = HostReadings(tmp_path)
    readings.read()
    assert readings.load(1) is None
