"""When a case is measured enough: budgets, and what counts as a sample."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmark.cases.case import Rate
from stepmark.measuring.clock import HALF_S, MAX_SAMPLES, Effort, is_enough, is_flat


@given(usable_s=st.floats(0.1, 1e4), sample_s=st.floats(0.1, 1e3), soak_s=st.floats(0, 1e3))
def test_a_shortened_effort_fits_its_share(
    usable_s: float, sample_s: float, soak_s: float
) -> None:
    effort = Effort(sample_s=sample_s, soak_s=soak_s, min_batches=7, target_ci_rel=0.1)
    short = effort.shortened(usable_s)
    assert short.soak_s + short.sample_s <= usable_s * (1 + 1e-9)
    assert short.soak_s <= soak_s
    assert short.sample_s <= sample_s
    assert (short.min_batches, short.target_ci_rel) == (7, 0.1)


@pytest.mark.parametrize("rate", Rate)
def test_time_and_number_end_what_never_settles(rate: Rate) -> None:
    effort = Effort(sample_s=3.0, min_batches=10, target_ci_rel=0.0)
    uneven = [[1.0, 2.0]] * 20
    assert not is_enough(uneven, 2.9, effort, rate)
    assert is_enough(uneven, 3.0 + {"burst": 4, "half": 1}.get(rate, 0), effort, rate)
    assert is_enough([[1.0, 2.0] * (MAX_SAMPLES // 2)], 0.0, effort, rate)


def test_batches_are_the_unit_of_what_is_sustained() -> None:
    """Samples that are alike within each batch say nothing of how batches differ."""
    effort = Effort(min_batches=10, target_ci_rel=0.01)
    steady = [[1.0] * 50] * 10
    assert is_enough(steady, 0.1, effort)
    for drift in (
        0.1,
        0.005,
    ):  # 500 samples by themselves would tell the smaller one within 1 %
        drifting = [[1.0 + drift * batch] * 50 for batch in range(10)]
        assert not is_enough(drifting, 0.1, effort)


def test_a_device_that_swings_is_sampled_for_a_whole_swing() -> None:
    """Half a swing may be 2 % off."""
    effort = Effort(min_batches=10, target_ci_rel=0.01)
    swing = [[1.0 + 0.005 * math.sin(2 * math.pi * batch / 10)] * 50 for batch in range(10)]
    assert not is_enough(swing[:9], 0.1, effort)
    assert is_enough(swing, 0.1, effort)


def test_five_batches_within_half_of_the_precision_are_flat() -> None:
    effort = Effort(target_ci_rel=0.01)
    flat = [[1.0 + 0.0012 * batch] * 50 for batch in range(6)]
    assert not is_flat(flat[:4], effort)
    assert is_flat(flat[:5], effort)
    assert not is_flat(flat, effort)


def test_half_load_lasts_long_enough_for_its_power() -> None:
    steady = [[1.0] * 7] * 50
    assert not is_enough(steady, HALF_S - 0.1, Effort(), Rate.HALF)
    assert is_enough(steady, HALF_S, Effort(), Rate.HALF)
    of_budget = Effort().shortened(1.0)
    assert is_enough(steady, 1.0, of_budget, Rate.HALF)
