"""Measure one operator: allocate, check, choose a clock, soak, sample."""

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from stepmark.cases.case import ClockName, OpCase, Rate
from stepmark.cases.plan import Entry, OpHow
from stepmark.cases.record import Check, Measured, Samples
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.ground.units import format_bytes
from stepmark.measuring import clock as clocks
from stepmark.measuring.clock import BURST_IDLE_S, Effort, is_enough, is_flat
from stepmark.measuring.context import (
    MeasureContext,
    collect,
    no_collection,
    own_stream,
    release,
)
from stepmark.measuring.ranks import Ranks, agreed, measured_by
from stepmark.measuring.run_cases import Bench, SetUpTime
from stepmark.measuring.telemetry import Sampler
from stepmark.model.ops import Custom
from stepmark.operators.bench import IMPLS, custom, impl_of
from stepmark.operators.bench.call import Call, Impl

# Work between two agreements of the ranks.
_BATCH_S = {Rate.BURST: 20e-3, Rate.SUSTAINED: 0.1, Rate.HALF: 10e-3}
_MAX_SETS = 128
# The load of earlier cases counts as soak if it ended less than this before.
_PAUSE_S = 1.0
# What a case soaks itself where a limit slows the device: a power cap lowers the clock within
# tenths of a second, and swings most after the pause before a case.
_OWN_SOAK_S = 0.6
_MAX_CACHES = 64


@dataclass(slots=True)
class Load:
    """How long the device has been under full load, without a longer pause."""

    _seconds: float = 0.0
    _ended_s: float = -math.inf

    def seconds(self) -> float:
        """Return the seconds of load that still count."""
        return self._seconds if time.monotonic() - self._ended_s < _PAUSE_S else 0.0

    def ended(self, begin_s: float, before_s: float, *, is_full: bool) -> None:
        """Count the load from begin_s on, after before_s of it. Others end it."""
        self._ended_s = time.monotonic()
        self._seconds = before_s + self._ended_s - begin_s if is_full else 0.0


@dataclass(slots=True)
class OperatorBench(Bench):
    """Measures operators on the first num_ranks ranks at once; the others wait."""

    context: MeasureContext
    how: OpHow
    budget_s: float | None = None
    effort: Effort = field(init=False)
    _members: dict[int, Ranks | None] = field(default_factory=dict)
    _completed: dict[OpCase, OpCase] = field(default_factory=dict)
    _load: Load = field(default_factory=Load)
    _set_up: SetUpTime = field(default_factory=SetUpTime)

    def __post_init__(self) -> None:
        how = self.how
        self.effort = Effort(sample_s=how.sample_s, soak_s=how.soak_s, num_samples=how.steps)

    def completed(self, entry: Entry) -> Entry:
        case = cast("OpCase", entry.case)
        if not isinstance(case.op, Custom):
            return entry
        if case not in self._completed:  # other launches have the same cases
            self._completed[case] = custom.completed(case, case.op, self.context.ranks)
            release(self.context)  # or its operands would count as memory that is not free
        return replace(entry, case=self._completed[case])

    def why_not(self, entry: Entry) -> tuple[str, int | None] | None:
        case = cast("OpCase", entry.case)
        ranks = self.context.ranks
        impl = impl_of(case)
        if impl is None:
            names = ", ".join(IMPLS[case.family])
            return f"no backend {case.backend} for {case.family}; there is {names}", None
        if case.num_ranks > ranks.num_ranks:
            return f"needs {case.num_ranks} ranks, {ranks.num_ranks} were started", None
        if reason := impl.unsupported(case.op, self.context.capabilities):
            return reason, None
        needed = case.op.memory_bytes + impl.extra_bytes(case.op)
        free = self._free_bytes(case)
        if needed > free * 0.95 and ranks.rank < case.num_ranks:
            return f"needs {format_bytes(needed)}, {format_bytes(free)} are free", needed
        return None

    def measure(self, entry: Entry, share_s: float | None) -> Measured:
        case = cast("OpCase", entry.case)
        world = self.context.ranks
        if case.num_ranks not in self._members:
            self._members[case.num_ranks] = world.first(case.num_ranks)

        def by(ranks: Ranks) -> Measured:
            return self._measure(case, ranks, share_s)

        with _threads_of(case, world):
            return measured_by(world, self._members[case.num_ranks], by)

    def _free_bytes(self, case: OpCase) -> int:
        """Return the free memory of a rank; on a CPU with the share of waiting ranks."""
        free = self.context.free_bytes()
        if case.device != "cpu":
            return free
        return free * self.context.ranks.num_ranks // case.num_ranks

    def limit_s(self, share_s: float | None) -> float:
        return self.how.timeout_s + self.effort.soak_s + self.effort.sample_s

    def _measure(self, case: OpCase, ranks: Ranks, share_s: float | None) -> Measured:
        begin = time.monotonic()
        timed_s = 0.0
        effort = self.effort
        if share_s is not None:
            effort = effort.shortened(max(ranks.gather(self._set_up.rest_of(share_s))))
        context = replace(self.context, ranks=ranks, free_bytes=lambda: self._free_bytes(case))
        try:
            with own_stream(context):
                impl = impl_of(case)
                assert impl is not None, "why_not has its reason"
                record = _measure(
                    case, impl, context, effort, load=self._load, warmups=self.how.warmups
                )
            timed_s = record.samples.wall_s
            return record
        finally:
            self._set_up.add(time.monotonic() - begin - timed_s)


