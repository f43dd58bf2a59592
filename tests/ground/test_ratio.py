"""A single row: laws of the ratio, Student's t against printed tables, how often it errs."""

import math
import random
from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.ground.launches import Row, Sample
from stepmark.ground.ratio import Ratio, Verdict, holm, t_cdf, t_quantile
from stepmark.ground.verdicts import FALSE_SHARE, judge

# Table of t for 99.5 %, as printed in textbooks (e.g. NIST/SEMATECH e-Handbook, 1.3.6.7.2).
PRINTED = {1: 63.657, 2: 9.925, 3: 5.841, 5: 4.032, 8: 3.355, 14: 2.977, 30: 2.75, 100: 2.626}

# Launches that differ: of values that are all alike nothing is concluded.
times = st.lists(st.floats(0.5, 2), min_size=2, max_size=12).filter(lambda t: len(set(t)) > 1)


def ratio(a: Sequence[float], b: Sequence[float], noise: float | None = None) -> Ratio:
    base, other = (
        Sample(logs={f"{side}/{n}": math.log(time) for n, time in enumerate(times)})
        for side, times in (("a", a), ("b", b))
    )
    return judge([Row(kind="", base=base, other=other, noise=noise)])[0]


@pytest.mark.parametrize(("df", "printed"), PRINTED.items())
def test_quantiles_are_those_of_printed_tables(df: int, printed: float) -> None:
    assert t_quantile(0.995, df) == pytest.approx(printed, abs=6e-4)


@given(st.floats(-50, 50), st.integers(1, 1500))
def test_t_is_a_symmetric_distribution(t: float, df: int) -> None:
    assert t_cdf(t, df) + t_cdf(-t, df) == pytest.approx(1)
    assert t_cdf(t, df) <= t_cdf(t + 1, df) + 1e-12


def test_many_degrees_of_freedom_are_normal() -> None:
    assert t_quantile(0.995, 999) == pytest.approx(t_quantile(0.995, None), abs=5e-3)


@given(times, times)
def test_swapping_sides_inverts_the_ratio(a: list[float], b: list[float]) -> None:
    there, back = ratio(a, b), ratio(b, a)
    assert there.speed == pytest.approx(1 / back.speed)
    assert there.low is not None
    assert back.high is not None
    assert math.log(there.low) == pytest.approx(-math.log(back.high), abs=1e-6)
    opposite = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    assert back.verdict is opposite.get(there.verdict, there.verdict)


