"""Run the cases of a plan one after the other; each record goes to a sink at once."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stepmark.cases.case import OpCase
from stepmark.cases.comm_case import CommCase
from stepmark.cases.kind import KINDS
from stepmark.cases.plan import Entry, Plan
from stepmark.cases.record import AnyCase, Failed, Measured, Record, Skipped
from stepmark.ground.options import load
from stepmark.measuring.context import MeasureContext, is_broken, quick_release, release
from stepmark.measuring.ranks import CaseFailedError, agreed

_STORE_S = 100.0  # a file system that is lost may come back
# Calls of a case at least: of its check, its warm-up and its estimate, and a sample.
_FEWEST_CALLS = 5
# The time of a shorter call may be that of its launch, which does not grow with the work.
_LONG_CALL_S = 10e-3


class Guard(Protocol):
    """Ends ranks that hang. It is told the present case and its time limit."""

    def begin(self, position: int, limit_s: float) -> None: ...

    def idle(self, limit_s: float) -> None: ...

    def is_stopping(self) -> bool:
        """Return whether no further case should begin. Only rank 0's answer counts."""


class Bench(Protocol):
    """Measures the cases of one kind. Every rank calls every method, except `abort`.

    The default methods suit cases that leave no state behind and wait for no other rank.
    budget_s: wall seconds that a case has on average; None for no limit.
    """

    @property
    def budget_s(self) -> float | None: ...

    def completed(self, entry: Entry) -> Entry:
        """Return the entry with what only ranks can learn. Raises ConfigError on all ranks."""
        return entry

    def why_not(self, entry: Entry) -> tuple[str, int | None] | None:
        """Return why this rank cannot run the case, and the bytes that it would need."""

    def measure(self, entry: Entry, share_s: float | None) -> Measured:
        """Measure on all ranks within share_s. Raises CaseFailedError on all together."""

    def failed(self, entry: Entry, record: Failed) -> Failed:
        """Clean up after a failed case; return its record, with advice where there is any."""
        return record

    def restarts(self, entry: Entry) -> bool:
        """Return whether only new processes are in a known state after the entry failed."""
        return False

    def limit_s(self, share_s: float | None) -> float:
        """Return the time after which a case with this share is considered hung."""

    def abort(self) -> None:
        """End blocked communication. Called from another thread."""

    def close(self) -> None:
        """Release everything that the next launch must make anew."""


def make_benches(plan: Plan, context: MeasureContext) -> dict[str, Bench]:
    """Return the benches that the plan needs, by kind of case.

    Others are not imported: together they take seconds per rank.
    """
    counts = Counter(entry.case.kind for entry in plan.entries)
    benches: dict[str, Bench] = {}
    for kind, count in counts.items():
        how = getattr(plan.how, kind)
        budget_s = None if how.budget_s is None else how.budget_s / count
        benches[kind] = load(KINDS[kind].bench)(context, how, budget_s=budget_s)
    return benches


@dataclass(slots=True)
class SetUpTime:
    """Mean wall time of a case without its soak and samples, which a budget includes."""

    _seconds: float = 0.0
    _count: int = 0

    def rest_of(self, share_s: float) -> float:
        """Return the seconds of a share that soak and samples may take, a quarter at least."""
        mean_s = self._seconds / self._count if self._count else share_s / 2
        return max(share_s - mean_s, share_s / 4)

    def add(self, seconds: float) -> None:
        self._seconds += seconds
        self._count += 1


class _Budget:
    """The wall time of the cases of one kind; the unused time of one goes to the others."""

    def __init__(self, mean_s: float | None, num_cases: int, *, start_s: float) -> None:
        self._left_s = None if mean_s is None else mean_s * num_cases - start_s
        self.num_left = num_cases

    def share_s(self) -> float | None:
        return None if self._left_s is None else max(0.0, self._left_s) / self.num_left

    def spend(self, seconds: float) -> None:
        self.num_left -= 1
        if self._left_s is not None:
            self._left_s -= seconds


def _work_of(case: AnyCase) -> tuple[object, float]:
    """Return what cases of comparable work share, and the work of a call; 0: not known."""
    match case:
        case OpCase():
            work = max(case.op.flops, case.op.bytes_moved)
            return (case.family, case.backend, case.dtype), work
        case CommCase():
            return (case.family, case.num_ranks), case.message_bytes
    return case.kind, 0.0


