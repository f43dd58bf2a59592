"""Runs cases one after the other and gives each record to a sink as soon as it is there."""

import math
import time
from collections.abc import Callable, Iterable

import torch

from stepmark.bench import clock as clocks
from stepmark.bench.agree import CaseFailedError, agreed
from stepmark.bench.operators.call import Call, Impl
from stepmark.bench.operators.table import IMPLS
from stepmark.bench.rig import Rig, own_stream, release
from stepmark.bench.stopping import BURST_IDLE_S, Effort, is_enough
from stepmark.bench.telemetry import Sampler
from stepmark.core.case import ClockName, OpCase, Rate
from stepmark.core.record import Check, Measured, Record, Samples, Skipped, Telemetry
from stepmark.core.stats import slowest_per_sample
from stepmark.core.units import format_bytes

_BURST_WORK_S = 20e-3
_BATCH_S = 0.1
_MAX_SETS = 128


def run(
    cases: Iterable[OpCase],
    rig: Rig,
    effort: Effort,
    *,
    run_id: str,
    sink: Callable[[Record], None],
) -> None:
    """Measure each case; rank 0 passes each record on. A broken case does not end the run."""
    todo = list(cases)
    begin = time.monotonic()
    aside_s = 0.0  # spent on allocation, checks and compilation so far
    for position, case in enumerate(todo):
        share = effort
        if effort.total_s is not None:
            left = max(0.0, begin + effort.total_s - time.monotonic()) / (len(todo) - position)
            usable = left - aside_s / position if position else left / 2
            share = effort.shortened(max(rig.ranks.gather(max(usable, left / 4))))
        started = time.monotonic()
        record = _run_case(case, rig, share, run_id)
        timed_s = record.samples.wall_s if isinstance(record, Measured) else 0.0
        aside_s += time.monotonic() - started - timed_s
        if rig.ranks.rank == 0:
            sink(record)


def _run_case(case: OpCase, rig: Rig, effort: Effort, run_id: str) -> Record:
    impl = IMPLS[case.family].get(case.backend)
    try:
        reasons = rig.ranks.gather(agreed(rig.ranks, lambda: _why_not(case, impl, rig)))
    except CaseFailedError as failed:
        return failed.record(run_id, case)
    for rank, (rank_reason, rank_needed) in enumerate(reasons):
        if rank_reason is not None:
            where = f" (rank {rank})" if len({r for r, _ in reasons}) > 1 else ""
            return Skipped(
                run_id=run_id, case=case, reason=rank_reason + where, needed_bytes=rank_needed
            )
    assert impl is not None
    try:
        with own_stream(rig):
            return _measure(case, impl, rig, effort, run_id)
    except CaseFailedError as failed:
        return failed.record(run_id, case)
    finally:
        release(rig)


def _why_not(case: OpCase, impl: Impl | None, rig: Rig) -> tuple[str | None, int | None]:
    if impl is None:
        known = ", ".join(IMPLS[case.family])
        return f"no backend {case.backend} for {case.family}; there is {known}", None
    if reason := impl.unsupported(case.op, rig.capabilities):
        return reason, None
    needed = case.op.memory_bytes + impl.extra_bytes(case.op)
    free = rig.free_bytes()
    if needed > free * 0.95:
        text = f"needs {format_bytes(needed)}, {format_bytes(free)} are free"
        return text, needed
    return None, None


