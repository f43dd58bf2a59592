"""AICB's log of a physical run: the columns of its workloads, with times and bandwidths."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stepmark.ground.units import GIB
from stepmark.step.workload import CommOp, Group, Operation, Workload
from stepmark.workloads.formats.aicb import FORMAT, line_of
from stepmark.workloads.formats.aicb_line import EPOCH_END, HEADER, Lines, no_setup


def write(workload: Workload, iterations: Iterable[Sequence[float]]) -> Iterator[str]:
    """Yield the operations of rank 0 with their times.

    iterations: seconds of each operation, not a number where it has no time. As in AICB,
    times are in ms and bandwidths in GiB/s; the bus factor is nccl-tests' (AICB has 1 for an
    all-to-all). The end of an iteration has no time: it is not that of a timed pass.
    """
    yield HEADER + "\n"
    yield no_setup(workload.world_size)
    yield EPOCH_END + "\n"
    line = Lines(workload, computation=True)
    is_aicb = FORMAT in workload.origin
    ops = list(workload.expand())
    for times in iterations:
        for op, time_s in zip(ops, times, strict=False):
            text = line_of(op, workload.groups) if is_aicb else line(op)
            yield _logged(text, op, workload.groups, time_s) if text else ""
        yield EPOCH_END + "\n"


def _logged(text: str, op: Operation, groups: Mapping[str, Group], time_s: float) -> str:
    """Return a line with its time and bandwidths, where it has them."""
    if math.isnan(time_s):
        return text
    rates = [0.0, 0.0]
    if isinstance(op, CommOp) and time_s:
        group = groups[op.group]
        num_bytes = op.message_bytes(group), op.bus_bytes(group)
        rates = [size / time_s / GIB for size in num_bytes]
    known = ",".join([f"{time_s * 1e3:.6g}", *(f"{rate:.4g}" for rate in rates)])
    return text.replace(",None,None,None,1\n", f",{known},1\n")
