"""A line that was drawn is found again; a curve of several lines is cut where they meet."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmark.ground.fit import GOOD_RMS, MIN_POINTS, Fit, Point, fit, piecewise

ALPHAS = st.floats(1e-7, 1e-2)
BETAS = st.floats(1e6, 1e12)
SIZES = st.lists(
    st.integers(0, 40).map(lambda power: 2.0**power), min_size=3, max_size=20, unique=True
)


def line(alpha: float, beta: float, sizes: list[float]) -> list[Point]:
    return [(size, alpha + size / beta) for size in sizes]


@given(ALPHAS, BETAS, SIZES)
def test_an_exact_line_is_recovered(alpha: float, beta: float, sizes: list[float]) -> None:
    points = line(alpha, beta, sizes)
    found = fit(points)
    assert found is not None
    assert found.worst_rel < 1e-6
    assert found.num_points == len(points)
    for size, time in points:
        assert found.time_s(size) == pytest.approx(time, rel=1e-6)
    assert len(piecewise(points)) == 1


@given(st.floats(1e-6, 1e-4), st.floats(1e9, 1e12))
def test_parameters_are_recovered_where_both_show(alpha: float, beta: float) -> None:
    half = alpha * beta  # the size at which half of the rate is reached
    found = fit(line(alpha, beta, [half / 8, half / 2, half, 2 * half, 8 * half]))
    assert found is not None
    assert found.alpha_s == pytest.approx(alpha, rel=1e-9)
    assert found.beta_bytes_per_s == pytest.approx(beta, rel=1e-9)


NOISY = st.lists(
    st.tuples(st.integers(0, 30).map(lambda power: 2.0**power), st.floats(1e-6, 1e-1)),
    min_size=3,
    max_size=15,
    unique_by=lambda point: point[0],
)


def squared_error(found: Fit, points: list[Point]) -> float:
    return math.fsum(((found.time_s(size) - time) / time) ** 2 for size, time in points)


@given(NOISY, st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_no_line_nearby_is_better(points: list[Point], up: float, steeper: float) -> None:
    found = fit(points)
    assert found is not None
    assert found.alpha_s >= 0
    beta = found.beta_bytes_per_s
    moved = Fit(
        alpha_s=found.alpha_s * up,
        beta_bytes_per_s=None if beta is None else beta * steeper,
        worst_rel=0.0,
        num_points=len(points),
    )
    least = squared_error(found, points)
    assert least <= squared_error(moved, points) * (1 + 1e-9) + 1e-12
    assert found.worst_rel**2 <= least * (1 + 1e-9) + 1e-12


# Powers of two scale without rounding, so that ties between cuts stay ties.
@given(NOISY, st.sampled_from([2**-10, 0.5, 1024.0]), st.sampled_from([2**-10, 2.0, 2**20]))
@settings(max_examples=60)
def test_units_do_not_matter(points: list[Point], of_size: float, of_time: float) -> None:
    plain = piecewise(points)
    scaled = piecewise([(size * of_size, time * of_time) for size, time in points])
    assert len(plain) == len(scaled)
    for one, other in zip(plain, scaled, strict=True):
        assert other.first_bytes == pytest.approx(one.first_bytes * of_size)
        assert other.fit.worst_rel == pytest.approx(one.fit.worst_rel, rel=1e-6, abs=1e-9)
        time_s = one.fit.time_s(one.last_bytes) * of_time
        assert other.fit.time_s(other.last_bytes) == pytest.approx(time_s, rel=1e-6)


@given(NOISY)
@settings(max_examples=60)
def test_segments_cover_every_size_once_and_in_order(points: list[Point]) -> None:
    segments = piecewise(points)
    sizes = sorted(size for size, _ in points)
    assert sum(segment.fit.num_points for segment in segments) == len(sizes)
    assert (segments[0].first_bytes, segments[-1].last_bytes) == (sizes[0], sizes[-1])
    assert all(segment.fit.num_points >= MIN_POINTS for segment in segments)
    for one, other in pairwise(segments):
        assert one.last_bytes < other.first_bytes


@given(st.integers(4, 8), st.integers(4, 8), st.floats(2.0, 10.0))
def test_two_regimes_are_cut_where_they_meet(low: int, high: int, jump: float) -> None:
    # As LL and Simple of NCCL: little latency and little bandwidth, then much of both.
    small = line(5e-6, 5e9, [2.0 ** (10 + i) for i in range(low)])
    large = line(5e-6 * (1 + jump) * 4, 2e11, [2.0 ** (10 + low + i) for i in range(high)])
    first, second = piecewise([*small, *large])
    assert first.last_bytes == small[-1][0]
    assert second.first_bytes == large[0][0]
    assert first.fit.alpha_s == pytest.approx(5e-6, rel=1e-6)
    assert second.fit.beta_bytes_per_s == pytest.approx(2e11, rel=1e-6)


def test_noise_within_the_stated_bound_is_not_cut() -> None:
    wiggle = [1 + GOOD_RMS * 0.9 * (-1) ** index for index in range(20)]
    points = line(1e-5, 1e11, [2.0 ** (8 + i) for i in range(20)])
    noisy = [(size, time * by) for (size, time), by in zip(points, wiggle, strict=True)]
    assert len(piecewise(noisy)) == 1


def test_repeated_sizes_stay_together() -> None:
    sizes = [2.0**i for i in range(8)]
    points = line(1e-5, 1e5, sizes) + line(1.1e-5, 1e5, sizes)
    assert sum(segment.fit.num_points for segment in piecewise(points)) == 16


def test_two_sizes_make_no_fit() -> None:
    assert fit([(1.0, 1.0), (2.0, 2.0), (2.0, 2.1)]) is None
    assert piecewise([(1.0, 1.0), (2.0, 2.0)]) == []


def test_a_time_that_does_not_grow_has_no_rate() -> None:
    found = fit([(1.0, 2e-6), (1024.0, 1.9e-6), (4096.0, 1.8e-6)])
    assert found is not None
    assert found.beta_bytes_per_s is None
    assert 1.8e-6 < found.alpha_s < 2e-6


@pytest.mark.parametrize("point", [(1.0, 0.0), (-1.0, 1.0), (1.0, math.nan)])
def test_what_cannot_be_a_time_is_refused(point: Point) -> None:
    with pytest.raises(ValueError, match="times above 0"):
        fit([point, (2.0, 1.0), (3.0, 1.0)])
