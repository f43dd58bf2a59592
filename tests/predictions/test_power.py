"""Power and clock: laws, and readings of an H200 at duties that the model was not fitted to."""

from dataclasses import replace
from math import exp, log
from typing import NamedTuple

import pytest

from stepmark.model.ops import Gemm, Phase
from stepmark.predictions.power import (
    Reading,
    clock_factors,
    fit,
    for_products,
    mean_power_w,
    measured_slowdown,
    slowdown_between,
    slowdown_of,
    with_sensitivities,
)
from stepmark.predictions.simulation import simulate
from stepmark.predictions.step import anchored_power, at_clock, fitted_power, host_factor, total
from stepmark.step.workload import ComputeOp, Stage, Workload
from stepmark.timeline.ledger import Work
from stepmark.timeline.step_cost import Costs, OpCost, PowerModel

# H200 at 700 W, torch 2.11: bf16 products of 8192^3, attention 4 x 4096 x 32 x 128, copies.
H200 = fit(
    Reading(
        full_clock_s=1.3845e-3,
        full_clock_hz=1.98e9,
        duty=0.491,
        part_w=550.5,
        sustained_s=1.6187e-3,
        sustained_w=700.0,
    ),
    Reading(
        full_clock_s=0.9153e-3,
        full_clock_hz=1.98e9,
        duty=0.4907,
        part_w=530.1,
        sustained_s=1.0402e-3,
        sustained_w=700.0,
    ),
    copy_w=605.2,
    idle_w=123.7,
    product_flops=2 * 8192**3,
)


@pytest.mark.parametrize(("duty", "watts"), [(0.2471, 336.1), (0.0995, 214.1)])
def test_power_at_other_duties(duty: float, watts: float) -> None:
    power_w = mean_power_w(H200, 0.0, {Work.MATMUL: duty}, 1.0)
    assert power_w == pytest.approx(watts, rel=0.05)


def test_a_sustained_product_is_at_the_limit_again() -> None:
    slowdown = slowdown_of(H200, {Work.MATMUL: 1.0}, 1.0, 0.0)
    assert exp(slowdown) == pytest.approx(1.6187 / 1.3845, rel=0.03)


@pytest.mark.parametrize(
    ("product_ms", "copy_ms", "measured_ms"),
    [(95.5, 50, 1.541), (93.1, 98, 1.501), (195.6, 100, 1.565)],
)
def test_products_between_copies_run_faster(
    product_ms: float, copy_ms: float, measured_ms: float
) -> None:
    """Phases of tens of ms alternate; the time is that of one product of 8192^3.

    In the longer ones a product takes more time at the end than at the beginning: the limit is
    kept over some 50 ms. The model has the mean of the step, and is up to 3.1 % off.
    """
    full_s = {Work.MATMUL: product_ms * 1.3845 / measured_ms * 1e-3}
    copy_w = (605.2 - 123.7) * copy_ms * 1e-3
    step_s = full_s[Work.MATMUL] + copy_ms * 1e-3
    # A copy draws what it does at any clock: the rest of the limit is the products'.
    for _ in range(20):
        share = copy_w / step_s
        limited = replace(H200, limit_w=H200.limit_w - share)
        slowdown = slowdown_of(limited, full_s, step_s, 0.0)
        step_s = full_s[Work.MATMUL] * exp(slowdown) + copy_ms * 1e-3
    assert 1.3845 * exp(slowdown) == pytest.approx(measured_ms, rel=0.032)


def test_sustained_attention_takes_its_time_again() -> None:
    slowdown = slowdown_of(H200, {Work.ATTENTION: 1.0}, 1.0, 0.0)
    factor = clock_factors(H200, slowdown)[Work.ATTENTION]
    assert factor == pytest.approx(1.0402 / 0.9153, rel=1e-6)


def test_work_that_memory_bounds_draws_what_its_bandwidth_needs() -> None:
    """A multi-tensor AdamW reaches 3.41 of the 4.26 TB/s of a copy."""
    copy_w = 605.2 - 123.7
    for work in (Work.ELEMENTWISE, Work.LOSS, Work.OPTIMIZER):
        assert H200.dynamic_w[work] == pytest.approx(copy_w * 3.41 / 4.26, rel=0.01)


def limited_by(sustained: float) -> PowerModel:
    """A device on which sustained work takes so many times as long."""
    reading = Reading(
        full_clock_s=1.0,
        full_clock_hz=1e9,
        duty=0.5,
        part_w=200.0,
        sustained_s=sustained,
        sustained_w=290.0,
    )
    return fit(reading, reading, copy_w=250.0, idle_w=100.0, product_flops=10**12)


@pytest.mark.parametrize(("sustained", "is_limited"), [(1.009, False), (1.011, True)])
def test_a_device_that_loses_a_percent_has_a_limit(sustained: float, is_limited: bool) -> None:
    device = limited_by(sustained)
    assert device.is_limited is is_limited
    assert (slowdown_of(device, {Work.MATMUL: 1.0}, 1.0, 0.0) > 0) is is_limited


