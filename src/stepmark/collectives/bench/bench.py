"""Measure one collective: allocate, check, warm up, choose a clock, sample."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, cast

import torch

from stepmark.cases.comm_case import CommCase, unsupported
from stepmark.cases.plan import CommHow, Entry
from stepmark.cases.record import (
    Arrivals,
    Beside,
    Check,
    CommMemory,
    Failed,
    Measured,
    Samples,
)
from stepmark.collectives.bench import nccl
from stepmark.collectives.bench.case_on_rank import (
    CaseOnRank,
    backend_run,
    local_case,
    needed_bytes,
)
from stepmark.collectives.bench.communicators import Communicators
from stepmark.collectives.bench.timing import Batch, Timer
from stepmark.ground.stats import slowest_per_sample, summarize
from stepmark.ground.units import format_bytes
from stepmark.measuring.clock import Effort, is_enough
from stepmark.measuring.context import MeasureContext, no_collection, own_stream
from stepmark.measuring.ranks import Ranks, agreed
from stepmark.measuring.run_cases import Bench, SetUpTime
from stepmark.measuring.telemetry import Sampler
from stepmark.model.collectives import Api, Mode, Registration

if TYPE_CHECKING:
    from stepmark.collectives.bench.concurrent_compute import ConcurrentCompute

# A second of samples in at least five batches: what repeats is the batch, as with operators.
DEFAULT = Effort(sample_s=1.0, soak_s=0.0, target_ci_rel=0.005, min_batches=5)
# Maximum memory of a check in addition to the buffers.
_CHECK_BYTES = 2**29


@dataclass(slots=True)
class CollectiveBench(Bench):
    """Measures collectives. Ranks outside a case's communicator take every step, idle."""

    context: MeasureContext
    how: CommHow
    budget_s: float | None = None
    effort: Effort = DEFAULT
    _communicators: Communicators = field(init=False)
    _set_up: SetUpTime = field(default_factory=SetUpTime)

    def __post_init__(self) -> None:
        used_bytes = partial(_library_bytes, self.context)
        self._communicators = Communicators(self.context.ranks, used_bytes)

    def why_not(self, entry: Entry) -> tuple[str, int | None] | None:
        case = cast("CommCase", entry.case)
        started = self.context.ranks.num_ranks
        if case.world_size > started:
            return f"needs {case.world_size} ranks, {started} were started", None
        if reason := unsupported(case) or nccl.unsupported_here(case):
            return reason, None
        local = local_case(case, self.context.ranks.rank)
        if local is None:
            return None
        needed = needed_bytes(*local) + min(_CHECK_BYTES, 16 * case.message_bytes)
        free = self.context.free_bytes()
        if needed > free * 0.95:
            return f"needs {format_bytes(needed)}, {format_bytes(free)} are free", needed
        return None

    def measure(self, entry: Entry, share_s: float | None) -> Measured:
        case = cast("CommCase", entry.case)
        ranks = self.context.ranks
        begin = time.monotonic()
        timed_s = 0.0
        if share_s is not None:
            share_s = max(ranks.gather(self._set_up.rest_of(share_s)))
        try:
            with own_stream(self.context):
                communicator = self._communicators.get(case)
                part = CaseOnRank(case, self.context, communicator, self.how)
                memory = MemoryUse(self.context, self._communicators.init_bytes(case))
                effort = self._effort(share_s)
                record = _measure(part, case, self.context, effort, self.how, memory)
                agreed(ranks, part.release)
            timed_s = record.samples.wall_s
            return record
        finally:
            self._set_up.add(time.monotonic() - begin - timed_s)

    def failed(self, entry: Entry, record: Failed) -> Failed:
        """Forget the case's communicator, which may be broken, unless memory was short.

        With it goes the memory that is registered.
        """
        case = cast("CommCase", entry.case)
        if record.cause != "oom" or case.registration is not Registration.NONE:
            self._communicators.forget(case)
        return record

    def limit_s(self, share_s: float | None) -> float:
        return self.how.timeout_s + self._effort(share_s).sample_s

    def abort(self) -> None:
        self._communicators.abort()

    def close(self) -> None:
        self._communicators.close()

    def _effort(self, share_s: float | None) -> Effort:
        return self.effort if share_s is None else self.effort.shortened(share_s)


def _library_bytes(context: MeasureContext) -> int:
    """Return the device's memory in use, but for torch's, minus all of it."""
    device = context.ranks.device
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    return -context.free_bytes() - reserved


