"""--dry-run: print a plan on any machine, for any device, or write it as JSON or CSV.

Operators have the time that prediction gives them by the device's data sheet, collectives that
of its links, and between hosts of the network with which the device is usually sold.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stepmark.cases.case import Label, OpCase
from stepmark.cases.comm_case import CommCase
from stepmark.cases.flops import per_token
from stepmark.cases.plan import Plan
from stepmark.cases.record import AnyCase
from stepmark.cases.replay_case import ReplayCase
from stepmark.cases.train_case import TrainCase
from stepmark.ground.errors import ConfigError
from stepmark.ground.packages import require
from stepmark.ground.units import MIB, TFLOP, format_bytes, format_time, plural
from stepmark.measuring.machine import Machine
from stepmark.model.collectives import Collective
from stepmark.model.device import DeviceSpec, find_device
from stepmark.model.ops import Custom
from stepmark.model.systems import network_of
from stepmark.predictions.prediction_notes import by_sheet
from stepmark.runs import op_table
from stepmark.step.roofline import limit_of
from stepmark.step.workload import CommOp
from stepmark.step_memory.memory import estimate
from stepmark.store.commands import command_of
from stepmark.tables.export import write_csv, write_json
from stepmark.workloads.rules.pytorch.case import of_case

Row = dict[str, Any]

_WITH_LAW = (  # of which published tables tell how exact it is
    *(Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    *(Collective.ALL_TO_ALL, Collective.BROADCAST, Collective.SENDRECV),
)


def show(plan: Plan, here: Machine, json: str | None = None, csv: str | None = None) -> None:
    """Print the cases of a plan for this machine, or write them to --json and --csv."""
    first = (entry.case for entry in plan.entries if entry.launch == 1)
    cases, unknown = zip(*map(_planned, first), strict=True)
    device = find_device(here.name)
    steps = op_table.steps_of(plan.options, here) if plan.command == "op" else []
    planned = [(case, row) for case in cases for row in _rows(case, device, steps)]
    rows = [row for _, row in planned]
    for note in (
        *plan.notes,
        *_sources(planned, device),
        *filter(None, dict.fromkeys(unknown)),
    ):
        sys.stderr.write(f"# {note}\n")
    for target, write in ((json, write_json), (csv, write_csv)):
        if target:
            write(rows, target)
    if "-" not in (json, csv):
        operators = [(case, row) for case, row in planned if isinstance(case, OpCase)]
        lines = [*op_table.lines(operators, steps)] if operators else []
        others = [_LINES[row["kind"]](row) for row in rows if row["kind"] in _LINES]
        lines += ["", *others] if lines and others else others
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()
    launches = max(entry.launch for entry in plan.entries)
    is_repeated = launches > 1 and len(plan.entries) == launches * len(cases)
    is_shared = len(rows) != len(cases)  # by several places in a model
    counts = (
        plural(len(cases), "case"),
        f"{plural(len(rows), 'row')} (equal operators are measured once)" if is_shared else "",
        f"in {launches} launches" if is_repeated else "",
    )
    sys.stderr.write(f"{', '.join(filter(None, counts))}; none was run\n")


def _sources(planned: Iterable[tuple[AnyCase, Row]], device: DeviceSpec | None) -> list[str]:
    """Return a line on where predicted times are from, of each kind of cases."""
    notes = dict[str, None]()
    for case, row in planned:
        if device is None or not row.get("predicted_s"):
            continue
        if isinstance(case, CommCase) and (network := network_of(device, case.num_ranks)):
            about = (network.about or network.name).partition(";")[0]
            notes[f"predicted times are by the links of {about}; all ranks begin at once"] = (
                None
            )
        else:
            notes[f"predicted times are {by_sheet(device)}"] = None
    return list(notes)


def _planned(case: AnyCase) -> tuple[AnyCase, str]:
    """Return a case of your own operator with its work, or why that is unknown.

    Its function may need a device; one that does not exist, or refuses its arguments, is
    refused.
    """
    if not isinstance(case, OpCase) or not isinstance(case.op, Custom):
        return case, ""
    try:
        require("torch")
        from stepmark.operators.bench.custom import planned  # noqa: PLC0415  needs torch

        with contextlib.redirect_stdout(sys.stderr):  # what a user's file prints is no row
            return planned(case, case.op), ""
    except ConfigError as error:
        # A tensor without data raises TypeError, too, which names its device.
        if error.field == "function" or (
            isinstance(error.__cause__, TypeError | ValueError)
            and "meta" not in str(error.__cause__)
        ):
            raise
        return case, f"at least is unknown without a device: {error}"


def _rows(
    case: AnyCase, device: DeviceSpec | None, steps: Sequence[op_table.Step]
) -> list[Row]:
    if isinstance(case, OpCase):
        rows = [
            _operator_row(case, label, device, steps) for label in case.labels or (Label(),)
        ]
    elif isinstance(case, ReplayCase):
        rows = [{"workload": case.file, "ranks": case.num_ranks, "compute": str(case.compute)}]
    elif isinstance(case, CommCase):
        rows = [_collective_row(case, device)]
    else:
        rows = [step_row(case)]
    identity = {"case_id": case.case_id, "command": command_of(case)}
    return [{"kind": case.kind, "family": case.family, **row, **identity} for row in rows]


def _operator_row(
    case: OpCase, label: Label, device: DeviceSpec | None, steps: Sequence[op_table.Step]
) -> Row:
    op = case.op
    is_known = not isinstance(op, Custom) or op.is_called
    return {
        "model": label.model,
        "role": label.role,
        "pass": str(label.phase or ""),
        "mbs": label.mbs,
        "shape": op.shape_text,
        "dtype": str(case.dtype),
        "backend": case.backend,
        "rate": str(case.rate),
        "ranks": case.num_ranks,
        "memory_bytes": op.memory_bytes if is_known else None,
        "flops": op.flops if is_known else None,
        "bytes_moved": op.bytes_moved if is_known else None,
        **_predicted(case, device),
        "bound": limit_of(op, device.peak(case.dtype), device.hbm_bytes_per_s)
        if device and is_known
        else None,
        "least_s": op_table.least_s(op, device) if is_known else None,
        **op_table.in_place(op, label, steps),
    }


def _predicted(case: OpCase, device: DeviceSpec | None) -> Row:
    """Return the predicted time of an operator, and its rate."""
    cost = op_table.predicted(case.op, case.backend, device)
    if device is None or cost is None:
        return dict.fromkeys(("predicted_s", "predicted_tflops"))
    return {
        "predicted_s": cost.total_s,
        "predicted_tflops": case.op.flops / cost.total_s / TFLOP,
    }


def _collective_row(case: CommCase, device: DeviceSpec | None) -> Row:
    time_s = _collective_s(case, device)
    rate = case.message_bytes / time_s / 1e9 if time_s else None
    return {
        "size_bytes": case.message_bytes,
        "count": case.count,
        "dtype": str(case.dtype),
        "redop": str(case.redop),
        "root": case.root,
        "in_place": case.in_place,
        "ranks": case.num_ranks,
        "mode": str(case.mode),
        "api": str(case.api),
        "backend": case.backend,
        "predicted_s": time_s,
        "predicted_busbw_gb_s": rate and rate * case.busbw_factor,
    }


def _collective_s(case: CommCase, device: DeviceSpec | None) -> float | None:
    """Return the time of a plain collective of all ranks; None if no law is known."""
    changed = (case.split, case.pair, case.beside, case.skew_s, case.max_ctas, case.spread)
    is_plain = not any(changed) and case.calls_per_group == 1
    if device is None or not is_plain or case.collective not in _WITH_LAW:
        return None
    try:
        network = network_of(device, case.num_ranks)
    except ConfigError:  # a device without a usual network
        return None
    if network is None:
        return None
    placement = network.placement(range(case.num_ranks))
    return network.time_s(case.collective, case.message_bytes, placement)


def _collective_line(row: Row) -> str:
    time = busbw = ""
    if row["predicted_s"]:
        time = f", about {format_time(row['predicted_s'])}"
        busbw = f", busbw {row['predicted_busbw_gb_s']:.4g} GB/s"
    return f"{row['command']}  # {format_bytes(row['size_bytes'])}{time}{busbw}"


def step_row(case: TrainCase) -> Row:
    """Return the figures of one optimizer step, of which --schedule micro measures parts.

    FLOPs are of all ranks, with recomputation; messages are of the pipeline stage with most.
    """
    calls, message_bytes, reason = _messages(case)
    memory = estimate(case)
    return {
        "model": case.model.name,
        "strategy": case.strategy,
        "mbs": case.mbs,
        "seq_len": case.model.seq_len,
        "dtype": str(case.dtype),
        "ranks": case.num_ranks,
        "flops": round(per_token(case).hfu * case.tokens_per_step * case.grad_accum),
        "message_calls": calls,
        "message_bytes": message_bytes,
        "messages_unknown": reason,
        "memory_bytes": memory.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
    }


def _messages(case: TrainCase) -> tuple[int | None, int | None, str]:
    """Return calls and message bytes of one optimizer step, or why they are unknown."""
    try:
        workload = of_case(case)
    except ConfigError as error:
        return None, None, str(error)
    stages = [
        [(op, times) for op, times in workload.tally(index).items() if isinstance(op, CommOp)]
        for index in range(len(workload.stages))
    ]
    total_bytes = [
        sum(op.message_bytes(workload.groups[op.group]) * times for op, times in stage)
        for stage in stages
    ]
    busiest = total_bytes.index(max(total_bytes))
    return sum(times for _, times in stages[busiest]), total_bytes[busiest], ""


def _step_line(row: Row) -> str:
    memory, reserved = (
        format_bytes(round(row[name] / MIB) * MIB)
        for name in ("memory_bytes", "reserved_bytes")
    )
    messages = f"messages unknown: {row['messages_unknown']}"
    if not row["messages_unknown"]:
        size = format_bytes(row["message_bytes"])
        messages = f"{row['message_calls']} messages ({size}) per rank"
    flops = f"{row['flops'] / TFLOP:.4g} TFLOP per step of all ranks"
    memory = f"about {memory} of memory per rank ({reserved} reserved)"
    return f"{row['command']}  # {flops}, {messages}, {memory}"


_LINES: dict[str, Callable[[Row], str]] = {
    "comm": _collective_line,
    "train": _step_line,
    "replay": lambda row: row["command"],
}