def run(
    entries: Sequence[Entry],
    context: MeasureContext,
    benches: Mapping[str, Bench],
    guard: Guard,
    sink: Callable[[Record], None],
    *,
    start_s: float = 0.0,
) -> int | None:
    """Measure the entries of one launch; rank 0 passes each record to the sink.

    start_s: wall time that these processes took to start, which budgets include.

    Returns the position at which new ranks should continue: after the launch, or after a
    failure that leaves processes in no known state. None: all is done. Where there are no new
    ranks, call it again with the entries from that position on. A failed case does not end the
    run; a lost rank does (LostPeersError), and KeyboardInterrupt, raised after the record of an
    interrupted case, or of the last one where the guard is stopping.
    """
    if not entries:
        return None
    launch = entries[0].launch
    current = [entry for entry in entries if entry.launch == launch]
    counts = Counter(entry.case.kind for entry in current)
    start_s /= len(current)
    budgets = {
        kind: _Budget(benches[kind].budget_s, count, start_s=count * start_s)
        for kind, count in counts.items()
    }
    seconds_per_work: dict[object, float] = {}
    with quick_release():
        for done, entry in enumerate(current, start=1):
            bench = benches[entry.case.kind]
            budget = budgets[entry.case.kind]
            begin = time.monotonic()
            guard.begin(entry.position, bench.limit_s(share_s := budget.share_s()))
            if share_s is not None:
                share_s = context.ranks.decide(budget.share_s)
            record = _run_case(entry, context, bench, share_s, seconds_per_work)
            # Before the guard is idle: a crash here is one of the case. The rest of a training
            # step is collected: its modules end with their bench.
            release(context, exempts_rest=entry.case.kind == OpCase.kind)
            if context.ranks.rank == 0:
                guard.begin(entry.position, _STORE_S)
                if isinstance(record, Measured):
                    record = replace(record, levels=context.levels)
                sink(replace(record, launch=launch))
            guard.idle(bench.limit_s(None) + _STORE_S)
            if isinstance(record, Measured) and record.training and record.training.interrupted:
                raise KeyboardInterrupt
            if entry is not entries[-1] and context.ranks.decide(guard.is_stopping):
                raise KeyboardInterrupt
            budget.spend(time.monotonic() - begin)
            if isinstance(record, Failed) and done < len(current):
                is_unusable = any(context.ranks.gather(is_broken(context)))
                if bench.restarts(entry) or is_unusable:
                    return current[done].position
            if not budget.num_left:
                bench.close()  # its resources must not stay during the next kind of case
    return entries[len(current)].position if len(entries) > len(current) else None


def _run_case(
    entry: Entry,
    context: MeasureContext,
    bench: Bench,
    share_s: float | None,
    seconds_per_work: dict[object, float],
) -> Record:
    """Measure a case, unless by earlier ones it takes longer than --budget leaves."""
    case = entry.case
    kind, work = _work_of(case)
    ranks = context.ranks
    try:
        context.check_budget(_FEWEST_CALLS * work * seconds_per_work.get(kind, 0.0))
        reasons = ranks.gather(agreed(ranks, lambda: bench.why_not(entry)))
        for rank, reason in enumerate(reasons):
            if reason is not None:
                text, needed_bytes = reason
                is_same = all(other and other[0] == text for other in reasons)
                return Skipped(
                    run_id=context.run_id,
                    case=case,
                    reason=text if is_same else f"{text} (rank {rank})",
                    needed_bytes=needed_bytes,
                )
        record = bench.measure(entry, share_s)
        call_s = min((min(own) for own in record.samples.seconds if own), default=0.0)
        # On a busy host a call of little work may be long, too: a faster one corrects it.
        if work and (call_s >= _LONG_CALL_S or kind in seconds_per_work):
            seconds_per_work[kind] = min(call_s / work, seconds_per_work.get(kind, math.inf))
        return record
    except CaseFailedError as error:
        if error.cause == "budget":
            return Skipped(run_id=context.run_id, case=case, reason=error.message)
        return bench.failed(entry, error.record(context.run_id, case, entry.launch))