class MemoryUse:
    """Device memory that one case takes on this rank."""

    def __init__(self, context: MeasureContext, init_bytes: int) -> None:
        self._context = context
        self._init_bytes = init_bytes
        self._free_bytes = context.free_bytes()
        self._buffer_bytes = 0
        self._library_bytes = 0

    def allocated(self) -> None:
        """Count what was allocated so far as buffers."""
        self._buffer_bytes = self._free_bytes - self._context.free_bytes()
        self._library_bytes = _library_bytes(self._context)

    def total(self) -> CommMemory | None:
        """Return the memory after the last call; None on a CPU."""
        if self._context.ranks.device.type != "cuda":
            return None
        return CommMemory(
            init_bytes=self._init_bytes,
            buffer_bytes=self._buffer_bytes,
            call_bytes=_library_bytes(self._context) - self._library_bytes,
        )


def _measure(
    part: CaseOnRank,
    case: CommCase,
    context: MeasureContext,
    effort: Effort,
    how: CommHow,
    memory: MemoryUse,
) -> Measured:
    """Measure the case; every rank calls it. Raises CaseFailedError on all together."""
    ranks = context.ranks
    started_at = time.time()
    if on_gpu := ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)
    num_sets, check = _prepare(part, ranks, memory)
    estimate_s = max(ranks.gather(agreed(ranks, part.estimate)))
    is_compiled = _is_compiled(case) and all(ranks.gather(part.compiles_loop()))
    timer = agreed(ranks, lambda: part.timer(estimate_s, is_compiled=is_compiled))
    k = max(ranks.gather(timer.calls_per_sample))
    compute = agreed(ranks, part.concurrent_compute)
    alone_s = agreed(ranks, lambda: compute.alone() if compute else [])
    threads = torch.get_num_threads() if compute else 0
    sampler = Sampler(context.device_index, more_threads=threads)
    begin = time.monotonic()
    with no_collection(), sampler:
        samples = collect(ranks, timer, compute, estimate_s * k, effort, *part.samples(k))
    seconds_per_operation = [value / part.operations_per_call for value in samples.seconds]
    issue_s = summarize(samples.issue_s).median if samples.issue_s else 0.0
    concurrency = (alone_s, samples.together_s, compute.backend_run if compute else "")
    peak_bytes = torch.cuda.max_memory_allocated(ranks.device) if on_gpu else None
    sampled = (seconds_per_operation, check, sampler.telemetry(), issue_s, concurrency)
    by_rank = ranks.gather((*sampled, peak_bytes, memory.total()))
    seconds, checks, telemetry, issues, concurrencies, peaks, memories = zip(
        *(by_rank[rank] for rank in case.members), strict=True
    )
    return Measured(
        run_id=context.run_id,
        case=case,
        samples=Samples(
            seconds=tuple(map(tuple, seconds)),
            method=timer.method,
            calls_per_sample=k,
            num_sets=num_sets,
            wall_s=time.monotonic() - begin,
            batches=tuple(samples.counts),
        ),
        checks=checks if how.checks else (),
        telemetry=telemetry,
        backend_run=backend_run(case),
        peak_memory_bytes=None if None in peaks else max(peaks),
        started_at=started_at,
        arrivals=Arrivals(
            late_s=tuple(tuple(own[rank] for own in samples.late_s) for rank in case.members),
            error_s=max(ranks.gather(ranks.offset_error_s)),
            issue_s=issues,
            warmup_calls=how.warmups,
        ),
        beside=_beside(concurrencies) if case.beside else None,
        comm_memory=None if None in memories else max(memories, key=attrgetter("total_bytes")),
    )


def _prepare(part: CaseOnRank, ranks: Ranks, memory: MemoryUse) -> tuple[int, Check]:
    """Allocate, check and warm up. Return the number of operand sets, and this rank's check."""
    num_sets = min(ranks.gather(part.sets_that_fit()))
    agreed(ranks, lambda: part.reserve(num_sets))
    agreed(ranks, part.register)
    agreed(ranks, lambda: part.allocate(num_sets))
    memory.allocated()
    check = agreed(ranks, part.check)
    agreed(ranks, part.bind)
    agreed(ranks, part.warm_up)
    return num_sets, check


def _is_compiled(case: CommCase) -> bool:
    """Return whether a compiled loop is to issue the calls, whose host time a sample has."""
    return case.api is Api.NCCL and case.mode is Mode.QUEUED and case.device == "cuda"


