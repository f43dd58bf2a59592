"""Clocks against work of a known length; on a GPU also against each other."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch

from stepmark.cases.case import ClockName
from stepmark.ground.stats import summarize
from stepmark.measuring import clock

SLEEP_S = 2e-3


def sleep() -> None:
    time.sleep(SLEEP_S)


def test_the_host_clock_sees_a_sleep() -> None:
    timer = clock.HostTimer([sleep], SLEEP_S)
    assert timer.calls_per_sample == 1
    seconds = timer.sample(10)
    assert len(seconds) == 10
    # The kernel wakes a sleeper late, never early.
    assert SLEEP_S <= min(seconds) < 1.5 * SLEEP_S


def test_short_calls_are_timed_together_and_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    monkeypatch.setattr(clock.time, "perf_counter", lambda: count * 1e-5)
    timer = clock.HostTimer([call], 1e-5)
    assert timer.calls_per_sample == 100
    seconds = timer.sample(3)
    assert count == 300
    assert seconds == pytest.approx([1e-5] * 3)


@pytest.mark.parametrize(
    ("estimate", "k"), [(0.0, 1000), (1e-9, 1000), (1e-4, 10), (1e-3, 1), (5.0, 1)]
)
def test_a_sample_lasts_a_millisecond(estimate: float, k: int) -> None:
    assert clock.HostTimer([sleep], estimate).calls_per_sample == k


def test_operand_sets_take_turns() -> None:
    seen: list[int] = []

    def call(number: int) -> Callable[[], None]:
        return lambda: seen.append(number)

    timer = clock.HostTimer([call(i) for i in range(3)], 1e-3 / 4)
    timer.sample(3)
    assert len(seen) == 12
    assert all((a + 1) % 3 == b for a, b in pairwise(seen))


def test_estimate_of_a_sleep() -> None:
    call_s, launch_s = clock.estimate([sleep], "cpu")
    assert SLEEP_S <= call_s < 2 * SLEEP_S
    assert launch_s == 0


def test_an_estimate_of_a_long_call_is_short() -> None:
    begin = time.monotonic()
    clock.estimate([lambda: time.sleep(0.3)], "cpu")
    assert time.monotonic() - begin < 1.5


@pytest.mark.parametrize("name", ClockName)
def test_a_cpu_has_the_host_clock(name: ClockName) -> None:
    timer = clock.choose(
        name,
        [sleep],
        call_s=1e-3,
        launch_s=0,
        device_type="cpu",
        capturable=True,
        l2_bytes=0,
    )
    assert timer.method == "host/1"


@pytest.mark.parametrize(
    ("call_s", "launch_s", "method"),
    [(5e-6, 20e-6, "event-rotate/2"), (50e-6, 20e-6, "event-rotate/1")],
)
def test_kernels_shorter_than_their_launch_have_a_method_of_their_own(
    call_s: float, launch_s: float, method: str
) -> None:
    assert clock.rotate_timer([sleep], call_s, launch_s).method == method


# GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def _stream_of_its_own() -> Iterator[None]:
    """Ranks measure on such a stream: graphs are captured from no other."""
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def device_timer(name: ClockName, size: int, sets: int = 8) -> clock.Timer:
    pairs = [
        tuple(torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in range(sets)
    ]
    outs = [torch.empty_like(a) for a, _ in pairs]
    calls = [
        lambda a=a, b=b, out=out: torch.mm(a, b, out=out)
        for (a, b), out in zip(pairs, outs, strict=True)
    ]
    call_s, launch_s = clock.estimate(calls, "cuda")
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return clock.choose(
        name,
        calls,
        call_s=call_s,
        launch_s=launch_s,
        device_type="cuda",
        capturable=True,
        l2_bytes=l2_bytes,
    )


def median(timer: clock.Timer) -> float:
    timer.sample(50)
    return summarize(timer.sample(100)).median


@pytest.mark.gpu
@needs_gpu
def test_graph_and_events_agree_on_a_long_kernel() -> None:
    rotate = median(device_timer(ClockName.ROTATE, 4096))
    graph = median(device_timer(ClockName.GRAPH, 4096))
    flush = median(device_timer(ClockName.FLUSH, 4096))
    assert graph == pytest.approx(rotate, rel=0.05)
    assert flush == pytest.approx(rotate, rel=0.15)


@pytest.mark.gpu
@needs_gpu
def test_no_clock_gives_less_than_a_hot_cache() -> None:
    hot = median(device_timer(ClockName.HOT, 1024))
    for name in (ClockName.ROTATE, ClockName.FLUSH):
        assert median(device_timer(name, 1024)) > 0.9 * hot
    # No launch is in it: a graph of the same calls takes about as long.
    assert hot < 1.3 * median(device_timer(ClockName.GRAPH, 1024))


@pytest.mark.gpu
@needs_gpu
def test_a_graph_hides_the_launch_of_a_short_kernel() -> None:
    assert median(device_timer(ClockName.GRAPH, 128)) < 20e-6


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("size", "method"), [(128, "graph-rotate/1"), (16384, "event-rotate/1")]
)
def test_short_kernels_get_a_graph(size: int, method: str) -> None:
    assert device_timer(ClockName.AUTO, size, sets=2).method == method
