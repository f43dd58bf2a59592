"""Power of a GPU under a training step, and the clock with which it keeps its limit.

A device lowers its clock until its mean power is the limit. x is the log of the time of
attention over that at full clock, since attention follows the clock; work of other kinds takes
exp(sensitivity x) times as long.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, log

from stepmark.timeline.ledger import Work
from stepmark.timeline.step_cost import PowerModel

# Measured on an H200 (docs/diary): kernels of steps of gpt2-1.5b and llama-3.1-8b at the power
# limit beside the same kernels at full clock, as exponents of the slowdown of attention. That
# of products is 0.45 to 0.75, by their shapes.
SENSITIVITY = {
    Work.MATMUL: 0.6,
    Work.ATTENTION: 1.0,
    Work.ELEMENTWISE: 0.35,
    Work.LOSS: 0.8,
    Work.OPTIMIZER: 0.15,
    Work.COPY: 0.0,
}
_LEAST_MEASURED = 0.02  # a smaller slowdown of attention tells no sensitivity
# Of the dynamic power of a copy, which has the highest bandwidth: a multi-tensor AdamW reaches
# 3.4 of 4.26 TB/s (same source).
_MEMORY_BOUND = 0.8
_LEAST_SLOWDOWN = 0.01  # a device that loses less has no limit to speak of
_MAX_SLOWDOWN = 1.5
_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One operator in bursts that take `duty` of the time, at full clock, and sustained."""

    full_clock_s: float  # of one call
    full_clock_hz: float
    duty: float
    part_w: float  # mean power with that duty
    sustained_s: float
    sustained_w: float


def fit(
    product: Reading, attention: Reading, copy_w: float, idle_w: float, product_flops: int
) -> PowerModel:
    """Return the model of one device.

    idle_w: at full clock without work; copy_w: of a sustained copy, which does not reach the
    limit. product_flops: of the product that was measured.
    """
    slowdown = log(attention.sustained_s / attention.full_clock_s)
    dynamic_w = {
        work: (reading.part_w - idle_w) / reading.duty
        for work, reading in ((Work.MATMUL, product), (Work.ATTENTION, attention))
    }
    memory_bound_w = _MEMORY_BOUND * (copy_w - idle_w)
    dynamic_w |= dict.fromkeys((Work.ELEMENTWISE, Work.LOSS, Work.OPTIMIZER), memory_bound_w)
    is_limited = slowdown > _LEAST_SLOWDOWN
    sustained_w = attention.sustained_w - idle_w
    return PowerModel(
        limit_w=product.sustained_w,
        static_w=idle_w,
        dynamic_w=dynamic_w,
        sensitivity=SENSITIVITY,
        decay=log(dynamic_w[Work.ATTENTION] / sustained_w) / slowdown if is_limited else 0.0,
        product_flops_per_s=product_flops / product.full_clock_s,
        full_clock_hz=product.full_clock_hz,
        is_limited=is_limited,
    )


def with_sensitivities(
    power: PowerModel, full_s: Mapping[Work, float], limited_s: Mapping[Work, float]
) -> PowerModel:
    """Return the model with the sensitivities of kernels that were measured at both clocks.

    full_s, limited_s: time of the same kernels at full clock and at the power limit, by kind.
    """
    slowdowns = {
        work: log(limited_s[work] / full_s[work])
        for work in SENSITIVITY
        if full_s.get(work) and limited_s.get(work)
    }
    slowdown = slowdowns.get(Work.ATTENTION, 0.0)
    if slowdown < _LEAST_MEASURED:
        return power
    measured = {work: min(1.2, max(0.0, x / slowdown)) for work, x in slowdowns.items()}
    return replace(power, sensitivity={**power.sensitivity, **measured})


def for_products(power: PowerModel, flops_per_s: float | None) -> PowerModel:
    """Return the model for products that reach this rate at full clock; None: no product."""
    if flops_per_s is None:
        return power
    product_w = power.dynamic_w[Work.MATMUL] * flops_per_s / power.product_flops_per_s
    return replace(power, dynamic_w={**power.dynamic_w, Work.MATMUL: product_w})


def clock_factors(power: PowerModel, slowdown: float) -> dict[Work, float]:
    """Return by what the time of each kind of work is multiplied."""
    return {work: exp(share * slowdown) for work, share in power.sensitivity.items()}


def measured_slowdown(power: PowerModel, slowdown: float) -> float:
    """Return the slowdown of kernels where the model has this one."""
    return max(0.0, slowdown + power.measured_x - power.model_x) if slowdown else 0.0


def slowdown_between(
    power: PowerModel, full_s: Mapping[Work, float], limited_s: Mapping[Work, float]
) -> float:
    """Return the slowdown with which kernels that take full_s take limited_s together."""
    total_s = sum(limited_s.get(work, 0.0) for work in power.sensitivity if work in full_s)

    def is_less(x: float) -> bool:
        times = (exp(s * x) * full_s.get(work, 0.0) for work, s in power.sensitivity.items())
        return sum(times) < total_s

    return _bisected(is_less)


def _bisected(is_less: Callable[[float], bool]) -> float:
    """Return the greatest slowdown that is still less than what is wanted."""
    low = 0.0
    high = _MAX_SLOWDOWN
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_less(middle) else (low, middle)
    return high


def mean_power_w(
    power: PowerModel,
    slowdown: float,
    full_s: Mapping[Work, float],
    step_s: float,
    comm_s: float = 0.0,
) -> float:
    """Return the mean power of a step.

    full_s: compute at full clock by kind of work; comm_s: in which messages move.
    """
    energy_j = power.comm_w * comm_s
    energy_j += sum(
        power.dynamic_w.get(work, 0.0)
        * time_s
        * exp((power.sensitivity.get(work, 0.0) - power.decay) * slowdown)
        for work, time_s in full_s.items()
    )
    return power.static_w + energy_j / step_s


def slowdown_of(
    power: PowerModel,
    full_s: Mapping[Work, float],
    step_s: float,
    slowdown: float,
    comm_s: float = 0.0,
) -> float:
    """Return the slowdown at which the step keeps the limit; 0 if it does at full clock.

    step_s: the step's time at `slowdown`; comm_s: in which messages move. Only compute takes
    longer at a lower clock.
    """
    if not power.is_limited:
        return 0.0
    factors = clock_factors(power, slowdown)

    def excess_w(x: float) -> float:
        stretched = clock_factors(power, x)
        added_s = sum(
            time_s * (stretched.get(work, 1.0) - factors.get(work, 1.0))
            for work, time_s in full_s.items()
        )
        return mean_power_w(power, x, full_s, step_s + added_s, comm_s) - power.limit_w

    if excess_w(0.0) <= 0:
        return 0.0
    return _bisected(lambda x: excess_w(x) > 0)
