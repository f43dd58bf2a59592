"""Runs training cases one after the other; each record goes to a sink at once.

Over 250 lines because the ways in which a case can end are told apart in one place.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from stepmark.bench.agree import CaseFailedError, agreed
from stepmark.bench.ranks import Ranks
from stepmark.bench.rig import Rig, release
from stepmark.bench.telemetry import Sampler
from stepmark.bench.training import alarm, data, extras, loop, refusals, trainer
from stepmark.bench.training.facts import State, facts, forget_counts, judge
from stepmark.bench.training.mesh import Place, Share, place_of
from stepmark.core.message import MessageKind, Tally
from stepmark.core.record import Failed, Measured, Record, Skipped
from stepmark.core.train_case import TrainCase
from stepmark.core.train_memory import largest_mbs
from stepmark.core.training import CompileScope, Schedule

_STEPS, _CYCLES = 30, 10
# Of a device's memory: the rest is the context, NCCL's buffers and what lies between tensors.
_USABLE = 0.93


class Guard(Protocol):
    """Who notices when a case hangs."""

    def begin(self, position: int, limit_s: float) -> None: ...

    def idle(self, limit_s: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Beyond the cases. steps: steady samples wanted; None: 30, or 10 whole cycles."""

    steps: int | None = None
    # For all cases together, by the wall clock: building, compiling and warm-up count. A case
    # whose share they used up still takes its first cycle and a few samples.
    budget_s: float | None = None
    timeout_s: float = 600.0
    launch: int = 1
    messages: bool = False
    profile: bool = False
    profile_ranks: tuple[int, ...] = (0,)
    find_batch: bool = False  # cases are one model by rising mbs
    too_large_mbs: int | None = None  # find_batch: ran out of memory on earlier ranks
    compile_fallback: bool = False


def run(
    plan: Iterable[tuple[int, TrainCase]],
    rig: Rig,
    options: Options,
    guard: Guard,
    *,
    run_id: str,
    sink: Callable[[Record], None],
    stuck: Callable[[Failed, int], None],
    folder: Path | None = None,
) -> int | None:
    """Measure each case of (position, case); rank 0 passes records on.

    Returns the position from which new ranks should go on, since after a failure devices and
    communicators are in no known state; None when all is done. stuck(record, position) is
    called on rank 0, in a thread, where another rank failed and this one hangs in a collective;
    it must not return. folder: where traces go, on every rank. Raises KeyboardInterrupt after
    the record of an interrupted case, LostPeersError for a rank that is gone.
    """
    todo = list(plan)
    begin = time.monotonic()
    too_large = options.too_large_mbs
    for done, (position, case) in enumerate(todo):
        guard.begin(position, options.timeout_s + (options.budget_s or 0.0))
        end_s = None
        if options.budget_s is not None:
            left = max(0.0, begin + options.budget_s - time.monotonic()) / (len(todo) - done)
            end_s = time.monotonic() + min(rig.ranks.gather(left))
        if options.find_batch and too_large is not None:
            reason = f"mbs {too_large} ran out of memory already"
            record: Record = Skipped(run_id=run_id, case=case, reason=reason)
            interrupted = False
        else:
            record, interrupted = _run_case(
                case, rig, options, position, end_s, run_id=run_id, stuck=stuck, folder=folder
            )
        _forget(rig)  # a rank that dies in this still dies in a case
        if rig.ranks.rank == 0:
            sink(replace(record, launch=options.launch))
        guard.idle(options.timeout_s)
        if interrupted:
            raise KeyboardInterrupt
        if isinstance(record, Failed):
            if record.cause == "oom":
                too_large = case.mbs
            if not (options.find_batch and too_large) and done + 1 < len(todo):
                return position + 1
    return None


def _forget(rig: Rig) -> None:
    """Leave nothing of a case to the next: its memory, its compiled code, what was counted.

    Of one function torch compiles eight variants at most, then runs it as it is.
    """
    torch.compiler.reset()
    forget_counts()
    release(rig)


def _run_case(
    case: TrainCase,
    rig: Rig,
    options: Options,
    position: int,
    end_s: float | None,
    *,
    run_id: str,
    stuck: Callable[[Failed, int], None],
    folder: Path | None,
) -> tuple[Record, bool]:
    """The record, and whether Ctrl-C cut it short."""
    try:
        reasons = rig.ranks.gather(agreed(rig.ranks, lambda: refusals.why_not(case, rig)))
        for rank, reason in enumerate(reasons):
            if reason:
                where = f" (rank {rank})" if len(set(reasons)) > 1 else ""
                return Skipped(run_id=run_id, case=case, reason=reason + where), False
        bell = alarm.Alarm(
            rig.ranks, position, lambda told: _stuck(told, case, run_id, stuck, rig)
        )
        with bell:
            return _measure(case, rig, options, end_s, bell, run_id=run_id, folder=folder)
    except CaseFailedError as error:
        may = options.compile_fallback and case.compile is not CompileScope.NONE
        if not may or error.cause != "error":
            return _with_estimate(error.record(run_id, case), case, rig), False
    # Not in the handler: the error holds the model that failed.
    _forget(rig)
    case = replace(case, compile=CompileScope.NONE, compile_mode="default")
    return _run_case(
        case, rig, options, position, end_s, run_id=run_id, stuck=stuck, folder=folder
    )


