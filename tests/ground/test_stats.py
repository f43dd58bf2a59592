"""Order statistics: against numpy, and by their coverage."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.stats import median_interval, quantile, slowest_per_sample, summarize

times = st.floats(1e-9, 1e4, allow_nan=False)
samples = st.lists(times, min_size=1, max_size=300)


@given(samples, st.floats(0, 1))
def test_quantile_is_numpys(values: list[float], q: float) -> None:
    assert quantile(sorted(values), q) == pytest.approx(np.quantile(values, q), rel=1e-9)


@given(samples)
def test_a_summary_orders_itself_and_drops_nothing(values: list[float]) -> None:
    found = summarize(values)
    assert found.n == len(values)
    assert found.min == min(values)
    assert found.max == max(values)
    assert found.min <= found.p10 <= found.median <= found.p90 <= found.max
    assert found.median == pytest.approx(np.median(values))
    assert found.ci_rel >= 0


@given(samples, st.randoms())
def test_order_does_not_matter(values: list[float], rng: random.Random) -> None:
    shuffled = values.copy()
    rng.shuffle(shuffled)
    assert summarize(shuffled) == summarize(values)


@given(samples)
def test_one_outlier_moves_the_maximum(values: list[float]) -> None:
    found = summarize([*values, 1e6])
    assert found.max == 1e6
    assert found.n == len(values) + 1


@given(st.lists(times, min_size=1, max_size=100), st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaling_time_scales_the_summary(values: list[float], factor: float) -> None:
    one, other = summarize(values), summarize([value * factor for value in values])
    assert other.median == pytest.approx(factor * one.median)
    assert other.ci_rel == pytest.approx(one.ci_rel, abs=1e-12)


def test_equal_samples_are_certain() -> None:
    assert summarize([3.0] * 10).ci_rel == 0


@pytest.mark.parametrize("n", [6, 7, 10, 25, 100, 401])
def test_the_interval_covers_the_median(n: int) -> None:
    """At least 95 % of intervals hold the true median, of a skewed law (exponential)."""
    rng = np.random.default_rng(n)
    trials, true = 2000, np.log(2)
    hits = 0
    for _ in range(trials):
        low, high = median_interval(sorted(rng.exponential(size=n).tolist()))
        hits += low <= true <= high
    # 95 %, less three standard deviations of a proportion of 2,000.
    assert hits / trials >= 0.95 - 3 * (0.05 * 0.95 / trials) ** 0.5


@pytest.mark.parametrize("n", [*range(1, 40), 100, 401])
def test_the_interval_of_the_mirrored_samples_is_mirrored(n: int) -> None:
    values = [float(i) ** 2 for i in range(n)]
    low, high = median_interval(values)
    assert median_interval([-value for value in reversed(values)]) == (-high, -low)


@pytest.mark.parametrize("n", [50, 400])
def test_the_interval_narrows_with_more_samples(n: int) -> None:
    rng = np.random.default_rng(1)
    widths = []
    for size in (n, 4 * n):
        found = [summarize(rng.normal(1, 0.01, size).tolist()).ci_rel for _ in range(50)]
        widths.append(np.mean(found))
    assert widths[1] < 0.65 * widths[0]


@pytest.mark.parametrize("n", range(1, 6))
def test_few_samples_give_their_whole_range(n: int) -> None:
    values = [float(i + 1) for i in range(n)]
    assert median_interval(values) == (values[0], values[-1])


@pytest.mark.parametrize("bad", [[], [float("nan")], [1.0, float("inf")], [-float("inf")]])
def test_no_summary_of_nothing_or_of_nan(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one sample, all finite"):
        summarize(bad)


def test_zero_has_no_relative_width() -> None:
    assert summarize([0.0, 0.0]).ci_rel == float("inf")


@given(st.lists(st.lists(times, min_size=5, max_size=5), min_size=1, max_size=4))
def test_the_slowest_rank_of_each_sample(seconds: list[list[float]]) -> None:
    assert slowest_per_sample(seconds) == np.max(np.array(seconds), axis=0).tolist()


def test_ranks_have_as_many_samples() -> None:
    with pytest.raises(ValueError, match="shorter"):
        slowest_per_sample([[1.0, 2.0], [1.0]])
