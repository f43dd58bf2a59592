"""Prediction of a step: its timeline, in a fixed point with power and clock."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from stepmark.model.ops import HostCopy, Phase
from stepmark.predictions.power import (
    clock_factors,
    for_products,
    mean_power_w,
    measured_slowdown,
    slowdown_of,
)
from stepmark.predictions.simulation import SteadyStep, simulate
from stepmark.step.workload import (
    COMPUTE,
    CommOp,
    ComputeOp,
    Group,
    Kernel,
    Operation,
    Workload,
)
from stepmark.timeline.ledger import Work, work_of_op
from stepmark.timeline.step_cost import Costs, OpCost, PowerModel, Source

_MOST_ROUNDS = 8
_CLOSE = 1e-4  # of slowdown
_BISECTIONS = 12
# factors of the power and of the time of compute
_MAX_POWER = 4.0
_MAX_TIME = 3.0
_FULL_CLOCK = 0.98  # share of the highest clock: a device at it is below its power limit


class Clock(NamedTuple):
    """Means over a step of one device. slowdown: of attention, as log; 0 at full clock."""

    slowdown: float
    clock_hz: float
    power_w: float


def at_clock(
    workload: Workload,
    costs: Costs,
    power: PowerModel,
    product_flops_per_s: float | None,
    step: SteadyStep,
) -> tuple[SteadyStep, Clock]:
    """Return the step that is this one at full clock, as its power lets it run.

    product_flops_per_s: rate of its products at full clock. Raises ConfigError.
    """
    slowdown = 0.0
    full_s = step.busy_s
    power = for_products(power, product_flops_per_s)
    for _ in range(_MOST_ROUNDS):
        new = slowdown_of(power, full_s, step.step_s, slowdown, step.comm_s)
        is_close = abs(new - slowdown) < _CLOSE
        slowdown = new
        if is_close:
            break
        step = simulate(workload, costs, clock_factors(power, slowdown))
    clock = Clock(
        slowdown=slowdown,
        clock_hz=power.full_clock_hz * math.exp(-slowdown),
        power_w=mean_power_w(power, slowdown, full_s, step.step_s, step.comm_s),
    )
    measured = measured_slowdown(power, slowdown)
    if measured != slowdown:
        step = simulate(workload, costs, clock_factors(power, measured))
    return step, clock


def anchored_power(
    power: PowerModel, workload: Workload, costs: Costs, clock_hz: float, measured_x: float
) -> PowerModel:
    """Return the power model with which a measured step has clock_hz and measured_x.

    Its full clock is at most that of the operators. A step that communicates also waits for
    other ranks, so its time tells less of the power of its work than operators do. costs: at
    full clock, without the host's time.
    """
    rate = total(workload.issued(), costs).product_flops_per_s
    _, own = at_clock(workload, costs, power, rate, simulate(workload, costs))
    full_clock_hz = min(power.full_clock_hz, clock_hz * math.exp(own.slowdown))
    model_x = own.slowdown
    return replace(power, full_clock_hz=full_clock_hz, measured_x=measured_x, model_x=model_x)


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
    rate = total(workload.issued(), costs).product_flops_per_s
    full = simulate(workload, costs)
    if clock_hz >= _FULL_CLOCK * power.full_clock_hz:
        own_w = mean_power_w(for_products(power, rate), 0.0, full.busy_s, full.step_s)
        measured_j = (power_w - power.static_w) * step_s
        factor = measured_j / ((own_w - power.static_w) * full.step_s)
        return _multiplied(power, min(_MAX_POWER, max(1 / _MAX_POWER, factor)))
    max_slowdown = math.log(power.full_clock_hz / clock_hz)

    def predicted_with(factor: float) -> tuple[float, float]:
        step, clock = at_clock(workload, costs, _multiplied(power, factor), rate, full)
        return step.step_s, clock.slowdown

    def is_too_low(factor: float) -> bool:
        own_s, slowdown = predicted_with(factor)
        is_slow = own_s >= step_s or slowdown >= max_slowdown
        return not (slowdown and is_slow)

    factor = _least_factor(is_too_low, _MAX_POWER)
    _, slowdown = predicted_with(factor)
    full_clock_hz = clock_hz * math.exp(slowdown)
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

    return fitted_factor(predicted_s, step_s)


def fitted_factor(predicted_s: Callable[[float], float], step_s: float) -> float:
    """Return the factor from a third to 3 by which a step takes this time; 1: none does."""
    if not predicted_s(1 / _MAX_TIME) < step_s < predicted_s(_MAX_TIME):
        return 1.0
    return _least_factor(lambda factor: predicted_s(factor) < step_s, _MAX_TIME)


def _least_factor(is_too_low: Callable[[float], bool], limit: float) -> float:
    """Return the least factor, from 1 / limit to limit, that is not too low."""
    low = 1 / limit
    high = limit
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_too_low(middle) else (low, middle)
    return math.sqrt(low * high)


def _multiplied(power: PowerModel, factor: float) -> PowerModel:
    return replace(power, dynamic_w={w: factor * x for w, x in power.dynamic_w.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Computation of all stages. sources: seconds by origin of the cost.

    product_flops_per_s: rate of products; None without any. unknown: operations without a cost
    in some of their passes, with whether they have none in all of them.
    """

    sources: Mapping[Source, float]
    product_flops_per_s: float | None
    unknown: Mapping[str, bool]


def total(issued: Mapping[Operation, int], costs: Costs) -> Total:
    """Return the computation of a step by its costs. issued: as of Workload."""
    sources: dict[Source, float] = {}
    has_cost: dict[str, set[bool]] = {}
    flops = product_s = 0.0
    for op, count in issued.items():
        if not isinstance(op, ComputeOp):
            continue
        cost: OpCost = costs.compute(op)
        product_s += count * cost.time_s.get(Work.MATMUL, 0.0)
        sources[cost.source] = sources.get(cost.source, 0.0) + count * cost.total_s
        if work_of_op(op) is Work.MATMUL:
            flops += count * (op.op.flops or 0)
        name = op.op.name if isinstance(op.op, Kernel) else op.module
        has_cost.setdefault(name, set()).add(cost.source is not Source.UNKNOWN)
    return Total(
        sources=sources,
        product_flops_per_s=flops / product_s if product_s else None,
        unknown={name: known == {False} for name, known in has_cost.items() if False in known},
    )


def offload_share(
    issued: Mapping[Operation, int], costs: Costs, groups: Mapping[str, Group]
) -> float:
    """Return the time of copies of activations to the host as a share of forward passes' time.

    Transfers between stages do not count. issued, groups: as of Workload.
    """
    forward = [
        (op, n) for op, n in issued.items() if op.phase is Phase.FWD and not op.recompute
    ]
    computed = [(op, n) for op, n in forward if isinstance(op, ComputeOp)]
    copies = [(op, n) for op, n in computed if isinstance(op.op, HostCopy)]
    if not copies:
        return 0.0
    copies_s = sum(n * costs.compute(op).total_s for op, n in copies)
    forward_s = sum(n * costs.compute(op).total_s for op, n in computed) - copies_s
    for op, n in forward:
        if isinstance(op, CommOp) and op.stream == COMPUTE and op.peer is None:
            forward_s += n * costs.comm(op, groups[op.group])
    return copies_s / forward_s if forward_s else 0.0
