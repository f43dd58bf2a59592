"""Power and clock: laws, and readings of an H200 at duties that the model was not fitted to."""

from dataclasses import replace
from math import exp

import pytest

from stepmark.core.ledger import Work
from stepmark.core.ops import Gemm, Phase
from stepmark.core.step_cost import Costs, OpCost
from stepmark.core.workload import ComputeOp, Stage, Workload
from stepmark.predict.power import (
    Reading,
    clock_factors,
    fit,
    for_products,
    mean_power_w,
    slowdown_of,
)
from stepmark.predict.step import anchored, host_factor, predict_step

# H200 at 700 W, torch 2.11: bf16 products of 8192^3, attention 4 x 4096 x 32 x 128, copies.
H200 = fit(
    Reading(
        full_clock_s=1.3845e-3,
        full_clock_hz=1.98e9,
        duty=0.491,
        part_w=550.5,
        sustained_s=1.6187e-3,
        sustained_clock_hz=1.485e9,
        sustained_w=700.0,
    ),
    Reading(
        full_clock_s=0.9153e-3,
        full_clock_hz=1.98e9,
        duty=0.4907,
        part_w=530.1,
        sustained_s=1.0402e-3,
        sustained_clock_hz=1.71e9,
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
        sustained_clock_hz=1e9,
        sustained_w=300.0,
    )
    free = fit(reading, reading, copy_w=250.0, idle_w=100.0, product_flops=10**12)
    assert not free.is_limited
    assert slowdown_of(free, {Work.MATMUL: 5.0}, 5.0, 0.0) == 0.0


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.4])
def test_power_is_that_with_which_a_step_takes_its_time(factor: float) -> None:
    op = ComputeOp(op=Gemm(m=8192, n=8192, k=8192), phase=Phase.FWD, module="x")
    workload = Workload(name="w", rules="r", blocks={"s": (op,) * 9}, stages=(Stage(step="s"),))

    def costs(host_s: float) -> Costs:
        cost = OpCost(time_s={Work.MATMUL: 1.3845e-3}, host_s=host_s)
        return Costs(compute=lambda _op: cost, comm=lambda _op, _group: 0.0)

    truth = replace(
        H200,
        dynamic_w={
            work: watts * (factor if work in (Work.MATMUL, Work.ATTENTION) else 1)
            for work, watts in H200.dynamic_w.items()
        },
    )
    step_s = predict_step(workload, costs(0.0), truth).step_s
    found = anchored(H200, workload, costs(0.0), step_s)
    assert found.dynamic_w[Work.MATMUL] == pytest.approx(truth.dynamic_w[Work.MATMUL], 0.01)
    # The host's time, or another reason, says nothing of power.
    assert anchored(H200, workload, costs(3e-3), 27e-3) == H200
    assert anchored(H200, workload, costs(0.0), 3 * step_s) == H200


@pytest.mark.parametrize("truth", [0.6, 1.0, 2.3])
def test_compute_on_a_host_takes_the_calibrated_time(truth: float) -> None:
    op = ComputeOp(op=Gemm(m=64, n=64, k=64), phase=Phase.FWD, module="x")
    workload = Workload(name="w", rules="r", blocks={"s": (op,) * 9}, stages=(Stage(step="s"),))

    def costs(factor: float) -> Costs:
        cost = OpCost(time_s={Work.MATMUL: factor * 1e-3})
        return Costs(
            compute=lambda _op: cost, comm=lambda _op, _group: 0.0, gap_s=factor * 1e-4
        )

    step_s = predict_step(workload, costs(truth)).step_s
    assert host_factor(workload, costs(1.0), step_s) == pytest.approx(truth, rel=1e-3)
    # Of a step that takes much more than its operations, these are not the reason.
    assert host_factor(workload, costs(1.0), 4 * step_s / truth) == 1.0
