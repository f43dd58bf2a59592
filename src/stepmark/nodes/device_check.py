"""One device of a node check, in a process of its own that can be killed.

`python -m stepmark.nodes.device_check list DEVICE` prints the device kind and names, and
`... check FILE DEVICE PLACE END LAUNCHES` measures the first visible device. FILE holds the
result so far and the stage in progress, so that a hang has a name. END: of --budget, on the
monotonic clock; "" without one.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from stepmark.cases.case import OpCase
from stepmark.cases.comm_case import CommCase
from stepmark.cases.plan import How, OpHow, Plan, entries
from stepmark.cases.record import AnyCase, Measured, Record, Skipped
from stepmark.ground.dtypes import DType
from stepmark.ground.errors import StepmarkError
from stepmark.ground.options import load
from stepmark.ground.units import GIB, MIB, format_bytes
from stepmark.measuring.machine import machine
from stepmark.measuring.measure import measure_quietly
from stepmark.measuring.rank import TEST_HOOK
from stepmark.model.device import find_device
from stepmark.model.ops import Copy, Gemm, HostCopy
from stepmark.nodes.node_check import Fact, Figure, NodeCheck, Remark, host_of, merged, write
from stepmark.store import plans
from stepmark.store.reader import latest, read_info, read_records
from stepmark.store.view import median_s

_CASE_S = 60.0  # a case that takes longer has failed
_MEMORY_S = 20.0
_RATES_S = {"cuda": 60.0, "cpu": 5.0}  # without --budget
_OPS: dict[str, tuple[Gemm | Copy | HostCopy, ...]] = {
    "cpu": (Gemm(m=1024, n=1024, k=1024, dtype=DType.FP32), Copy(num_bytes=64 * MIB)),
    "cuda": (
        Gemm(m=8192, n=8192, k=8192, dtype=DType.BF16),
        Copy(num_bytes=GIB),
        HostCopy(num_bytes=256 * MIB, direction="h2d"),
        HostCopy(num_bytes=256 * MIB, direction="d2h"),
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Carry out one of the two commands. Returns the exit code."""
    if hook := os.environ.get(TEST_HOOK):
        importlib.import_module(hook)
    try:
        if arguments[0] == "list":
            here = machine(arguments[1] or None)
            count = here.num_accelerators or 0
            sys.stdout.write(json.dumps({"device": here.device, "num_accelerators": count}))
            return 0
        file, device, place, end, launches = arguments[1:]
        _check(Path(file), device, place, end, int(launches))
    except StepmarkError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _check(file: Path, device: str, place: str, end: str, launches: int) -> None:
    """Measure the device stage by stage; the file has what is known after each."""
    bench = "stepmark.nodes.bench_node_check"
    empty = NodeCheck(
        host=host_of(place), checked_at=datetime.now(UTC).isoformat(timespec="seconds")
    )

    def remarks(texts: Sequence[str]) -> tuple[Remark, ...]:
        return _remarks([place], texts)

    write(replace(empty, stage="reading the state of the device"), file)
    before = load(f"{bench}:state")(device)
    facts = load(f"{bench}:facts")(before)
    result = replace(
        empty,
        not_tested=remarks(load(f"{bench}:not_tested")(before)),
        facts=tuple(Fact(where=place, name=name, value=facts[name]) for name in facts),
    )
    write(replace(result, stage="measuring rates"), file)
    budget_s = _left_s(end, _RATES_S[device])
    plan = Plan(
        command="op",
        device=device,
        world_size=1,
        options={"budget": f"{budget_s}s" if end else None},
        how=How(op=OpHow(budget_s=budget_s, timeout_s=_CASE_S)),
        entries=entries(
            [OpCase(op=op, backend="torch", device=device) for op in _OPS[device]], launches
        ),
    )
    _, run = measure_quietly(plan, str(file.with_suffix("")))
    rates = result_of(run, empty, lambda case: (place,))
    if device == "cpu":
        reason = "copies between host and device: a CPU has no memory of its own"
        rates = replace(rates, not_tested=remarks([reason]))
    result = merged(result, [rates])
    write(replace(result, stage="testing memory"), file)
    memory = load(f"{bench}:check_memory")(device, limit_s=_left_s(end, _MEMORY_S))
    texts = remarks([f"memory test: {memory.text}"])
    is_wrong = memory.num_wrong > 0
    tested = replace(empty, failures=texts) if is_wrong else replace(empty, notes=texts)
    result = merged(result, [tested])
    write(replace(result, stage="reading the state of the device again"), file)
    after = load(f"{bench}:state")(device)
    changes = replace(
        empty,
        failures=remarks(load(f"{bench}:failures")(before, after)),
        notes=remarks(load(f"{bench}:notes")(before, after)),
    )
    write(merged(result, [changes]), file)


