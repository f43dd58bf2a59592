"""stepmark runs: list, show, export and query what earlier runs measured."""

import sys
from collections import Counter
from pathlib import Path

from rich.table import Table
from rich.text import Text

from stepmark.app.view import View, console, view
from stepmark.core.errors import ConfigError
from stepmark.core.record import RunInfo
from stepmark.core.verb_options import (
    ExportOptions,
    Files,
    ListOptions,
    ShowOptions,
    SqlOptions,
)
from stepmark.report import comm_printing, printing, training_printing
from stepmark.store import query
from stepmark.store.codec import to_plain
from stepmark.store.export import columns_of, export, write_csv, write_json
from stepmark.store.runs import find_run, latest, list_runs, read_records, read_run

Row = dict[str, object]


def print_list(options: ListOptions) -> None:
    """Print one row per run, oldest first."""
    rows = [_run_row(path) for path in list_runs(options.runs)]
    if not rows:
        sys.stderr.write(f"no runs in {options.runs}\n")
    _deliver(rows, options, "runs")


def show(options: ShowOptions) -> None:
    """Print the rows of one run."""
    seen = view(find_run(options.runs, options.run))
    rows, info = _rows(seen), seen.run
    if options.json:
        write_json({"run": to_plain(info), "rows": rows}, options.json, info.run_id)
    if options.csv:
        write_csv(rows, options.csv, info.run_id)
    if options.to_stdout:
        return
    _print_header(info)
    if seen.rows or not rows:
        printing.print_rows(seen.rows, console())
    if seen.comm_rows:
        comm_printing.wide(seen.comm_rows, console())
    if seen.train_rows:
        training_printing.print_training(seen.train_rows, console())


def export_run(options: ExportOptions) -> None:
    """Write a run's rows for another tool."""
    seen = view(find_run(options.runs, options.run))
    rows, info = _rows(seen), seen.run
    export(rows, info, Path(options.path), options.to)
    if options.path != "-":
        message = f"{len(rows)} rows of {info.run_id} to {options.to}: {options.path}\n"
        sys.stderr.write(message)


def run_query(options: SqlOptions) -> None:
    """Query all runs."""
    columns, found = query.sql(options.runs, options.query)
    rows: list[Row] = [dict(zip(columns, row, strict=True)) for row in found]
    _deliver(rows, options, "query")


def _rows(seen: View) -> list[Row]:
    return seen.rows + seen.comm_rows + seen.train_rows


def _print_header(info: RunInfo) -> None:
    environment = info.environment
    names = ", ".join(
        f"{n} x {name}" for name, n in Counter(d.name for d in environment.devices).items()
    )
    sys.stdout.write(f"{info.run_id}  {info.command}\n")
    versions = f"torch {environment.torch}, stepmark {environment.stepmark}"
    commit = environment.git_commit or "unknown"
    sys.stdout.write(f"{names}, {versions}, commit {commit}\n\n")


def _run_row(path: Path) -> dict[str, object]:
    """A run that cannot be read is a row that says so."""
    try:
        info, records = read_run(path), latest(read_records(path))
    except ConfigError as error:
        return {"run": path.name, "unreadable": str(error)}
    devices = info.environment.devices
    counts = {
        kind: sum(record.kind == kind for record in records)
        for kind in ("measured", "skipped", "failed")
    }
    return {
        "run": path.name,
        "created_at": info.created_at,
        "device": devices[0].name if devices else None,
        "ranks": len(devices),
        "torch": info.environment.torch,
        "cases": info.num_cases,
        **counts,
        "command": info.command,
    }


def _deliver(rows: list[Row], files: Files, name: str) -> None:
    """Write the files asked for, and a table unless stdout is one of them."""
    if files.json:
        write_json(rows, files.json, name)
    if files.csv:
        write_csv(rows, files.csv, name)
    if rows and not files.to_stdout:
        columns = columns_of(rows)
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*[Text(_shown(row.get(column))) for column in columns])
        console().print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
