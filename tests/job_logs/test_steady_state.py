"""Laws of the steady state: what is put into a log is what it shows."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.job_logs import example_log

from stepmark.findings.finding import Severity
from stepmark.job_logs.training_log.steady_state import SteadyState, steady_state
from stepmark.job_logs.training_log.step_lines import LoggedStep
from stepmark.job_logs.training_log.training_log import SAMPLES, SECONDS, LogFacts, TrainingLog
from stepmark.job_logs.training_log.training_log_text import (
    findings,
    headline,
    part_rows,
    summary_row,
)


def log_of(costs: list[float], losses: list[float] | None = None, span: int = 1) -> TrainingLog:
    values = losses or [1.0] * len(costs)
    steps = tuple(
        LoggedStep(number=place * span, line=place, step_s=cost, loss=loss, span=span)
        for place, (cost, loss) in enumerate(zip(costs, values, strict=True), 1)
    )
    return TrainingLog(
        file="job.log",
        trainer="Megatron-LM",
        facts=LogFacts(),
        steps=steps,
        bad_losses=tuple(own for own in steps if own.is_nan),
        unit=SECONDS,
        time_from="as printed",
    )


def noisy(random: Random, count: int, step_s: float = 8.0, noise: float = 0.004) -> list[float]:
    return [step_s * (1 + random.gauss(0, noise)) for _ in range(count)]


def steady(costs: list[float], span: int = 1) -> SteadyState:
    return steady_state(log_of(costs, span=span))


@given(seed=st.integers(0, 2**32), warmup=st.integers(1, 30))
def test_warm_up_is_left_out(seed: int, warmup: int) -> None:
    random = Random(seed)
    slow = [8.0 * (1 + 2.0 * 0.8**place) for place in range(warmup)]
    state = steady(slow + noisy(random, 200))
    assert state.is_steady
    num_slow = sum(cost > 1.05 * 8.0 for cost in slow)
    assert num_slow <= state.num_warmup
    assert state.median == pytest.approx(8.0, rel=0.002)


@given(seed=st.integers(0, 2**32), places=st.sets(st.integers(20, 190), min_size=1, max_size=9))
def test_outliers_are_those_that_were_put_in_and_cost_their_time(
    seed: int, places: set[int]
) -> None:
    costs = noisy(Random(seed), 200)
    for place in places:
        costs[place] = 24.0
    state = steady(costs)
    own = {place for place in places if place >= state.num_warmup}
    assert set(state.outliers) == own
    lost = sum(costs[place] - state.median for place in own)
    assert state.outlier_share == pytest.approx(lost / sum(costs[state.num_warmup :]))


@pytest.mark.parametrize("change", [0.02, -0.02])
def test_a_trend_is_its_change_over_a_thousand_steps(change: float) -> None:
    costs = noisy(Random(1), 300, noise=0.001)
    costs = [cost * (1 + change * place * 10 / 1000) for place, cost in enumerate(costs)]
    state = steady(costs, span=10)
    assert state.trend == pytest.approx(change, rel=0.1)


@pytest.mark.parametrize("unit", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("count", [8, 10, 20, 100])
def test_noise_is_steady(count: int, unit: float) -> None:
    """unit: to which times are rounded; MSER alone calls a third of 10 lines unsteady."""
    unsteady = 0
    for seed in range(100):
        costs = [12.0, 9.0, *noisy(Random(seed), count)]
        rounded = [round(cost / unit) * unit for cost in costs] if unit else costs
        state = steady(rounded)
        unsteady += not state.is_steady
        assert state.num_warmup >= 2 or not state.is_steady
        assert state.median == pytest.approx(8.0, rel=0.01)
    assert unsteady <= 5


def test_noise_is_no_trend() -> None:
    trends = [steady(noisy(Random(seed), 100)).trend for seed in range(60)]
    assert sum(trend is not None for trend in trends) <= 3


def test_the_interval_has_the_median_of_steps_that_follow_each_other() -> None:
    """Neighbours with a correlation of 0.8 say a ninth as much as independent ones."""
    num_right = 0
    widths = []
    for seed in range(100):
        random = Random(seed)
        state = 0.0
        costs = []
        for _ in range(300):
            state = 0.8 * state + random.gauss(0, 0.01)
            costs.append(8.0 * (1 + state))
        own = steady(costs)
        num_right += own.low <= 8.0 <= own.high
        widths.append(own.high - own.low)
    assert num_right >= 85
    independent = steady(noisy(Random(1), 300, noise=0.01 / 0.6))
    assert sorted(widths)[50] > 2 * (independent.high - independent.low)


def test_what_never_becomes_steady_is_told() -> None:
    state = steady([8.0 + 0.1 * place for place in range(100)])
    assert not state.is_steady
    assert state.num_warmup == 50
    assert state.trend is not None


def test_few_lines_have_a_median_alone() -> None:
    assert steady([9.0, 8.0, 8.1]).median == pytest.approx(8.05)
    assert steady([9.0]).median == 9.0
    for count in range(1, 7):
        own = steady(noisy(Random(count), count))
        assert own.low is own.high is None
        assert "fewer than 8 lines" in own.doubt


def test_figures_that_are_rounded_alike_have_an_interval() -> None:
    log = log_of([8.0] * 40)
    steps = tuple(replace(own, rounding=0.02) for own in log.steps)
    own = steady_state(replace(log, steps=steps))
    assert (own.low, own.high) == pytest.approx((7.92, 8.08))


@given(seed=st.integers(0, 2**32), num_slow=st.integers(30, 70))
def test_two_speeds_are_no_outliers(seed: int, num_slow: int) -> None:
    random = Random(seed)
    costs = noisy(random, 100 - num_slow, 2.0) + noisy(random, num_slow, 3.0)
    random.shuffle(costs)
    own = steady([2.0, *costs])
    assert own.outliers == ()
    assert [cost for _, cost in own.speeds] == pytest.approx([2.0, 3.0], rel=0.01)
    assert own.doubt


@given(seed=st.integers(0, 2**32), count=st.integers(8, 200))
def test_noise_has_one_speed(seed: int, count: int) -> None:
    assert steady(noisy(Random(seed), count)).speeds == ()


def test_a_coarse_clock_has_one_speed() -> None:
    log = log_of([2.0, 2.04] * 20)
    steps = tuple(replace(own, rounding=0.04) for own in log.steps)
    assert steady_state(replace(log, steps=steps)).speeds == ()


def test_quartiles_of_a_rate_have_the_lower_first() -> None:
    steps = tuple(
        LoggedStep(number=place, line=place, samples_per_s=100.0 + place % 7)
        for place in range(1, 50)
    )
    log = replace(log_of([1.0]), steps=steps, unit=SAMPLES)
    row = summary_row(log, steady_state(log))
    assert row["low"] < row["median"] < row["high"]
    assert row["quartile_1"] < row["median"] < row["quartile_3"]
    text = headline(log, steady_state(log))
    assert "quartiles 101 samples/s to 105 samples/s" in text


def test_shares_of_the_time_are_all_of_it() -> None:
    costs = [30.0, *noisy(Random(3), 60), 24.0, *noisy(Random(4), 40)]
    log = log_of(costs)
    rows = part_rows(log, steady_state(log))
    assert sum(float(str(row["share_pct"])) for row in rows) == pytest.approx(100)
    assert sum(int(str(row["steps"])) for row in rows) == len(costs)


@pytest.mark.parametrize(
    ("losses", "severity"),
    [
        ([3.0, float("nan"), 3.0, 3.0], Severity.WARNING),
        ([3.0, 3.0, float("nan"), float("nan")], Severity.PROBLEM),
    ],
)
def test_a_loss_that_is_no_number_is_a_finding(losses: list[float], severity: Severity) -> None:
    (finding,) = findings(log_of([8.0] * 4, losses))
    assert finding.rule == "loss-nan"
    assert finding.severity is severity
    assert finding.count == sum(map(math.isnan, losses))


@given(
    seed=st.integers(0, 2**32),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
def test_steps_of_an_earlier_batch_are_not_steady(seed: int, counts: list[int]) -> None:
    random = Random(seed)
    log = log_of(
        [0.5 * (place + 1) for place, count in enumerate(counts) for _ in range(count)]
    )
    batches = [32.0 * (place + 1) for place, count in enumerate(counts) for _ in range(count)]
    steps = tuple(
        replace(own, batch=batch, step_s=(own.step_s or 0) * random.gauss(1, 0.001))
        for own, batch in zip(log.steps, batches, strict=True)
    )
    state = steady_state(replace(log, steps=steps))
    assert state.num_others == sum(counts[:-1])
    assert state.num_warmup >= state.num_others
    assert state.num_warmup + state.num_lines == sum(counts)
    assert state.median == pytest.approx(0.5 * len(counts), rel=0.01)
    assert bool(state.doubt) == (counts[-1] < 8) or not state.is_steady


@pytest.mark.parametrize("name", example_log.LAUNCHES)
def test_the_example_is_the_published_run(name: str) -> None:
    assert (example_log.LOGS / name).read_text() == example_log.text(name)
    own = example_log.record(name)
    assert own.training
    # What stepmark train left out of these steps by itself.
    num_warmup = steady_state(log_of(example_log.steps_s(own))).num_warmup
    assert num_warmup == len(own.training.warmup_s[0])