@given(times, times, st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(a: list[float], b: list[float], k: float) -> None:
    plain, scaled = ratio(a, b), ratio([k * t for t in a], [k * t for t in b])
    assert plain.speed == pytest.approx(scaled.speed)
    assert plain.verdict is scaled.verdict or abs(plain.speed - 1) < 0.02


@given(times)
def test_a_side_is_as_fast_as_itself(a: list[float]) -> None:
    found = ratio(a, a)
    assert found.speed == pytest.approx(1)
    assert found.verdict in (Verdict.SAME, Verdict.CANNOT_TELL)


@given(times, times)
def test_a_verdict_never_contradicts_its_interval(a: list[float], b: list[float]) -> None:
    found = ratio(a, b)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.speed * (1 + 1e-9)
    assert found.speed <= found.high * (1 + 1e-9)
    if found.verdict is Verdict.FASTER:
        assert found.low > 1
    if found.verdict is Verdict.SLOWER:
        assert found.high < 1


def test_launches_that_differ_wildly_give_a_wide_interval_and_no_error() -> None:
    found = ratio([1e-7, 1e3], [1.0, 1.0])
    assert found.verdict is Verdict.CANNOT_TELL
    assert found.high is not None
    assert found.high > 1e100


def test_values_that_were_rounded_alike_prove_nothing() -> None:
    assert ratio([10.1, 10.1], [9.9, 9.9]).reason == "identical values"


def test_one_launch_gives_a_ratio_and_no_verdict() -> None:
    found = ratio([1.0], [0.5])
    assert (found.speed, found.verdict, found.reason) == (
        2.0,
        Verdict.CANNOT_TELL,
        "one launch",
    )
    assert found.p_slower(0.05) is None


def test_a_stated_noise_counts_for_a_launch_and_itself() -> None:
    """A file compared with itself has the interval of a comparison with its copy."""
    own = Sample(logs={"a": 0.0})
    copy = Sample(logs={"b": 0.0})
    found = [
        judge([Row(kind="", base=own, other=other, noise=0.01)])[0] for other in (own, copy)
    ]
    assert (found[0].low, found[0].high) == (found[1].low, found[1].high)
    assert found[0].high == pytest.approx(math.exp(0.01 * math.sqrt(2) * 2.5758), rel=1e-3)


def test_a_stated_noise_gives_the_normal_interval() -> None:
    found = ratio([1.0], [1.0], noise=0.02)
    assert found.high == pytest.approx(math.exp(2.5758 * 0.02 * math.sqrt(2)), rel=1e-4)


def test_a_certain_but_tiny_difference_is_the_same() -> None:
    assert ratio([1.0, 1.0001], [0.996, 0.9961]).verdict in (Verdict.SAME, Verdict.CANNOT_TELL)
    many = [1.0 + 1e-6 * i for i in range(40)]
    assert ratio(many, [0.996 * t for t in many]).verdict is Verdict.SAME


@pytest.mark.parametrize(
    ("change", "verdict"),
    [(0.0101, Verdict.FASTER), (0.0099, Verdict.SAME), (0.0051, Verdict.SAME)],
)
def test_a_change_below_one_percent_is_no_change(change: float, verdict: Verdict) -> None:
    """However certain; the noise is 1 in 1,000,000."""
    assert ratio([1 + change], [1.0], noise=1e-6).verdict is verdict


def test_p_of_slower_falls_as_it_gets_slower() -> None:
    base = [1.0, 1.01, 0.99, 1.0]
    ps = [ratio(base, [k * t for t in base]).p_slower(0.05) for k in (0.9, 1.05, 1.1, 1.3)]
    assert ps == sorted(ps, reverse=True)  # type: ignore[type-var]
    assert ps[1] == pytest.approx(0.5)


def test_holm_by_hand() -> None:
    # 0.01 <= 0.05/4, 0.013 <= 0.05/3, 0.04 > 0.05/2: the rest stands, 0.045 too.
    assert holm([0.04, 0.01, 0.045, 0.013], 0.05) == [False, True, False, True]
    assert holm([], 0.05) == []


@given(st.lists(st.floats(0, 1), max_size=20))
def test_holm_lies_between_bonferroni_and_none(ps: list[float]) -> None:
    fallen = holm(ps, 0.05)
    for p, one in zip(ps, fallen, strict=True):
        assert one >= (p <= 0.05 / len(ps))
        assert one <= (p <= 0.05)


PAIRS = 500


def _share(launches: int, sd: float, samples: int, speed: float, seed: int) -> float:
    """Return the share of pairs called faster or slower. cv of samples is 2 %."""
    draw = random.Random(seed)

    def centre(factor: float) -> float:
        own = factor * math.exp(draw.gauss(0, sd))
        return own * median(math.exp(draw.gauss(0, 0.02)) for _ in range(samples))

    called = 0
    for _ in range(PAIRS):
        a = [centre(1.0) for _ in range(launches)]
        b = [centre(1 / speed) for _ in range(launches)]
        called += ratio(a, b).verdict in (Verdict.FASTER, Verdict.SLOWER)
    return called / PAIRS


def _three_errors(share: float) -> float:
    """Return three standard errors of a share that is observed in PAIRS draws (binomial)."""
    return 3 * math.sqrt(share * (1 - share) / PAIRS)


@pytest.mark.parametrize(
    ("launches", "sd", "samples"), [(30, 0.0, 1), (10, 0.01, 30)], ids=["iid", "launches"]
)
def test_same_is_almost_never_called_different_and_3_percent_is(
    launches: int, sd: float, samples: int
) -> None:
    """validation/verdicts.py counts with thousands of tables."""
    single = FALSE_SHARE / 2  # what a row by itself may err
    assert _share(launches, sd, samples, 1.0, seed=1) <= single + _three_errors(single)
    assert _share(launches, sd, samples, 1.03, seed=2) >= 0.95 - _three_errors(0.95)
