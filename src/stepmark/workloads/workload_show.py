"""stepmark workload show: tables and figures of a workload, or its distinct cases."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from stepmark.cases.case import Label
from stepmark.cases.comm_case import CommCase
from stepmark.cases.message import RECV, SEND
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.model.collectives import (
    ALIGN_BYTES,
    FACTS,
    Api,
    Collective,
    Parts,
    RedOp,
    placements,
    trimmed_count,
)
from stepmark.model.ops import FAMILY_OF, Attention, Bmm, Gemm, GroupedGemm, Op
from stepmark.step.workload import CommOp, ComputeOp, Workload
from stepmark.store.commands import command_of, command_of_op
from stepmark.store.view import print_text
from stepmark.tables import export
from stepmark.tables.columns import Row
from stepmark.workloads import workload_tables, workload_text
from stepmark.workloads.job import plain_settings
from stepmark.workloads.rules import RULES
from stepmark.workloads.workload_files import StageFlag, stage_of
from stepmark.workloads.workload_options import Rows
from stepmark.workloads.workload_page import page
from stepmark.workloads.workload_tables import communication, ranges

# Sizes among a framework's settings that are set by flags of the layout.
_AXES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_distributed_optimizer_instances"),
)


def show(
    workload: Workload,
    options: Rows,
    stage: StageFlag | None = None,
    html: str | None = None,
    *,
    text: bool = True,
) -> None:
    """Print a workload unless stdout is one of its files, and write --json, --csv and --html.

    text: False prints nothing.
    """
    if [options.json, options.csv, html].count("-") > 1:
        raise ConfigError("json, csv, html", "-", "stdout for one of them")
    number = stage_of(workload, stage)
    if options.distinct:
        tables = {"collectives": message_rows(workload), "operators": operator_rows(workload)}
    else:
        by_name = workload_tables.tables(workload, number)
        tables = {name: table.rows() for name, table in by_name.items()}
    if options.json:
        export.write_tables(tables, options.json, "json")
    if options.csv:
        with_rows = {name: rows for name, rows in tables.items() if rows}
        export.write_tables(with_rows, options.csv, "csv")
    if html:
        write_text(html, page(workload, number, _defaults(workload.rules)).html(), "html")
        if html != "-":
            sys.stderr.write(f"wrote {html}\n")
    if not text or options.to_stdout or html == "-":
        return
    if options.distinct:
        lines = _distinct_lines(workload, tables)
    else:
        lines = workload_text.lines(workload, number, _defaults(workload.rules))
    print_text(lines)


def _defaults(rules: str) -> dict[str, Any]:
    """Return the framework's default settings; unused axes have size 1."""
    if rules not in RULES:
        return {}
    return dict.fromkeys(_AXES, 1) | plain_settings(RULES[rules].make())


def _distinct_lines(workload: Workload, tables: dict[str, list[Row]]) -> list[str]:
    head = workload_text.header(workload, _defaults(workload.rules))
    lines = [f"# {line}" for line in head]
    has_stages = len(workload.stages) > 1
    titles = {"collectives": "collectives", "operators": "products and attentions"}
    for kind, title in titles.items():
        lines += ["", f"# {len(tables[kind])} distinct {title}; calls per rank and step"]
        for row in tables[kind]:
            where = f" in stage {row['stages']}" if has_stages else ""
            calls = f"{row['calls']} call{'' if row['calls'] == 1 else 's'}"
            text = f"{calls}{where}, {row.get('groups', '')} {row['passes']}: {row['modules']}"
            lines.append(f"{row['command']}  # {' '.join(text.split())}")
    if any(row["trimmed"] for row in tables["collectives"]):
        lines += [
            "# -b is trimmed, as in nccl-tests, where a part is no multiple of 16 bytes;",
            "# stepmark comm --from-workload FILE measures the sizes as they are",
        ]
    return lines


# Operators that decide a workload's speed; show's tables list the others, too.
SHAPED = (Gemm, Bmm, GroupedGemm, Attention)


@dataclass(slots=True, kw_only=True)
class Message:
    """One distinct collective. calls: per rank and step, by stage."""

    case: CommCase
    calls: dict[int, int]
    passes: dict[str, None]
    groups: dict[str, None]
    modules: dict[str, None]