@contextlib.contextmanager
def _threads_of(case: OpCase, world: Ranks) -> Iterator[None]:
    """Give the cores of waiting ranks to those that measure, on a CPU.

    Ranks share the cores equally unless OMP_NUM_THREADS was set to something else.
    """
    cores = os.cpu_count() or 1
    threads = torch.get_num_threads()
    is_shared = threads == max(1, cores // world.num_ranks)
    if case.device != "cpu" or case.num_ranks >= world.num_ranks or not is_shared:
        yield
        return
    torch.set_num_threads(max(1, cores // case.num_ranks))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _measure(
    case: OpCase,
    impl: Impl,
    context: MeasureContext,
    effort: Effort,
    *,
    load: Load,
    warmups: int | None,
) -> Measured:
    """Measure the case; its ranks call it. warmups: calls in place of the soak."""
    started_at = time.time()
    num_sets = _num_sets(case, impl, context)
    first, check, peak_bytes = agreed(context.ranks, lambda: _checked_set(case, impl, context))
    sampler = Sampler(context.device_index)
    samples = _sampled(
        case,
        [first, *_other_sets(case, impl, context, num_sets - 1)],
        impl,
        context,
        effort,
        load=load,
        warmups=warmups,
        sampler=sampler,
    )
    # Other operand sets are freed by now. A result that was wrong before needs no other check.
    last = agreed(
        context.ranks, lambda: check if check.num_wrong else first.verify_again() or check
    )
    by_rank = context.ranks.gather((samples.seconds[0], last, sampler.telemetry()))
    all_seconds, checks, telemetry = zip(*by_rank, strict=True)
    return Measured(
        run_id=context.run_id,
        case=case,
        samples=replace(samples, seconds=all_seconds),
        checks=checks,
        telemetry=telemetry,
        backend_run=first.backend_run,
        peak_memory_bytes=peak_bytes,
        started_at=started_at,
    )


def _sampled(
    case: OpCase,
    calls: Sequence[Call],
    impl: Impl,
    context: MeasureContext,
    effort: Effort,
    *,
    load: Load,
    warmups: int | None,
    sampler: Sampler,
) -> Samples:
    """Return this rank's samples of calls on all operand sets."""
    timer, estimate_s = _bind(case, impl, context, [call.run for call in calls])
    loaded_s = context.ranks.decide(load.seconds)
    begin = time.monotonic()
    is_full = case.rate is Rate.SUSTAINED
    soak_s = own_soak_s = 0.0
    with no_collection():
        if warmups is not None:
            warm = calls[:1] if case.clock is ClockName.HOT else calls
            soak_s = agreed(context.ranks, lambda: _warm_up(case, warm, warmups))
        elif is_full:
            more_s = max(0.0, effort.soak_s - loaded_s)
            soak_s = loaded_s + agreed(context.ranks, lambda: _soak(timer, estimate_s, more_s))
            own_soak_s = min(_OWN_SOAK_S, effort.soak_s)
        with sampler:
            seconds, batches, own_soak_s = _collect(
                case, context, timer, estimate_s, effort, sampler, own_soak_s
            )
    load.ended(begin, loaded_s, is_full=is_full)
    return Samples(
        seconds=(tuple(seconds),),
        method=timer.method,
        calls_per_sample=timer.calls_per_sample,
        num_sets=len(calls),
        soak_s=soak_s + own_soak_s,
        warmup_calls=warmups or 0,
        wall_s=time.monotonic() - begin,
        batches=batches,
    )


def _checked_set(
    case: OpCase, impl: Impl, context: MeasureContext
) -> tuple[Call, Check, int | None]:
    """Return an operand set, its check, and the peak memory of a call on it; None on a CPU.

    The peak is of its operands, results and workspace: the reference of the check is freed
    before, and so are the workspaces of its products.
    """
    device = context.ranks.device
    if device.type == "cpu":
        call = impl.make(case.op, device)
        return call, call.verify(), None
    before_bytes = torch.cuda.memory_allocated(device)
    call = impl.make(case.op, device)
    check = call.verify()
    collect(context)
    torch.cuda.reset_peak_memory_stats(device)
    call.run()
    return call, check, torch.cuda.max_memory_allocated(device) - before_bytes


def _other_sets(case: OpCase, impl: Impl, context: MeasureContext, count: int) -> list[Call]:
    """Return further operand sets. Raises CaseFailedError where they exceed --budget.

    The first of them tells how long the others take: the very first set may have compiled.
    """
    begin = time.monotonic()
    others: list[Call] = []
    for number in (min(count, 1), count - 1):
        if others and number:
            spent_s = max(context.ranks.gather(time.monotonic() - begin))
            context.check_budget(number * spent_s)
        others += agreed(
            context.ranks,
            lambda: [impl.make(case.op, context.ranks.device) for _ in range(number)],  # noqa: B023
        )
    return others


def _bind(
    case: OpCase, impl: Impl, context: MeasureContext, calls: clocks.Calls
) -> tuple[clocks.Timer, float]:
    """Return the timer that all ranks use, and the slowest rank's estimate of one call."""
    kind = context.ranks.device.type
    estimates = context.ranks.gather(
        agreed(context.ranks, lambda: clocks.estimate(calls, kind))
    )
    estimate_s = max(call_s for call_s, _ in estimates)

    def bind(name: ClockName = case.clock) -> clocks.Timer:
        return clocks.choose(
            name,
            calls,
            call_s=estimate_s,
            launch_s=max(launch_s for _, launch_s in estimates),
            device_type=kind,
            capturable=impl.capturable,
            l2_bytes=context.cache_bytes,
        )

    timer = agreed(context.ranks, bind)
    if len(set(context.ranks.gather((timer.method, timer.calls_per_sample)))) > 1:
        # Some rank could not capture its graph: then no rank uses graphs.
        timer = agreed(context.ranks, lambda: bind(ClockName.ROTATE))
    return timer, estimate_s


def _num_sets(case: OpCase, impl: Impl, context: MeasureContext) -> int:
    """Return the operand sets of which calls touch more than twice the cache.

    They take at most half of the free memory; a table of which a call reads few rows is not
    copied beyond 64 caches.
    """
    op = case.op
    cache_bytes = context.cache_bytes
    if case.clock is ClockName.HOT and context.ranks.device.type != "cpu":
        return 1
    touched = min(op.memory_bytes, op.bytes_moved)
    needed = max(2, math.ceil(2 * cache_bytes / max(touched, 1)) + 1)
    largest = max(2, _MAX_CACHES * cache_bytes // max(op.memory_bytes, 1))
    fitting = int(context.free_bytes() / 2 / max(op.memory_bytes + impl.extra_bytes(op), 1))
    return int(context.ranks.decide(lambda: max(1, min(needed, largest, fitting, _MAX_SETS))))


def _warm_up(case: OpCase, calls: Sequence[Call], count: int) -> float:
    """Call the operator exactly `count` times. Returns the wall time in seconds.

    The operands of the first sample are those that were used longest ago.
    """
    begin = time.monotonic()
    for index in range(-count, 0):
        calls[index % len(calls)].run()
    if case.device != "cpu":
        torch.cuda.synchronize()
    return time.monotonic() - begin


def _soak(timer: clocks.Timer, estimate_s: float, soak_s: float) -> float:
    """Run the case itself until its device is as warm as in a long job."""
    begin = time.monotonic()
    while (spent := time.monotonic() - begin) < soak_s:
        timer.sample(_batch(timer, estimate_s, min(_BATCH_S[Rate.SUSTAINED], soak_s - spent)))
    return time.monotonic() - begin


def _batch(timer: clocks.Timer, estimate_s: float, seconds: float) -> int:
    """Return the number of samples that take about `seconds`."""
    return max(1, min(1000, int(seconds / max(estimate_s * timer.calls_per_sample, 1e-9))))


def _collect(
    case: OpCase,
    context: MeasureContext,
    timer: clocks.Timer,
    estimate_s: float,
    effort: Effort,
    sampler: Sampler,
    own_soak_s: float,
) -> tuple[list[float], tuple[int, ...], float]:
    """Sample in batches until rank 0 decides from all ranks' maxima that they suffice.

    They do as soon as batches are flat while no limit slows a device; else those of the first
    own_soak_s are soak. Returns the samples, how many each batch has, and the seconds of soak.
    A fixed number of samples is kept exactly.
    """
    length_s = min(_BATCH_S[case.rate], effort.sample_s / 4)
    most = _batch(timer, estimate_s, length_s)
    resume_at = 0.0
    seconds: list[float] = []
    batches: list[list[float]] = []  # slowest rank per sample
    is_soak = own_soak_s > 0
    soak_s = 0.0
    begin = time.monotonic()

    def verdict() -> tuple[bool, bool]:
        """Return whether samples suffice, and whether the soak has ended."""
        spent_s = time.monotonic() - begin
        can_be_flat = case.rate is Rate.SUSTAINED and effort.num_samples is None
        if can_be_flat and not any(limited) and is_flat(batches, effort):
            return True, False
        if is_soak:
            return False, spent_s >= own_soak_s
        return is_enough(batches, spent_s, effort, case.rate), False

    while True:  # rank 0 ends it, for all
        if case.rate is Rate.BURST:
            time.sleep(BURST_IDLE_S)
        elif case.rate is Rate.HALF:
            time.sleep(max(0.0, resume_at - time.monotonic()))
        context.ranks.barrier()
        count = most
        if effort.num_samples is not None and not is_soak:
            count = min(most, effort.num_samples - len(seconds))
        batch = agreed(context.ranks, lambda: timer.sample(count))  # noqa: B023  called at once
        resume_at = time.monotonic() + sum(batch) * timer.calls_per_sample
        seconds += batch
        of_ranks = context.ranks.gather((batch, sampler.is_limited()))
        all_batches, limited = zip(*of_ranks, strict=True)
        batches.append(slowest_per_sample(all_batches))
        # The estimate is longer where a busy host launched its calls.
        most = _batch(timer, summarize(batches[-1]).median, length_s)
        is_enough_now, ends_soak = context.ranks.decide(verdict)
        if is_enough_now:
            return seconds, tuple(map(len, batches)), soak_s
        if ends_soak:
            is_soak = False
            soak_s = time.monotonic() - begin
            begin += soak_s
            seconds, batches = [], []
            sampler.forget()
