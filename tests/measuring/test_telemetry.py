"""The sampler against sources that answer, fall silent, break and hang."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from stepmark.cases.record import Telemetry
from stepmark.measuring import telemetry
from stepmark.measuring.telemetry import Sampler, cpu_reading, num_runnable


def sampled(sampler: Sampler, seconds: float = 0.05) -> Telemetry:
    with sampler:
        time.sleep(seconds)
    return sampler.telemetry()


def test_medians_union_and_temperature_after() -> None:
    clocks = itertools.count(1)
    reasons = itertools.cycle([("power cap",), ("idle",), ("sync boost", "power cap")])

    def read() -> Telemetry:
        number = next(clocks)
        return Telemetry(
            sm_clock_hz=1e9 * (1 + (number == 1)),
            power_w=float(number),
            temperature_c=float(number),
            throttle=next(reasons),
            num_readings=1,
        )

    found = sampled(Sampler(None, read=read, interval_s=0.002))
    n = found.num_readings
    assert n >= 3
    assert found.sm_clock_hz == 1e9
    assert found.mean_clock_hz == pytest.approx(1e9 * (n + 1) / n)
    assert found.power_w == (n + 1) / 2  # median of 1..n: the last reading is in none
    assert found.temperature_c == n + 1  # but gives the temperature
    assert found.throttle == ("power cap", "sync boost")  # idle is no throttle


def test_short_work_still_has_a_reading() -> None:
    sampler = Sampler(None, read=lambda: Telemetry(power_w=5.0, num_readings=1), interval_s=9.0)
    found = sampled(sampler, 0.02)
    assert (found.num_readings, found.power_w) == (1, 5.0)


def test_the_host_is_read_before_and_meanwhile_where_proc_has_it() -> None:
    found = sampled(Sampler(None, interval_s=0.005, more_threads=3))
    if num_runnable() is None:
        assert found.host is None or found.host.runnable is None
    else:
        assert found.host is not None
        assert found.host.runnable_before is not None
        assert found.host.runnable is not None
        assert found.host.own_threads == torch.get_num_threads() + 3


def test_silence_is_none_not_zero() -> None:
    assert sampled(Sampler(None, read=Telemetry)) == Telemetry()


def test_energy_lies_between_changes_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that moves every 30 ms by 7 J and is read every 10 ms."""
    readings = itertools.count(2)
    now_ms = 0

    def energy_j() -> float:
        nonlocal now_ms
        now_ms = 10 * next(readings)
        return 1e6 + 7.0 * (now_ms // 30)

    monkeypatch.setattr(telemetry.time, "monotonic", lambda: now_ms / 1e3)
    sampler = Sampler(None, read=Telemetry, energy_j=energy_j, interval_s=1e-3)
    found = sampled(sampler, 0.1)
    assert found.energy_j is not None
    assert found.span_s is not None
    assert found.energy_j > 0
    assert found.energy_j / found.span_s == pytest.approx(7 / 0.03)


@pytest.mark.parametrize("answers", [[None], [5.0], [5.0, 6.0]])
def test_a_counter_that_changes_less_than_twice_gives_no_energy(
    answers: list[float | None],
) -> None:
    each = itertools.chain(answers, itertools.repeat(answers[-1]))
    sampler = Sampler(None, read=Telemetry, energy_j=lambda: next(each), interval_s=1e-3)
    assert sampled(sampler, 0.02) == Telemetry()


def test_a_broken_source_ends_the_readings_not_the_run() -> None:
    answers = iter([Telemetry(power_w=1.0, num_readings=1)])

    def read() -> Telemetry:
        for answer in answers:
            return answer
        raise OSError("the card fell off the bus")

    found = sampled(Sampler(None, read=read, interval_s=0.001))
    assert (found.num_readings, found.power_w, found.temperature_c) == (1, 1.0, None)


def test_a_hung_driver_does_not_hang_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "STOP_TIMEOUT_S", 0.05)
    release = threading.Event()

    def read() -> Telemetry:
        release.wait(5.0)
        return Telemetry()

    started = time.monotonic()
    assert sampled(Sampler(None, read=read), 0.01).num_readings == 0
    release.set()
    assert time.monotonic() - started < 2.0


def test_each_block_starts_anew() -> None:
    sampler = Sampler(None, read=lambda: Telemetry(power_w=5.0, num_readings=1), interval_s=9.0)
    assert sampled(sampler, 0.02).num_readings == sampled(sampler, 0.02).num_readings == 1


def test_no_thread_is_left_behind() -> None:
    sampled(Sampler(None, read=Telemetry))
    assert "telemetry" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("answer", "clock_hz", "num_readings"),
    [
        (None, None, 0),
        (SimpleNamespace(current=0.0), None, 0),
        (SimpleNamespace(current=2400.0), 2.4e9, 1),
    ],
)
def test_cpu_clock_where_the_host_tells(
    monkeypatch: pytest.MonkeyPatch,
    answer: object,
    clock_hz: float | None,
    num_readings: int,
) -> None:
    monkeypatch.setattr(telemetry.psutil, "cpu_freq", lambda: answer)
    reading = cpu_reading()
    assert (reading.sm_clock_hz, reading.num_readings) == (clock_hz, num_readings)


def test_threads_of_gloo_are_the_measurements_own(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = telemetry.Sampler(None)._own_threads
    monkeypatch.setattr(telemetry.dist, "is_initialized", lambda: True)
    assert telemetry.Sampler(None)._own_threads == alone + telemetry.GLOO_THREADS