def messages(workload: Workload, collectives: Iterable[str] = ()) -> list[Message]:
    """Return the distinct collectives of all stages and the setup, with send as p2p.

    collectives: names to return; all of them if it is empty.
    """
    names = set(collectives)
    by_case: dict[CommCase, Message] = {}
    counted = (
        (stage, *each)
        for stage in range(len(workload.stages))
        for each in communication(workload, stage)
    )
    for stage, when, operation, calls in counted:
        case = case_of(operation, workload.groups[operation.group].size)
        if case is None or (names and case.collective not in names):
            continue
        message = by_case.setdefault(
            case,
            Message(case=case, calls=defaultdict(int), passes={}, groups={}, modules={}),
        )
        message.calls[stage] += calls
        message.passes[when] = None
        message.groups[operation.group] = None
        message.modules[operation.module] = None
    order = list(Collective)
    cases = sorted(
        by_case,
        key=lambda case: (
            order.index(case.collective),
            case.num_ranks,
            case.dtype,
            case.message_bytes,
        ),
    )
    return [by_case[case] for case in cases]


def case_of(operation: CommOp, num_ranks: int) -> CommCase | None:
    """Return the case of a collective whose group is the whole world; None if nothing is sent.

    It is out of place where torch supports that.
    """
    if operation.collective == RECV or num_ranks < 2:
        return None
    is_send = operation.collective == SEND
    collective = Collective.P2P if is_send else Collective(operation.collective)
    if not operation.count and collective is not Collective.BARRIER:
        return None
    facts = FACTS[collective]
    redop = RedOp.NONE
    if facts.reduces:  # a sum where another tool's file does not state the reduction
        redop = RedOp.SUM if operation.redop is RedOp.NONE else operation.redop
    return CommCase(
        collective=collective,
        count=0 if collective is Collective.BARRIER else operation.count,
        dtype=operation.dtype,
        num_ranks=2 if is_send else num_ranks,
        world_size=2 if is_send else num_ranks,
        redop=redop,
        root=(operation.root or 0) if facts.rooted else -1,
        in_place=placements(collective, Api.TORCH)[0],
        pair=(0, 1) if facts.pair else None,
        spread=0.0 if collective is Collective.ALL_TO_ALL_V else None,
    )


def fitted(case: CommCase, world_size: int) -> CommCase | None:
    """Return the same message among at most so many ranks; None where it becomes empty."""
    if case.num_ranks <= world_size:
        return case
    size = case.message_bytes
    count = trimmed_count(case.collective, size, case.dtype.itemsize, world_size)
    if not count:
        return None
    root = min(case.root, world_size - 1)
    return replace(case, count=count, num_ranks=world_size, world_size=world_size, root=root)


def message_rows(workload: Workload) -> list[Row]:
    """Return a row per distinct collective, with the command that measures it."""
    return [
        {
            "collective": message.case.collective.value,
            "dtype": message.case.dtype.value,
            "redop": None if message.case.redop is RedOp.NONE else message.case.redop.value,
            "num_ranks": message.case.num_ranks,
            "size_bytes": message.case.message_bytes,
            "count": message.case.count,
            "calls": max(message.calls.values()),
            "stages": ranges(sorted(message.calls)),
            "passes": ", ".join(message.passes),
            "groups": ", ".join(message.groups),
            "modules": ", ".join(message.modules),
            "trimmed": is_trimmed(message.case),
            "command": command_of(message.case),
        }
        for message in messages(workload)
    ]


def operator_rows(workload: Workload) -> list[Row]:
    """Return a row per distinct product and attention, with the command that measures it."""
    calls: dict[Op, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    labels: dict[Op, dict[Label, None]] = defaultdict(dict)
    for stage in range(len(workload.stages)):
        for operation, times in workload.tally(stage).items():
            if isinstance(operation, ComputeOp) and isinstance(operation.op, SHAPED):
                calls[operation.op][stage] += times
                label = Label(role=operation.module, phase=operation.phase)
                labels[operation.op][label] = None
    rows: list[Row] = []
    for op, by_stage in calls.items():
        row: Row = {
            "family": FAMILY_OF[type(op)],
            "shape": op.shape_text,
            "dtype": op.dtype.value,
            "passes": ", ".join(dict.fromkeys(str(label.phase) for label in labels[op])),
            "flops": op.flops,
            "calls": max(by_stage.values()),
            "stages": ranges(sorted(by_stage)),
            "modules": ", ".join(dict.fromkeys(label.role for label in labels[op])),
            "command": command_of_op(op),
        }
        rows.append(row)
    return rows


def is_trimmed(case: CommCase) -> bool:
    """Return whether nccl-tests' -b makes it smaller, because parts are multiples of 16."""
    return FACTS[case.collective].parts is not Parts.WHOLE and bool(
        case.count * case.dtype.itemsize % ALIGN_BYTES
    )
