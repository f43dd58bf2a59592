"""Derive by how much kernels and collectives slow each other down, from profiles of steps.

    python validation/contention.py          slowdowns of each profile, and errors where it is
                                             left out
    python validation/contention.py write    writes src/stepmark/data/contention.toml

A profile tells the slowdowns as a calibration does: equal kernels differ in the share of their
time that overlaps communication (stepmark.predictions.contention). No time of a step is read.
A constant is the median over profiles. Operators that ran beside an endless collective
(results/h200-x4-comm-contention) are printed for comparison and have no part in it.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [] if str(ROOT / "src") in sys.path else [str(ROOT / "src")]

from stepmark.cases.comm_curve import Curve  # noqa: E402
from stepmark.cases.record import Measured  # noqa: E402
from stepmark.cases.train_case import TrainCase  # noqa: E402
from stepmark.collectives.measured_curves import run_curves  # noqa: E402
from stepmark.predictions import contention  # noqa: E402
from stepmark.predictions.contention import COMM, KINDS  # noqa: E402
from stepmark.step.trace_ops import OpTable  # noqa: E402
from stepmark.step.workload import Workload  # noqa: E402
from stepmark.store.reader import latest, read_records  # noqa: E402
from stepmark.tables.launches import CommLaunches, pooled  # noqa: E402
from stepmark.timeline.trace_columns import RankInfo, RankTrace  # noqa: E402
from stepmark.traces.kineto.arrivals import RankParts, rank_parts  # noqa: E402
from stepmark.traces.kineto.kernels import measured_ops  # noqa: E402
from stepmark.traces.trace_files import map_traces, recorded_traces  # noqa: E402
from stepmark.traces.trace_options import KernelsOptions  # noqa: E402
from stepmark.workloads.rules.pytorch.case import of_case  # noqa: E402

OUTPUT = ROOT / "src" / "stepmark" / "data" / "contention.toml"
# Profiled steps of two layers: the first half back to back, the second with pauses.
RUN = ROOT / "results" / "h100-x4-predictions-1"
TRACES = ROOT / "tests" / "data" / "traces" / "fsdp8"
OPERATORS = ROOT / "results" / "h200-x4-comm-contention"
SOURCE = "stepmark results/h100-x4-predictions-1 and tests/data/traces/fsdp8, 2026-11"
HEADER = """\
# Slowdown of kernels while a collective transfers, by kind of work, and of collectives while
# kernels run. Do not edit: derived by `python validation/contention.py write` from profiles of
# FSDP2 steps on 4 H100 and 8 H200 (torch 2.11, NCCL 2.28, 24 of 132 SMs to a collective).
"""

Slowdowns = Mapping[str, float]


def reduced(workload: Workload | None, trace: RankTrace) -> tuple[OpTable, RankParts]:
    """Return the operations of a rank, and its parts of collectives."""
    return measured_ops(trace, workload=workload), rank_parts(trace, lambda _number: True)


def slowdowns_of(
    tables: Sequence[OpTable],
    by_rank: Mapping[int, tuple[RankInfo, RankParts]],
    curves: Iterable[Curve],
) -> Slowdowns:
    """Return the slowdowns by kind that ranks of a step tell.

    Kinds of work that memory bounds count as one, which is their mean.
    """
    by_kind: dict[str, list[float]] = {}
    for work, slowdown in contention.contention(tables).slowdown.items():
        by_kind.setdefault(KINDS[work], []).append(slowdown)
    slowdowns = {kind: sum(own) / len(own) for kind, own in by_kind.items()}
    comm = contention.comm_slowdown(by_rank, curves)
    return slowdowns if comm is None else {**slowdowns, COMM: comm}


def profile(
    files: Iterable[Path | str], workload: Workload | None, curves: Iterable[Curve]
) -> Slowdowns:
    """Return the slowdowns that one job's traces tell."""
    options = KernelsOptions(files=tuple(map(str, files)))
    traces = map_traces(options, partial(reduced, workload), shares=False)
    assert traces is not None
    by_rank = {
        result.info.rank or 0: (result.info, result.value[1]) for result in traces.results
    }
    return slowdowns_of([result.value[0] for result in traces.results], by_rank, curves)


def profiles() -> Iterator[tuple[str, Slowdowns]]:
    """Yield the slowdowns of each profiled step with its name."""
    curves = run_curves(RUN)
    for record in latest(read_records(RUN)):
        is_profile = isinstance(record, Measured) and isinstance(record.case, TrainCase)
        if not is_profile or not record.training or not record.training.traces:
            continue
        if not any("-paused" in name for name in record.training.traces):
            continue  # a whole step, whose traces are not in results/
        files = recorded_traces(RUN, record.training)
        yield (
            f"h100-sxm x4 {record.train.model.name}",
            profile(files, of_case(record.train), curves),
        )
    yield "h200-sxm x8 llama, 8 layers", profile(sorted(TRACES.glob("*.gz")), None, ())


def constants(measured: Iterable[Slowdowns]) -> dict[str, float]:
    """Return the median over profiles of each slowdown."""
    measured = list(measured)
    kinds = (*dict.fromkeys(KINDS.values()), COMM)
    return {
        kind: median(own[kind] for own in measured if kind in own)
        for kind in kinds
        if any(kind in own for own in measured)
    }


def operators() -> Iterator[str]:
    """Yield what a product and a copy took beside an all-reduce of 256 MiB, over alone."""
    records = (each for each in latest(read_records(OPERATORS)) if isinstance(each, Measured))
    for launches in pooled(records, CommLaunches):
        case = launches.case
        times = launches.beside_s()
        if times and case.max_ctas == 32 and case.count * case.dtype.itemsize == 2**28:
            yield f"{case.beside} beside an all-reduce of 256 MiB: {times[1] / times[0]:.2f}"


def show(slowdowns: Slowdowns) -> str:
    return ", ".join(f"{kind} {slowdown:.2f}" for kind, slowdown in slowdowns.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["write"])
    action = parser.parse_args().action
    measured = dict(profiles())
    for name, own in measured.items():
        others = constants(each for other, each in measured.items() if other != name)
        errors = {kind: others[kind] / own[kind] for kind in own if kind in others}
        print(f"{name}: {show(own)}; by the others over it: {show(errors)}")
    for line in operators():
        print(line)
    found = constants(measured.values())
    print(f"median: {show(found)}")
    if action == "write":
        lines = [f"{kind} = {slowdown:.2f}" for kind, slowdown in found.items()]
        text = "\n".join([HEADER, "[slowdown]", *lines, f'source = "{SOURCE}"', ""])
        OUTPUT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
