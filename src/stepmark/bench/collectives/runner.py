"""Runs cases of communication one after the other; each record goes to a sink at once.

Ranks outside a case's communicator go through the same steps with nothing to do, so that all
can agree on each.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from stepmark.bench.agree import CaseFailedError, agreed
from stepmark.bench.collectives import buffers, nccl_api, offered, sampling
from stepmark.bench.collectives.communicators import Communicators
from stepmark.bench.collectives.trial import Trial, backend_run, place
from stepmark.bench.rig import Rig, own_stream, quick_release, release
from stepmark.bench.stopping import Effort
from stepmark.bench.telemetry import Sampler
from stepmark.core.collectives import Api
from stepmark.core.comm_case import CommCase
from stepmark.core.record import Arrivals, Beside, Measured, Record, Samples, Skipped
from stepmark.core.stats import summarize
from stepmark.core.units import format_bytes

# A second of samples in at least five batches: what repeats is the batch, as with operators.
DEFAULT = Effort(sample_s=1.0, soak_s=0.0, target_ci_rel=0.005, min_batches=5)
# What a check takes beside the buffers, at most.
_CHECK_BYTES = 2**29


_UNSUPPORTED: dict[Api, Callable[[CommCase], str | None]] = {
    Api.TORCH: offered.unsupported,
    Api.NCCL: nccl_api.unsupported,
}


class Guard(Protocol):
    """Who notices when a case hangs."""

    def begin(self, position: int, limit_s: float) -> None: ...

    def idle(self, limit_s: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Beyond the cases. iterations: so many timed calls; None: until it is enough.

    In graph mode iterations are captured and the graph is launched `graphs` times.
    """

    iterations: int | None = None
    graphs: int = 0
    warmups: int = 5
    checks: int = 1
    timeout_s: float = 60.0
    launch: int = 1


def run(
    plan: Iterable[tuple[int, CommCase]],
    rig: Rig,
    effort: Effort,
    options: Options,
    communicators: Communicators,
    guard: Guard,
    *,
    run_id: str,
    sink: Callable[[Record], None],
) -> None:
    """Measure each case of (position, case); rank 0 passes records on.

    A broken case does not end the run; a lost rank does (LostPeersError).
    """
    todo = list(plan)
    begin = time.monotonic()
    with quick_release():
        for done, (position, case) in enumerate(todo):
            share = effort
            if effort.total_s is not None:
                left = max(0.0, begin + effort.total_s - time.monotonic()) / (len(todo) - done)
                share = effort.shortened(max(rig.ranks.gather(left)))
            guard.begin(position, options.timeout_s + share.sample_s)
            record = _run_case(case, rig, share, options, communicators, run_id)
            if rig.ranks.rank == 0:
                sink(dataclasses.replace(record, launch=options.launch))
            guard.idle(options.timeout_s)


def _run_case(
    case: CommCase,
    rig: Rig,
    effort: Effort,
    options: Options,
    communicators: Communicators,
    run_id: str,
) -> Record:
    try:
        reasons = rig.ranks.gather(agreed(rig.ranks, lambda: _why_not(case, rig)))
        for rank, found in enumerate(reasons):
            if found:
                where = f" (rank {rank})" if len(set(reasons)) > 1 else ""
                text, needed = found
                return Skipped(
                    run_id=run_id, case=case, reason=text + where, needed_bytes=needed
                )
        with own_stream(rig):
            trial = Trial(case, rig, communicators.get(case), options)
            return _measure(trial, case, rig, effort, options, run_id)
    except CaseFailedError as failed:
        if failed.cause != "oom":
            communicators.forget(case)
        return failed.record(run_id, case)
    finally:
        release(rig)


def _why_not(case: CommCase, rig: Rig) -> tuple[str, int | None] | None:
    """The reason why this rank cannot run the case, and the bytes it would need."""
    if reason := _UNSUPPORTED[case.api](case):
        return reason, None
    seat = place(case, rig.ranks.rank)
    if seat is None:
        return None
    needed = buffers.needed_bytes(*seat) + min(_CHECK_BYTES, 16 * case.message_bytes)
    free = rig.free_bytes()
    if needed > free * 0.95:
        return f"needs {format_bytes(needed)}, {format_bytes(free)} are free", needed
    return None


def _measure(
    trial: Trial, case: CommCase, rig: Rig, effort: Effort, options: Options, run_id: str
) -> Measured:
    """All ranks call it, members or not. Raises CaseFailedError on all together."""
    ranks, started_at = rig.ranks, time.time()
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)
    num_sets = min(ranks.gather(trial.sets_that_fit()))
    agreed(ranks, lambda: trial.allocate(num_sets))
    check = agreed(ranks, trial.check)
    agreed(ranks, trial.bind)
    agreed(ranks, trial.warm_up)
    estimate_s = max(ranks.gather(agreed(ranks, trial.estimate)))
    timer = agreed(ranks, lambda: trial.timer(estimate_s))
    k = max(ranks.gather(timer.calls_per_sample))
    guest = agreed(ranks, trial.company)
    alone_s = agreed(ranks, lambda: guest.alone() if guest else [])
    sampler, begin = Sampler(rig.device_index), time.monotonic()
    with sampler:
        taken = sampling.collect(ranks, timer, guest, estimate_s * k, effort, trial.samples(k))
    each = [value / trial.operations_per_call for value in taken.seconds]
    issue_s = summarize(taken.issue_s).median if taken.issue_s else 0.0
    beside = (alone_s, taken.together_s, guest.backend_run if guest else "")
    everyone = ranks.gather(
        (each, check, sampler.telemetry(), issue_s, beside, _peak_memory(rig))
    )
    seconds, checks, telemetry, issues, besides, peaks = zip(
        *(everyone[rank] for rank in case.members), strict=True
    )
    return Measured(
        run_id=run_id,
        case=case,
        samples=Samples(
            seconds=tuple(map(tuple, seconds)),
            method=timer.method,
            calls_per_sample=k,
            num_sets=num_sets,
            wall_s=time.monotonic() - begin,
        ),
        checks=checks if options.checks else (),
        telemetry=telemetry,
        backend_run=backend_run(case),
        peak_memory_bytes=None if None in peaks else max(peaks),
        started_at=started_at,
        arrivals=Arrivals(
            late_s=tuple(tuple(batch[rank] for batch in taken.late_s) for rank in case.members),
            error_s=max(ranks.gather(ranks.offset_error_s)),
            issue_s=issues,
            warmup_calls=options.warmups,
        ),
        beside=_beside(besides) if case.beside else None,
    )


def _beside(of_ranks: Sequence[tuple[list[float], list[float], str]]) -> Beside | None:
    """None where on some rank no call of the compute was as short as a batch."""
    alones, togethers, backends = zip(*of_ranks, strict=True)
    if not all(togethers):
        return None
    return Beside(
        alone_s=tuple(map(tuple, alones)),
        together_s=tuple(map(tuple, togethers)),
        backend_run=backends[0],
    )


def _peak_memory(rig: Rig) -> int | None:
    device = rig.ranks.device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
