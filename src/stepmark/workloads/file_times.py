"""Times that a workload file has of its operations and of their host, and what it lacks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from stepmark.step.workload import CommOp, ComputeOp, Kernel, Operation, Workload, pass_of
from stepmark.step.workload_stages import missing_pipeline
from stepmark.timeline.ledger import Work, work_of_op
from stepmark.timeline.step_cost import known_time
from stepmark.workloads.formats.aicb_line import column_excess

STEP = "step, s"  # setting: the step of the trace, from its first GPU event to its last
_HOST = "host {}, s"  # setting: time of the host in a pass


def host_settings(times_s: Mapping[str, float]) -> dict[str, float]:
    """Return settings with the host's time by pass."""
    return {_HOST.format(name): time_s for name, time_s in times_s.items()}


def any_in(workload: Workload) -> bool:
    """Return whether any operation has a time."""
    return any(known_time(op) is not None for op in _issued(workload))


def host_times(workload: Workload) -> Callable[[Operation], float]:
    """Return the host's time for an operation; all of a pass have the same."""
    counts: Counter[str] = Counter()
    for op, count in _issued(workload).items():
        counts[pass_of(op)] += count
    times = {name: workload.settings.get(_HOST.format(name)) for name in counts}
    num_stages = len(workload.stages)
    per_op = {
        name: num_stages * time / counts[name]
        for name, time in times.items()
        if isinstance(time, float)
    }
    return lambda op: per_op.get(pass_of(op), 0.0)


def has_host(workload: Workload) -> bool:
    """Return whether the file has times of the host."""
    return any(map(host_times(workload), _issued(workload)))


def notes(workload: Workload) -> Iterator[str]:
    """Yield what of a prediction is the file's."""
    issued, texts = _issued(workload), []
    for kind, name in ((ComputeOp, "computations"), (CommOp, "messages")):
        own = {op: count for op, count in issued.items() if isinstance(op, kind)}
        timed = sum(count for op, count in own.items() if known_time(op) is not None)
        texts += [f"{timed} of {sum(own.values())} {name}"] if own else []
    yield (
        f"times of {' and '.join(texts)} are the workload file's own, with the clock and the "
        "contention that there were"
    )


def gaps(workload: Workload) -> Iterator[str]:
    """Yield what of a training step the file lacks, so that the step takes longer."""
    ops = [op for op in _issued(workload) if isinstance(op, ComputeOp)]
    if not ops:
        yield "the file has no computation: the step is one of communication alone"
    if stages := missing_pipeline(workload):
        yield f"the file has {stages}: no pipeline is modelled, and its bubble is not known"
    if ops and workload.rules == "aicb":  # its lines of computation are matrix products
        works = {work_of_op(op) for op in ops if not isinstance(op.op, Kernel)}
        if missing := [str(work) for work in _OF_A_STEP if work not in works]:
            yield f"the file has no computation of these kinds: {', '.join(missing)}"


def has_excess(workload: Workload) -> bool:
    """Return whether the file's products are larger than the step's, as AICB's can be."""
    tp = workload.groups["tp"].size if "tp" in workload.groups else 1
    return workload.rules == "aicb" and column_excess(_issued(workload), tp) > 1


_OF_A_STEP = (Work.ATTENTION, Work.ELEMENTWISE, Work.LOSS, Work.OPTIMIZER)


def _issued(workload: Workload) -> Counter[Operation]:
    """Return how often each operation runs in all stages, without mere waits."""
    counts: Counter[Operation] = Counter()
    for stage in range(len(workload.stages)):
        for op, count in workload.tally(stage).items():
            if isinstance(op, CommOp) or not op.is_wait:
                counts[op] += count
    return counts