def _measure(case: OpCase, impl: Impl, rig: Rig, effort: Effort, run_id: str) -> Measured:
    started_at, device = time.time(), rig.ranks.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    num_sets = _num_sets(case, impl, rig)
    sets: list[Call] = []

    def allocate() -> None:
        for _ in range(num_sets):
            sets.append(impl.make(case.op, device))

    agreed(rig.ranks, allocate)
    check: Check = agreed(rig.ranks, sets[0].verify)
    timer, estimate_s = _bind(case, impl, rig, [item.run for item in sets])
    sampler = Sampler(rig.device_index)
    begin = time.monotonic()
    soak_s = 0.0
    if case.rate is Rate.SUSTAINED:
        soak_s = agreed(rig.ranks, lambda: _soak(timer, estimate_s, effort.soak_s))
    with sampler:
        mine = _collect(case, rig, timer, estimate_s, effort)
    everyone: list[tuple[list[float], Check, Telemetry]] = rig.ranks.gather(
        (mine, check, sampler.telemetry())
    )
    return Measured(
        run_id=run_id,
        case=case,
        samples=Samples(
            seconds=tuple(tuple(seconds) for seconds, _, _ in everyone),
            method=timer.method,
            calls_per_sample=timer.calls_per_sample,
            num_sets=num_sets,
            soak_s=soak_s,
            wall_s=time.monotonic() - begin,
        ),
        checks=tuple(item for _, item, _ in everyone),
        telemetry=tuple(item for _, _, item in everyone),
        backend_run=sets[0].backend_run,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        started_at=started_at,
    )


def _bind(
    case: OpCase, impl: Impl, rig: Rig, calls: clocks.Calls
) -> tuple[clocks.Timer, float]:
    """The timer that all ranks use, and the slowest rank's estimate of one call."""
    kind = rig.ranks.device.type
    estimates = rig.ranks.gather(agreed(rig.ranks, lambda: clocks.estimate(calls, kind)))
    estimate_s = max(call_s for call_s, _ in estimates)

    def bind(name: ClockName = case.clock) -> clocks.Timer:
        return clocks.choose(
            name,
            calls,
            call_s=estimate_s,
            launch_s=max(launch_s for _, launch_s in estimates),
            device_type=kind,
            capturable=impl.capturable,
            l2_bytes=rig.cache_bytes,
        )

    timer = agreed(rig.ranks, bind)
    if len(set(rig.ranks.gather((timer.method, timer.calls_per_sample)))) > 1:
        # Some rank could not capture its graph: then none replays one.
        timer = agreed(rig.ranks, lambda: bind(ClockName.ROTATE))
    return timer, estimate_s


def _num_sets(case: OpCase, impl: Impl, rig: Rig) -> int:
    """Operand sets that together exceed twice the cache, as far as half the memory allows."""
    per_set = case.op.memory_bytes
    wanted = max(2, math.ceil(2 * rig.cache_bytes / max(per_set, 1)) + 1)
    fitting = int(rig.free_bytes() / 2 / max(per_set + impl.extra_bytes(case.op), 1))
    return int(rig.ranks.decide(lambda: max(1, min(wanted, fitting, _MAX_SETS))))


def _soak(timer: clocks.Timer, estimate_s: float, soak_s: float) -> float:
    """Run the case itself until its device is as warm as a long job would have it."""
    begin = time.monotonic()
    while (spent := time.monotonic() - begin) < soak_s:
        timer.sample(_batch(timer, estimate_s, min(_BATCH_S, soak_s - spent)))
    return time.monotonic() - begin


def _batch(timer: clocks.Timer, estimate_s: float, seconds: float) -> int:
    """Samples that take about `seconds`."""
    return max(1, min(1000, int(seconds / max(estimate_s * timer.calls_per_sample, 1e-9))))


def _collect(
    case: OpCase, rig: Rig, timer: clocks.Timer, estimate_s: float, effort: Effort
) -> list[float]:
    """Sample in batches until rank 0, seeing all ranks' maxima, says that it is enough."""
    burst = case.rate is Rate.BURST
    length = _BURST_WORK_S if burst else min(_BATCH_S, effort.sample_s / 4)
    mine: list[float] = []
    batches: list[list[float]] = []  # slowest rank per sample
    begin = time.monotonic()

    def enough() -> bool:
        return is_enough(batches, time.monotonic() - begin, effort, burst=burst)

    while True:  # rank 0 ends it, for all
        if burst:
            time.sleep(BURST_IDLE_S)
        rig.ranks.barrier()
        batch = agreed(rig.ranks, lambda: timer.sample(_batch(timer, estimate_s, length)))
        mine += batch
        batches.append(slowest_per_sample(rig.ranks.gather(batch)))
        if rig.ranks.decide(enough):
            return mine
