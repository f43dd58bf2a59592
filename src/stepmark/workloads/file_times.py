"""Times that a workload file has of its operations and of their host, and what it lacks."""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

from stepmark.step.workload import CommOp, ComputeOp, Kernel, Operation, Workload, pass_of
from stepmark.step.workload_stages import missing_pipeline
from stepmark.timeline.ledger import Work, work_of_op
from stepmark.timeline.step_cost import known_time
from stepmark.workloads.formats.aicb_line import column_excess

STEP = "step, s"  # setting: the step of the trace, from its first GPU event to its last
_HOST = "host {}, s"  # setting: time of the host in a pass
_OF_A_STEP = (Work.ATTENTION, Work.ELEMENTWISE, Work.LOSS, Work.OPTIMIZER)


def host_settings(times_s: Mapping[str, float]) -> dict[str, float]:
    """Return settings with the host's time by pass."""
    return {_HOST.format(name): time_s for name, time_s in times_s.items()}


class FileTimes:
    """Times of a workload file. issued: how often each operation runs."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.issued = workload.issued()

    @property
    def has_rows(self) -> bool:
        """Return whether operations are rows of SimAI's text."""
        return self._workload.rules == "simai"

    @property
    def has_any(self) -> bool:
        """Return whether any operation has a time."""
        return any(known_time(op) is not None for op in self.issued)

    @cached_property
    def _host_s(self) -> dict[str, float]:
        """Seconds of the host for an operation, by pass: all of a pass have the same."""
        counts: Counter[str] = Counter()
        for op, count in self.issued.items():
            counts[pass_of(op)] += count
        times = {name: self._workload.settings.get(_HOST.format(name)) for name in counts}
        num_stages = len(self._workload.stages)
        return {
            name: num_stages * time / counts[name]
            for name, time in times.items()
            if isinstance(time, float)
        }

    def host_s(self, op: Operation) -> float:
        """Return the host's time for an operation; 0 where the file has none."""
        return self._host_s.get(pass_of(op), 0.0)

    @property
    def has_host(self) -> bool:
        """Return whether the file has times of the host."""
        return any(self._host_s.values())

    @property
    def has_excess(self) -> bool:
        """Return whether the file's products are larger than the step's, as AICB's can be."""
        workload = self._workload
        tp = workload.groups["tp"].size if "tp" in workload.groups else 1
        return workload.rules == "aicb" and column_excess(self.issued, tp) > 1

    def note(self, *, has_messages: bool = True) -> str:
        """Return what of a prediction is the file's. has_messages: their times are."""
        texts = []
        kinds = ((ComputeOp, "computations"), (CommOp, "messages"))
        for kind, name in kinds if has_messages else kinds[:1]:
            own = {op: count for op, count in self.issued.items() if isinstance(op, kind)}
            timed = sum(count for op, count in own.items() if known_time(op) is not None)
            texts += [f"{timed} of {sum(own.values())} {name}"] if own else []
        return (
            f"times of {' and '.join(texts)} are the workload file's own, with the clock and "
            "the contention that there were"
        )

    @cached_property
    def gaps(self) -> tuple[str, ...]:
        """What of a training step the file lacks, so that the step takes longer."""
        ops = [op for op in self.issued if isinstance(op, ComputeOp)]
        gaps = []
        if not ops:
            gaps.append("the file has no computation: the step is one of communication alone")
        if stages := missing_pipeline(self._workload):
            text = f"the file has {stages}: no pipeline is modelled, and its bubble"
            gaps.append(f"{text} is not known")
        if ops and self._workload.rules == "aicb":  # its lines of computation are products
            works = {work_of_op(op) for op in ops if not isinstance(op.op, Kernel)}
            if missing := [str(work) for work in _OF_A_STEP if work not in works]:
                kinds = ", ".join(missing)
                gaps.append(f"the file has no computation of these kinds: {kinds}")
        return tuple(gaps)