def test_a_limit_far_below_what_a_step_draws_is_kept() -> None:
    """At a third of the clock, as attention follows it."""
    x = log(3)
    own = {Work.ATTENTION: 1.0}
    at_third = mean_power_w(H200, x, own, 3.0)
    slowdown = slowdown_of(replace(H200, limit_w=at_third), own, 1.0, 0.0)
    assert slowdown == pytest.approx(x, rel=1e-6)


def test_sensitivities_are_those_that_were_measured() -> None:
    """Exponents of the slowdown of attention, from no effect to a little more than its own."""
    truth = {Work.ATTENTION: 1.0, Work.MATMUL: 0.7, Work.LOSS: 1.1, Work.OPTIMIZER: 0.0}
    for slowdown, is_known in ((0.03, True), (0.021, True), (0.019, False)):
        limited_s = {work: exp(slowdown * share) for work, share in truth.items()}
        own = with_sensitivities(H200, dict.fromkeys(truth, 1.0), limited_s)
        expected = truth if is_known else H200.sensitivity
        for work in truth:
            assert own.sensitivity[work] == pytest.approx(expected[work])
        assert own.sensitivity[Work.ELEMENTWISE] == H200.sensitivity[Work.ELEMENTWISE]
    odd = {Work.ATTENTION: exp(0.1), Work.MATMUL: exp(0.2), Work.LOSS: exp(-0.1)}
    own = with_sensitivities(H200, dict.fromkeys(odd, 1.0), odd)
    assert own.sensitivity[Work.MATMUL] == 1.2
    assert own.sensitivity[Work.LOSS] == 0.0


def test_no_slowdown_below_the_limit() -> None:
    assert slowdown_of(H200, {Work.MATMUL: 0.3}, 1.0, 0.0) == 0.0
    assert slowdown_of(H200, {Work.OPTIMIZER: 1.0}, 1.0, 0.0) == 0.0


@pytest.mark.parametrize("share", [0.75, 0.9, 1.0])
def test_the_limit_is_kept(share: float) -> None:
    full_s = {Work.MATMUL: share, Work.ELEMENTWISE: 1 - share}
    slowdown = slowdown_of(H200, full_s, 1.0, 0.0)
    factors = clock_factors(H200, slowdown)
    step_s = sum(factors[work] * time_s for work, time_s in full_s.items())
    assert mean_power_w(H200, slowdown, full_s, step_s) == pytest.approx(H200.limit_w, rel=1e-6)
    assert 0 < slowdown < 0.3
    again = slowdown_of(H200, full_s, step_s, slowdown)
    assert again == pytest.approx(slowdown, abs=1e-9)


def test_more_products_are_slower_products() -> None:
    slow = [
        slowdown_of(H200, {Work.MATMUL: share, Work.ELEMENTWISE: 1 - share}, 1.0, 0.0)
        for share in (0.7, 0.8, 0.9, 1.0)
    ]
    assert slow == sorted(slow)


def test_products_of_a_higher_rate_draw_more() -> None:
    rate = H200.product_flops_per_s
    fast, slow = for_products(H200, 1.1 * rate), for_products(H200, 0.8 * rate)
    own = {Work.MATMUL: 1.0}
    slowdowns = [slowdown_of(each, own, 1.0, 0.0) for each in (slow, H200, fast)]
    assert slowdowns == sorted(slowdowns)
    assert slowdowns[0] < slowdowns[2]


def test_a_device_without_a_limit() -> None:
    reading = Reading(
        full_clock_s=1.0,
        full_clock_hz=1e9,
        duty=0.5,
        part_w=200.0,
        sustained_s=1.001,
        sustained_w=300.0,
    )
    free = fit(reading, reading, copy_w=250.0, idle_w=100.0, product_flops=10**12)
    assert not free.is_limited
    assert slowdown_of(free, {Work.MATMUL: 5.0}, 5.0, 0.0) == 0.0


def products(count: int) -> Workload:
    op = ComputeOp(op=Gemm(m=8192, n=8192, k=8192), phase=Phase.FWD, module="x")
    return Workload(name="w", rules="r", blocks={"s": (op,) * count}, stages=(Stage(step="s"),))


def product_costs(pause_s: float = 0.0) -> Costs:
    cost = OpCost(time_s={Work.MATMUL: 1.3845e-3})
    return Costs(compute=lambda _op: cost, comm=lambda _op, _group: 0.0, gap_s=pause_s)


def with_power(factor: float) -> PowerModel:
    return replace(H200, dynamic_w={w: factor * watts for w, watts in H200.dynamic_w.items()})


class Step(NamedTuple):
    step_s: float
    slowdown: float
    clock_hz: float
    power_w: float


