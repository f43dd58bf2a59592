"""stepmark workload show: tables and figures of a workload, or its distinct cases."""

import sys
from typing import Any

from stepmark.cli import workload_cases, workload_output
from stepmark.cli.options import Values
from stepmark.core.columns import Row
from stepmark.core.errors import ConfigError
from stepmark.core.workload import Workload
from stepmark.report import workload_tables, workload_text

# Sizes among a framework's settings that no flag of its own stands for.
_AXES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_distributed_optimizer_instances"),
)


def show(workload: Workload, values: Values) -> None:
    """As asked for by --stage, --distinct, --json, --csv and --html."""
    stage = workload_output.pipeline_stage(workload, values)
    targets = [values.get(name) for name in ("json", "csv", "html")]
    if targets.count("-") > 1:
        raise ConfigError("json, csv, html", "-", "stdout for one of them")
    tables = write_tables(workload, values)
    if target := values.get("html"):
        _page(workload, stage, target)
    if "-" in targets:
        return
    if values.get("distinct"):
        lines = _distinct_lines(workload, tables)
    else:
        lines = workload_text.lines(workload, stage, _defaults(workload.rules))
    sys.stdout.write("\n".join(lines) + "\n")


def write_tables(workload: Workload, values: Values) -> dict[str, list[Row]]:
    """To --json and --csv, where they are given; what they say."""
    from stepmark.store import export  # noqa: PLC0415

    stage = workload_output.pipeline_stage(workload, values)
    tables = _distinct(workload) if values.get("distinct") else _tables(workload, stage)
    if target := values.get("json"):
        export.write_tables(tables, target, "json")
    if target := values.get("csv"):
        export.write_tables(
            {name: rows for name, rows in tables.items() if rows}, target, "csv"
        )
    return tables


def _defaults(rules: str) -> dict[str, Any]:
    """What the framework does unless told otherwise; of axes not used the size is 1."""
    from stepmark.workload.rules import RULES  # noqa: PLC0415

    if rules not in RULES:
        return {}
    fields = RULES[rules].fields().items()
    said = {name: getattr(one.default, "value", one.default) for name, one in fields}
    return dict.fromkeys(_AXES, 1) | said


def _tables(workload: Workload, stage: int) -> dict[str, list[Row]]:
    return {
        "stages": workload_tables.stage_rows(workload),
        "communication": workload_tables.collective_rows(workload, stage),
        "sizes": workload_tables.size_rows(workload, stage),
        "computation": workload_tables.compute_rows(workload, stage),
        "layers": workload_tables.layer_rows(workload, stage),
    }


def _distinct(workload: Workload) -> dict[str, list[Row]]:
    return {
        "collectives": workload_cases.message_rows(workload),
        "operators": workload_cases.operator_rows(workload),
    }


def _distinct_lines(workload: Workload, tables: dict[str, list[Row]]) -> list[str]:
    head = workload_text.header(workload, _defaults(workload.rules))
    found = [f"# {line}" for line in head]
    found += [
        "",
        f"# {len(tables['collectives'])} distinct collectives; calls per rank and step",
    ]
    several = len(workload.stages) > 1
    for kind in ("collectives", "operators"):
        if kind == "operators":
            count = len(tables[kind])
            found += [
                "",
                f"# {count} distinct products and attentions; calls per rank and step",
            ]
        for row in tables[kind]:
            where = f" in stage {row['stages']}" if several else ""
            what = "".join(f" {row[key]}" for key in ("groups",) if row.get(key))
            calls = f"{row['calls']} call{'s' * (row['calls'] != 1)}"
            said = f"{calls}{where},{what} {row['passes']}: {row['modules']}"
            found.append(f"{row['command']}  # {' '.join(said.split())}")
    if any(row["trimmed"] for row in tables["collectives"]):
        found.append(
            "# -b is trimmed, as in nccl-tests, where a part is no multiple of 16 bytes;"
        )
        found.append("# stepmark comm --from-workload FILE measures the sizes as they are")
    return found


def _page(workload: Workload, stage: int, target: str) -> None:
    from stepmark.report.workload_page import page  # noqa: PLC0415
    from stepmark.store.files import write_text  # noqa: PLC0415

    write_text(target, page(workload, stage, _defaults(workload.rules)), "html")
    if target != "-":
        sys.stderr.write(f"wrote {target}\n")
