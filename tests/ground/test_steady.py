"""Where samples become steady: laws, then series whose start is known."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.stats import steady_from

TIMES = st.lists(st.floats(1e-6, 1e3), max_size=60)
CYCLES = st.integers(1, 8)


@given(TIMES, CYCLES)
def test_whole_cycles_are_left_out_and_at_most_half_of_them(
    seconds: list[float], cycle: int
) -> None:
    found = steady_from(seconds, cycle)
    if found is not None:
        assert found % cycle == 0
        assert 0 <= found // cycle <= len(seconds) // cycle // 2


@given(TIMES, CYCLES, st.integers(-20, 20))
def test_the_unit_does_not_matter(seconds: list[float], cycle: int, power: int) -> None:
    scaled = [value * 2.0**power for value in seconds]  # exact
    assert steady_from(scaled, cycle) == steady_from(seconds, cycle)


@given(TIMES, CYCLES, st.data())
def test_an_incomplete_last_cycle_changes_nothing(
    seconds: list[float], cycle: int, data: st.DataObject
) -> None:
    whole = seconds[: len(seconds) // cycle * cycle]
    more = data.draw(st.lists(st.floats(1e-6, 1e3), max_size=cycle - 1))
    assert steady_from([*whole, *more], cycle) == steady_from(whole, cycle)


@given(st.integers(2, 60), CYCLES, st.floats(1e-6, 1e3))
def test_equal_samples_are_steady_from_the_first(
    num_cycles: int, cycle: int, value: float
) -> None:
    assert steady_from([value] * num_cycles * cycle, cycle) == 0


@given(TIMES, CYCLES)
def test_fewer_than_two_cycles_tell_nothing(seconds: list[float], cycle: int) -> None:
    short = seconds[: 2 * cycle - 1]
    assert steady_from(short, cycle) is None


@given(st.integers(0, 12), st.integers(1, 8), st.floats(1.5, 100.0))
def test_a_slow_start_is_left_out_and_nothing_else(
    slow: int, cycle: int, factor: float
) -> None:
    seconds = [factor] * slow * cycle + [1.0] * 12 * cycle
    assert steady_from(seconds, cycle) == slow * cycle


@given(st.integers(4, 12), st.data())
def test_what_settles_after_the_middle_is_not_steady_yet(
    rest: int, data: st.DataObject
) -> None:
    """Unless it is the last quarter, which is always kept."""
    slow = data.draw(st.integers(rest + 1, 3 * rest))
    assert steady_from([2.0] * slow + [1.0] * rest) is None


@given(st.integers(2, 8), st.integers(2, 20))
def test_the_optimizer_of_a_cycle_is_no_drift(cycle: int, num_cycles: int) -> None:
    one = [1.0] * (cycle - 1) + [1.5]
    assert steady_from(one * num_cycles, cycle) == 0


@pytest.mark.parametrize(("count", "limit"), [(31, 0.1), (64, 0.02)])
def test_noise_alone_seldom_looks_like_a_drift(count: int, limit: float) -> None:
    drawn = random.Random(1)
    series = ([drawn.gauss(1.0, 0.01) for _ in range(count)] for _ in range(500))
    found = [steady_from(seconds) for seconds in series]
    assert found.count(None) <= limit * len(found)


def test_a_rising_series_is_not_steady() -> None:
    assert steady_from([1 + 0.01 * index for index in range(40)]) is None
