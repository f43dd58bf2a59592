"""The log of a replay: of a record of a run, or of a replay that is started from Python."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from stepmark.cases.comm_curve import Curve
from stepmark.cases.record import Measured, Record
from stepmark.cases.replay_case import Compute, ReplayCase
from stepmark.collectives.measured_curves import run_curves
from stepmark.ground.errors import ConfigError
from stepmark.ground.read_text import read_npy
from stepmark.replays.replay_log_text import ReplayLog
from stepmark.step import native
from stepmark.store import plans
from stepmark.store.runs import TRACES
from stepmark.workloads import file_times


def of_run(
    path: Path, records: Iterable[Record], curves: Sequence[Curve] = ()
) -> Iterator[tuple[str, ReplayLog]]:
    """Yield the file and the log of each replay that a run measured.

    A replay whose file of times is lost is left out, and stderr says so.
    """
    for record in records:
        if isinstance(record, Measured) and isinstance(record.case, ReplayCase):
            try:
                log = of_record(path, record, curves)
            except ConfigError as error:
                sys.stderr.write(f"# {error}\n")
                continue
            yield record.case.file, log


def of_record(path: Path, record: Measured, curves: Sequence[Curve] = ()) -> ReplayLog:
    """Return the log of a measured replay of a run. curves: of other runs.

    Raises ConfigError where its file of times cannot be read.
    """
    case = record.case
    replayed = record.replay
    assert isinstance(case, ReplayCase)
    assert replayed is not None
    plan = plans.read(path)
    file = path / TRACES / replayed.spans
    spans = read_npy(file, "replay")
    workload = native.decode(plan.workload.encode())
    step_s = workload.settings.get(file_times.STEP)
    is_whole = case.compute is Compute.SLEEP and not (case.shrunk_from or case.compute_from)
    checks = record.checks
    return ReplayLog(
        workload=workload,
        seconds=np.array(record.samples.seconds),
        spans=spans,
        blocked_s=replayed.blocked_s,
        event_s=replayed.event_s,
        num_warmups=plan.how.replay.warmups,
        wrong=(record.num_wrong, sum(check.num_compared for check in checks))
        if checks
        else None,
        curves=curves or run_curves(path),
        step_of_trace_s=step_s if is_whole and isinstance(step_s, float) else None,
    )