def _left_s(end: str, default_s: float) -> float:
    """Return the seconds until the end of --budget, and hardly any after it."""
    return max(0.1, float(end) - time.monotonic()) if end else default_s


def result_of(
    run: Path,
    empty: NodeCheck,
    where: Callable[[AnyCase], tuple[str, ...]],
) -> NodeCheck:
    """Return the figure, failure or reason of each case of a run that has a plan.

    where: the places of a case; () for one that has no rate.
    """
    cases = {entry.case.case_id: entry.case for entry in plans.read(run).entries}
    records: dict[str, list[Record]] = {case_id: [] for case_id in cases}
    has_run = (run / "run.json").is_file()
    for record in latest(read_records(run)) if has_run else ():
        records.setdefault(record.case.case_id, []).append(record)
    device = read_info(run).environment.devices[0].name if has_run else ""
    parts = [
        _case_result(case, records[case_id], empty, where(case), device)
        for case_id, case in cases.items()
        if where(case)
    ]
    return merged(empty, parts)


def _case_result(
    case: AnyCase,
    records: list[Record],
    empty: NodeCheck,
    where: tuple[str, ...],
    device: str,
) -> NodeCheck:
    name = figure_name(case)
    measured = [record for record in records if isinstance(record, Measured)]
    failures = []
    unclear: list[str] = []
    notes: list[str] = []
    if num_wrong := sum(record.num_wrong for record in measured):
        failures.append(f"{name}: {num_wrong} wrong values")
    for record in records:
        if isinstance(record, Skipped):
            (notes if measured else unclear).append(f"{name}: skipped: {record.reason}")
        elif not isinstance(record, Measured):
            failures.append(f"{name}: {record.cause}: {record.message}")
    if not records:
        unclear.append(f"{name}: not measured")
    figures = []
    if measured:
        amount, unit, peak = _work(case, device)
        figures.append(
            Figure(
                name=name,
                unit=unit,
                values=tuple(amount / median_s(record) for record in measured),
                where=where,
                device=device,
                peak=peak,
            )
        )
    places = ["-".join(where)]
    if len(hosts := dict.fromkeys(map(host_of, where))) > 1:
        places = list(hosts)
        unclear += [f"{text}; which end is the cause is not known" for text in failures]
        failures = []
    return replace(
        empty,
        figures=tuple(figures),
        failures=_remarks(places, failures),
        unclear=_remarks(places, unclear),
        notes=_remarks(places, notes),
    )


def _remarks(places: Sequence[str], texts: Sequence[str]) -> tuple[Remark, ...]:
    once = dict.fromkeys(texts)
    return tuple(Remark(where=place, text=text) for place in places for text in once)


def figure_name(case: AnyCase) -> str:
    """Return the name of a case's figure; its first word is the family."""
    if isinstance(case, OpCase):
        dtype = f" {case.dtype}" if case.op.flops else ""
        return f"{case.family} {case.op.shape_text}{dtype}"
    assert isinstance(case, CommCase)
    return f"{case.family} {format_bytes(case.message_bytes)}, {case.num_ranks} ranks"


def _work(case: AnyCase, device: str) -> tuple[float, str, float | None]:
    """Return the work of one call, the unit of its rate, and the data sheet's peak."""
    spec = find_device(device)
    if isinstance(case, CommCase):
        return case.message_bytes * case.busbw_factor, "B/s", None
    assert isinstance(case, OpCase)
    if case.op.flops:
        return case.op.executed_flops, "FLOP/s", spec.peak(case.dtype) if spec else None
    is_hbm = isinstance(case.op, Copy)
    return case.op.bytes_moved, "B/s", spec.hbm_bytes_per_s if spec and is_hbm else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