def _beside(by_rank: Sequence[tuple[list[float], list[float], str]]) -> Beside | None:
    """Return None where on some rank no call of the compute was as short as a batch."""
    alones, togethers, backends = zip(*by_rank, strict=True)
    if not all(togethers):
        return None
    return Beside(
        alone_s=tuple(map(tuple, alones)),
        together_s=tuple(map(tuple, togethers)),
        backend_run=backends[0],
    )


_BATCH_S = 0.1
_MOST_TRIES = 12
# The host's time per call as long as it is not known: torch.distributed takes 40 to 60 us.
_ISSUE_S = 100e-6
_LONGEST_LEAD_S = 0.25
# Approximate duration of the alignment of ranks, during which the compute already runs.
_START_S = 5e-3


@dataclass(slots=True, kw_only=True)
class CallSamples:
    """Samples of this rank; of each batch their count, and the arrival delays of all ranks."""

    seconds: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    late_s: list[list[float]] = field(default_factory=list)
    issue_s: list[float] = field(default_factory=list)
    together_s: list[float] = field(default_factory=list)


def collect(
    ranks: Ranks,
    timer: Timer,
    compute: "ConcurrentCompute | None",
    sample_s: float,
    effort: Effort,
    num_samples: int | None,
    most: int,
) -> CallSamples:
    """Sample until rank 0 decides from all ranks' maxima that the samples suffice.

    sample_s: roughly, the same on every rank. num_samples: exactly so many. most: of a batch.
    """
    samples = CallSamples()
    batches = list[list[float]]()
    longest_s = min(ranks.gather(compute.longest_s if compute else math.inf))
    length_s = min(_BATCH_S, effort.sample_s / effort.min_batches, longest_s / 4)
    most = max(1, min(most, int(length_s / max(sample_s, 1e-9))))
    tries = 0
    begin = time.monotonic()
    issue_s = _ISSUE_S
    stretch = margin = 1.5

    def enough() -> bool:
        if num_samples is not None:
            return sum(map(len, batches)) >= num_samples
        return is_enough(batches, time.monotonic() - begin, effort)

    while True:  # rank 0 ends it, for all
        count = most if num_samples is None else min(most, num_samples - sum(map(len, batches)))
        if timer.method.startswith(Mode.AHEAD):
            lead_s = margin * issue_s * (count * timer.calls_per_sample + 2)
            timer.lead_s = min(lead_s, _LONGEST_LEAD_S)
        cover_s = stretch * count * sample_s + _START_S + timer.lead_s
        batch, together = agreed(ranks, lambda: _batch(timer, compute, count, cover_s))  # noqa: B023
        by_rank = ranks.gather(
            (batch.seconds, batch.began_s, together is not None, batch.is_late, batch.issue_s)
        )
        issue_s = max(own_s for *_, own_s in by_rank) or issue_s
        is_late = any(row[3] for row in by_rank)
        if is_late or not all(row[2] for row in by_rank):
            # The host, or on some rank the compute, ended too late or early: not counted.
            tries += 1
            agreed(ranks, lambda: _give_up_after(tries, is_late=is_late))  # noqa: B023  called at once
            if is_late:
                margin *= 2
            else:  # more compute per sample; fewer samples where it cannot last that long
                stretch *= 2
                most = count if stretch * count <= longest_s / sample_s else max(1, count // 2)
            continue
        tries = 0
        first_s = min(began_s for seconds, began_s, *_ in by_rank if seconds)
        samples.seconds += batch.seconds
        samples.issue_s.append(batch.issue_s)
        samples.together_s += together or []
        samples.late_s.append([max(0.0, began_s - first_s) for _, began_s, *_ in by_rank])
        batches.append(slowest_per_sample([seconds for seconds, *_ in by_rank if seconds]))
        samples.counts.append(len(batches[-1]))
        if ranks.decide(enough):
            return samples


def _batch(
    timer: Timer, compute: "ConcurrentCompute | None", count: int, cover_s: float
) -> tuple[Batch, list[float] | None]:
    """Return samples, and seconds of the concurrent calls. The compute ends with the batch."""
    if compute is None:
        return timer.sample(count), []
    compute.start(cover_s)
    try:
        batch = timer.sample(count)
    except BaseException:
        compute.stop(None)
        raise
    return batch, compute.stop(batch.span)


def _give_up_after(tries: int, *, is_late: bool) -> None:
    if tries > _MOST_TRIES:
        text = "the concurrent compute ends before the collective; choose a longer one"
        if is_late:
            text = "the host cannot enqueue these calls ahead; use --mode queued or graph"
        raise RuntimeError(text)
