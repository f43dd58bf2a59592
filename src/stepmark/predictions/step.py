"""Prediction of a step: its timeline, in a fixed point with power and clock."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from stepmark.predictions.power import clock_factors, for_products, mean_power_w, slowdown_of
from stepmark.predictions.timeline import simulate
from stepmark.step.workload import ComputeOp, Workload
from stepmark.timeline.ledger import Work, work_of_op
from stepmark.timeline.prediction import StepPrediction, Timeline
from stepmark.timeline.step_cost import Costs, OpCost, PowerModel, Source

_MOST_ROUNDS = 8
_CLOSE = 1e-4  # of slowdown
_BISECTIONS = 12
_MAX_POWER, _MAX_TIME = 4.0, 3.0  # factors of the power and of the time of compute
_FULL_CLOCK = 0.98  # share of the highest clock: a device at it is below its power limit
_Totals = tuple[dict[Source, float], float | None]  # seconds of compute, FLOP/s of products


def predict_step(
    workload: Workload, costs: Costs, power: PowerModel | None = None
) -> StepPrediction:
    """Return the prediction of one step of the workload. Raises ConfigError."""
    totals, timeline = _totals(workload, costs), simulate(workload, costs)
    if power is None:
        return StepPrediction(timeline=timeline, sources=totals[0])
    return _limited(workload, costs, power, totals, timeline)


def _limited(
    workload: Workload, costs: Costs, power: PowerModel, totals: _Totals, timeline: Timeline
) -> StepPrediction:
    """Return the prediction of a step of these totals and of this timeline at full clock."""
    (sources, product_rate), slowdown, full_s = totals, 0.0, timeline.busy_s
    power = for_products(power, product_rate)
    for _ in range(_MOST_ROUNDS):
        new = slowdown_of(power, full_s, timeline.step_s, slowdown)
        is_close = abs(new - slowdown) < _CLOSE
        slowdown = new
        if is_close:
            break
        timeline = simulate(workload, costs, clock_factors(power, slowdown))
    return StepPrediction(
        timeline=timeline,
        slowdown=slowdown,
        clock_hz=power.full_clock_hz * math.exp(-slowdown),
        power_w=mean_power_w(power, slowdown, full_s, timeline.step_s),
        sources=sources,
    )


def anchored_power(
    power: PowerModel, workload: Workload, costs: Costs, clock_hz: float
) -> PowerModel:
    """Return the power model with the full clock from which a measured step has clock_hz.

    It is at most that of the operators. A step that communicates also waits for other ranks, so
    its time tells less of the power of its work than operators do. costs: as for fitted_power.
    """
    slowdown = predict_step(workload, costs, power).slowdown
    full_clock_hz = min(power.full_clock_hz, clock_hz * math.exp(slowdown))
    return replace(power, full_clock_hz=full_clock_hz)


def fitted_power(
    power: PowerModel,
    workload: Workload,
    costs: Costs,
    step_s: float,
    clock_hz: float,
    power_w: float,
) -> PowerModel:
    """Return the power model fitted to a measured step.

    step_s, clock_hz, power_w: its means. costs: at full clock, without the host's time.

    Power depends on the operands, which only the step has. One factor, from a quarter to four,
    multiplies the power of all work. At full clock the factor reproduces the step's energy
    above idle; below full clock it reproduces the step's time, unless the slowdown then exceeds
    that of the clock, because a step also takes longer for other reasons. The model's full
    clock is the one from which this slowdown leads to clock_hz: it is below the highest where
    the kernels of a long step were not at full clock even after a pause.
    """
    if not power.is_limited:
        return power
    costs = replace(costs, compute=cache(costs.compute))
    totals, full = _totals(workload, costs), simulate(workload, costs)
    if clock_hz >= _FULL_CLOCK * power.full_clock_hz:
        own_w = mean_power_w(for_products(power, totals[1]), 0.0, full.busy_s, full.step_s)
        measured_j = (power_w - power.static_w) * step_s
        factor = measured_j / ((own_w - power.static_w) * full.step_s)
        return _multiplied(power, min(_MAX_POWER, max(1 / _MAX_POWER, factor)))
    max_slowdown = math.log(power.full_clock_hz / clock_hz)

    def predicted_with(factor: float) -> StepPrediction:
        return _limited(workload, costs, _multiplied(power, factor), totals, full)

    def is_too_low(factor: float) -> bool:
        step = predicted_with(factor)
        is_slow = step.step_s >= step_s or step.slowdown >= max_slowdown
        return not (step.slowdown and is_slow)

    factor = _least_factor(is_too_low, _MAX_POWER)
    full_clock_hz = clock_hz * math.exp(predicted_with(factor).slowdown)
    return replace(_multiplied(power, factor), full_clock_hz=full_clock_hz)


def host_factor(workload: Workload, costs: Costs, step_s: float) -> float:
    """Return by what compute on a host is multiplied for the calibrated step to take this time.

    Ranks and communication share its cores, which a profile of one rank does not show. It is 1
    where no factor from a third to 3 gives the time: then something else does.
    """
    costs = replace(costs, compute=cache(costs.compute))

    def predicted_s(factor: float) -> float:
        own = replace(costs, gap_s=factor * costs.gap_s)
        return simulate(workload, own, dict.fromkeys(Work, factor)).step_s

    if not predicted_s(1 / _MAX_TIME) < step_s < predicted_s(_MAX_TIME):
        return 1.0
    return _least_factor(lambda factor: predicted_s(factor) < step_s, _MAX_TIME)


def _least_factor(is_too_low: Callable[[float], bool], limit: float) -> float:
    """Return the least factor, from 1 / limit to limit, that is not too low."""
    low, high = 1 / limit, limit
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return math.sqrt(low * high)


def _multiplied(power: PowerModel, factor: float) -> PowerModel:
    return replace(power, dynamic_w={w: factor * x for w, x in power.dynamic_w.items()})


def _totals(workload: Workload, costs: Costs) -> _Totals:
    """Return seconds of compute by origin, and the rate of products, over all stages."""
    sources: dict[Source, float] = {}
    flops = product_s = 0.0
    for stage in range(len(workload.stages)):
        for op, count in workload.tally(stage).items():
            if not isinstance(op, ComputeOp):
                continue
            cost: OpCost = costs.compute(op)
            product_s += count * cost.time_s.get(Work.MATMUL, 0.0)
            sources[cost.source] = sources.get(cost.source, 0.0) + count * cost.total_s
            if work_of_op(op) is Work.MATMUL:
                flops += count * (op.op.flops or 0)
    return sources, flops / product_s if product_s else None