def predict_step(workload: Workload, costs: Costs, power: PowerModel) -> Step:
    rate, full = total(workload.issued(), costs).product_flops_per_s, simulate(workload, costs)
    timeline, clock = at_clock(workload, costs, power, rate, full)
    return Step(timeline.step_s, *clock)


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.4])
def test_power_is_that_with_which_a_step_takes_its_time(factor: float) -> None:
    truth = with_power(factor)
    step = predict_step(products(9), product_costs(), truth)
    for slower in (1.0, 1.1):  # its clock is also lower than its time says
        clock_hz = step.clock_hz / slower
        found = fitted_power(H200, products(9), product_costs(), step.step_s, clock_hz, 700.0)
        for work, watts in truth.dynamic_w.items():
            assert found.dynamic_w[work] == pytest.approx(watts, 0.01)
        # With pauses it is less slow, and its clock is higher by as much.
        deep = predict_step(products(9), product_costs(2e-4), found)
        true = predict_step(products(9), product_costs(2e-4), truth)
        assert deep.step_s == pytest.approx(true.step_s, 1e-3)
        assert deep.clock_hz == pytest.approx(true.clock_hz / slower, 2e-3)


def test_a_step_that_is_slow_for_another_reason_has_the_power_of_its_clock() -> None:
    step = predict_step(products(9), product_costs(), H200)
    found = fitted_power(
        H200, products(9), product_costs(), 3 * step.step_s, step.clock_hz, 700.0
    )
    assert found.dynamic_w[Work.MATMUL] == pytest.approx(H200.dynamic_w[Work.MATMUL], 0.01)
    assert found.full_clock_hz == pytest.approx(H200.full_clock_hz, 1e-3)


def test_a_step_at_full_clock_has_its_energy() -> None:
    """Pauses, as in a step that the host bounds, change its power and not this energy."""
    truth = with_power(0.8)
    for pause_s in (1e-3, 5e-3):
        step = predict_step(products(9), product_costs(pause_s), truth)
        assert (step.slowdown, step.clock_hz) == (0.0, H200.full_clock_hz)
        found = fitted_power(
            H200, products(9), product_costs(), step.step_s, step.clock_hz, step.power_w
        )
        watts = truth.dynamic_w[Work.MATMUL]
        assert found.dynamic_w[Work.MATMUL] == pytest.approx(watts, 0.01)
        assert found.full_clock_hz == H200.full_clock_hz


def test_a_limited_step_reaches_the_limit() -> None:
    """Though it takes no longer than at full clock: its parts were not at full clock either."""
    workload, costs = products(9), product_costs()
    found = fitted_power(H200, workload, costs, 9 * 1.38e-3, 1.8e9, 700.0)
    step = predict_step(workload, costs, found)
    assert step.power_w == pytest.approx(H200.limit_w, 0.01)
    assert step.clock_hz == pytest.approx(1.8e9, 2e-3)
    assert predict_step(products(9), replace(costs, gap_s=2e-4), found).slowdown == 0.0


def test_a_step_that_communicates_has_its_clock_and_the_power_of_operators() -> None:
    workload, costs = products(9), product_costs()
    alone = predict_step(workload, costs, H200)
    for measured_hz in (0.8 * alone.clock_hz, alone.clock_hz):
        found = anchored_power(H200, workload, costs, measured_hz, alone.slowdown)
        step = predict_step(workload, costs, found)
        assert (step.step_s, step.power_w) == (alone.step_s, alone.power_w)
        assert step.clock_hz == pytest.approx(measured_hz)
    above = anchored_power(H200, workload, costs, 1.1 * alone.clock_hz, alone.slowdown)
    assert above.full_clock_hz == H200.full_clock_hz


def test_kernels_of_a_step_that_communicates_are_as_slow_as_they_were_measured() -> None:
    workload, costs = products(9), product_costs()
    full_s = simulate(workload, costs).busy_s
    for x in (0.0, 0.05, 0.3):
        limited_s = {w: exp(own * x) * full_s[w] for w, own in H200.sensitivity.items()}
        measured_x = slowdown_between(H200, full_s, limited_s)
        assert measured_x == pytest.approx(x, abs=1e-6)
        found = anchored_power(H200, workload, costs, 1.5e9, measured_x)
        rate = total(workload.issued(), costs).product_flops_per_s
        step, clock = at_clock(workload, costs, found, rate, simulate(workload, costs))
        assert clock.clock_hz == pytest.approx(1.5e9)
        assert sum(step.busy_s.values()) == pytest.approx(sum(limited_s.values()))
    assert measured_slowdown(found, 0.0) == 0.0, "at full clock"


@pytest.mark.parametrize("truth", [0.6, 1.0, 2.3])
def test_compute_on_a_host_takes_the_calibrated_time(truth: float) -> None:
    workload = products(9)

    def costs(factor: float) -> Costs:
        cost = OpCost(time_s={Work.MATMUL: factor * 1e-3})
        return Costs(
            compute=lambda _op: cost, comm=lambda _op, _group: 0.0, gap_s=factor * 1e-4
        )

    step_s = simulate(workload, costs(truth)).step_s
    assert host_factor(workload, costs(1.0), step_s) == pytest.approx(truth, rel=1e-3)
    # Of a step that takes much more than its operations, these are not the reason.
    assert host_factor(workload, costs(1.0), 4 * step_s / truth) == 1.0