def _stuck(
    told: alarm.Problem,
    case: TrainCase,
    run_id: str,
    stuck: Callable[[Failed, int], None],
    rig: Rig,
) -> None:
    record = Failed(
        run_id=run_id,
        case=case,
        cause=told.cause,
        message=told.message,
        ranks=(told.rank,),
        traceback=told.trace,
    )
    stuck(_with_estimate(record, case, rig), told.position)


def _with_estimate(record: Failed, case: TrainCase, rig: Rig) -> Failed:
    """What ran out of memory says what would about fit."""
    if record.cause != "oom" or rig.ranks.device.type != "cuda":
        return record
    total = torch.cuda.get_device_properties(rig.ranks.device).total_memory
    most = min(largest_mbs(case, int(total * _USABLE)), case.mbs - 1)
    hint = (
        f"about --mbs {most} should fit (estimate)"
        if most
        else "by estimate no micro-batch fits: more shards, --sac full or --loss-chunks"
    )
    return replace(record, message=f"{record.message.rstrip('.')}. {hint}")


def _measure(
    case: TrainCase,
    rig: Rig,
    options: Options,
    end_s: float | None,
    bell: alarm.Alarm,
    *,
    run_id: str,
    folder: Path | None,
) -> tuple[Measured, bool]:
    ranks, started_at, begin = rig.ranks, time.time(), time.monotonic()

    def all_ranks(step: Callable[[], Any]) -> Any:
        return agreed(ranks, bell.raised_by(step))

    made: trainer.Trainer = all_ranks(lambda: trainer.make(case, ranks.device))
    place = place_of(ranks.rank, case.parallel)
    share = Share(rank=place.cp, num_ranks=case.parallel.cp)
    batches = data.loader(case, place.data_rank, case.parallel.data_ranks, ranks.device, share)
    build_s = time.monotonic() - begin
    work = loop.Loop(case, made, batches, ranks)
    all_ranks(work.first)
    state = State(ranks.device)
    sampler = Sampler(rig.device_index)

    def steady() -> None:
        with sampler:
            work.run(_wanted(case, options), end_s)

    all_ranks(steady)
    seen = state.since(build_s, work.taken.first_s)
    messages, traces = all_ranks(lambda: _aside(work, ranks, case, options, folder))
    everyone = ranks.gather((work.taken.without_losses(), sampler.telemetry(), seen))
    of_ranks, telemetry, states = zip(*everyone, strict=True)
    loss = _mean_losses(work.taken, ranks, place)
    samples, training = facts(case, of_ranks, states, loss)
    return Measured(
        run_id=run_id,
        case=case,
        samples=replace(samples, wall_s=time.monotonic() - begin),
        checks=(judge(loss, case),),
        telemetry=telemetry,
        backend_run=(kernel := extras.attention_kernel(case, ranks.device)),
        peak_memory_bytes=max(filter(None, training.allocated_bytes), default=None),
        started_at=started_at,
        training=replace(
            training,
            attention_run=kernel,
            interrupted=work.taken.interrupted,
            data=data.describe(case),
            messages=messages,
            traces=traces,
        ),
    ), work.taken.interrupted


def _aside(
    work: loop.Loop, ranks: Ranks, case: TrainCase, options: Options, folder: Path | None
) -> tuple[tuple[tuple[MessageKind, Tally], ...], tuple[str, ...]]:
    """Messages and files of traces, where they were asked for and nobody wants to stop."""
    messages: tuple[tuple[MessageKind, Tally], ...] = ()
    traces: tuple[str, ...] = ()
    if options.messages and not work.taken.interrupted:
        messages = extras.messages(work, ranks, case)
    if options.profile and folder and not work.taken.interrupted:
        chosen = ranks.rank in options.profile_ranks
        traces = extras.profile(work, ranks, case, folder, chosen=chosen, launch=options.launch)
    return messages, traces


def _mean_losses(taken: loop.Taken, ranks: Ranks, place: Place) -> tuple[float, ...]:
    """By sample, over data ranks and parts of a sequence; tp ranks have the same one."""
    everyone = ranks.gather([float(one) for one in taken.losses] if place.tp == 0 else [])
    columns = zip(*filter(None, everyone), strict=False)
    return tuple(sum(column) / len(column) for column in columns)


def _wanted(case: TrainCase, options: Options) -> int:
    """Steady samples, in whole cycles."""
    usual = _STEPS if case.schedule is Schedule.STEP else _CYCLES * case.cycle
    wanted = options.steps or usual
    return -(-wanted // case.cycle) * case.cycle
