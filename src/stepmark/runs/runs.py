"""stepmark runs and report: list, show, export and query earlier runs; the page of one."""

import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from stepmark.collectives.comm_remarks import comm_lines
from stepmark.ground.errors import ConfigError
from stepmark.ground.files import write_text
from stepmark.ground.option_groups import Files
from stepmark.ground.waiting import Waiting
from stepmark.measuring.delivery import make_folder, write_files
from stepmark.predictions import ledger_page
from stepmark.predictions.predicted_steps import StepReport
from stepmark.replays import replay_page
from stepmark.runs import run_page, summary
from stepmark.runs.runs_options import (
    ExportOptions,
    ListOptions,
    ReportOptions,
    ShowOptions,
    SqlOptions,
)
from stepmark.runs.step_ledger import comparison_page
from stepmark.store import query
from stepmark.store.codec import to_plain
from stepmark.store.reader import Run, find_run, list_runs, read
from stepmark.store.run_export import export
from stepmark.store.view import (
    View,
    print_text,
    read_with_warnings,
    show_rows,
    sql_types,
    view,
    warn,
)
from stepmark.tables.columns import Row, given
from stepmark.tables.export import is_folder, names_of
from stepmark.tables.figures import Figure
from stepmark.tables.page import Section
from stepmark.tables.table import Table


def print_list(options: ListOptions) -> None:
    """Print one row per run, oldest first."""
    rows = [_run_row(read(path)) for path in list_runs(options.runs)]
    if not rows:
        sys.stderr.write(f"no runs in {options.runs}\n")
    if sys.stdout.isatty() and not options.to_stdout:  # a table is too wide for most
        write_files(options, "runs", rows, rows)
        print_text(line for row in rows for line in _run_lines(row))
    else:
        _deliver(rows, options, "runs")


def show(options: ShowOptions) -> None:
    """Print the rows of one run, and its predicted steps. Raises ConfigError if changed."""
    path = find_run(options.runs, options.run)
    run = view(path)
    rows = run.all_rows
    info = run.run
    write_files(options, info.run_id, {"run": to_plain(info), "rows": rows}, rows)
    if not options.to_stdout:
        print_run(path, run)


def print_run(path: Path, run: View) -> None:
    """Print a run: where it was measured, its rows, its predicted steps."""
    info = run.run
    environment = info.environment
    names = ", ".join(
        f"{n} x {name}" for name, n in Counter(d.name for d in environment.devices).items()
    )
    sys.stdout.write(f"{info.run_id}  {info.command}\n")
    versions = f"torch {environment.torch}, stepmark {environment.stepmark}"
    commit = environment.git_commit or "unknown"
    sys.stdout.write(f"{names}, {versions}, commit {commit}\n\n")
    show_rows(run)
    from stepmark.runs.step_report import step_report  # noqa: PLC0415 - numpy

    report = step_report(path, run)
    if report is not None:
        operators = summary.summary_lines(info, run.rows) if run.rows else []
        others = comm_lines(run.comm_rows, environment.devices) + summary.train_lines(
            run.train_rows
        )
        print_text(("", *operators, *others, *report.lines()))


def export_run(options: ExportOptions) -> None:
    """Write a run's rows for another tool."""
    run = view(find_run(options.runs, options.run))
    rows = run.all_rows
    info = run.run
    export(rows, info, Path(options.path), options.to, sql_types())
    if options.path != "-":
        message = f"{len(rows)} rows of {info.run_id} to {options.to}: {options.path}\n"
        sys.stderr.write(message)


def run_query(options: SqlOptions) -> None:
    """Query all runs."""
    runs = [read_with_warnings(path) for path in list_runs(options.runs)]
    columns, values = query.sql(runs, options.query)
    rows: list[Row] = [dict(zip(columns, row, strict=True)) for row in values]
    _deliver(rows, options, "query")


def _run_row(run: Run) -> Row:
    """Return the row of a run; its last column names what cannot be read."""
    devices = run.info.environment.devices
    counts = {
        kind: sum(record.kind == kind for record in run.latest)
        for kind in ("measured", "skipped", "failed")
    }
    facts = {
        "created_at": run.info.created_at,
        "device": devices[0].name if devices else None,
        "ranks": len(devices),
        "torch": run.info.environment.torch,
        "cases": run.info.num_cases,
    }
    return {
        "run": run.path.name,
        **(facts if run.is_known else dict.fromkeys(facts)),
        **counts,
        "command": run.info.command if run.is_known else None,
        **({"unreadable": "; ".join(run.notes)} if run.notes else {}),
    }


def _run_lines(row: Row) -> Iterator[str]:
    """Yield a run in two lines, and a third with what cannot be read."""
    counts = [f"{row[kind]} {kind}" for kind in ("measured", "skipped", "failed") if row[kind]]
    facts = f"{row['ranks']} x {row['device']}, torch {row['torch']}"
    yield f"{row['run']}  {facts}: {', '.join(counts) or 'nothing measured'}"
    yield f"    {row['command']}"
    if "unreadable" in row:
        yield f"    {row['unreadable']}"


def _deliver(rows: list[Row], files: Files, name: str) -> None:
    """Write the files, and print a table unless stdout is one of them."""
    write_files(files, name, rows, rows)
    if not files.to_stdout:
        columns = [given(name, words=partial(_plain, name)) for name in names_of(rows)]
        print_text(Table(rows, columns).text())


def _plain(name: str, row: Row) -> str:
    """Return a value without its unit, which a query may have changed."""
    value = row.get(name)
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def run_report(options: ReportOptions) -> None:
    """Write the page of a run, or of two side by side, and print where it is."""
    path = find_run(options.runs, options.run)
    with Waiting(f"writing the page of {path.name}"):
        if options.other is None:
            target = write_page(path, _page_in(options.out, path / "report.html"))
        else:
            other = find_run(options.runs, options.other)
            target = _page_in(options.out, path / f"report-{other.name}.html")
            write_text(target, comparison_page(path, other).html(), "out")
    if str(target) != "-":
        sys.stdout.write(f"{target}\n")


def _page_in(out: str | None, default: Path) -> Path:
    """Return the file of --out, which may be a folder, as for other files."""
    if out and is_folder(out):
        make_folder("out", Path(out))
        return Path(out) / default.name
    return Path(out) if out else default


def write_page(path: Path, target: Path | None = None) -> Path:
    """Write the page of the run at `path`."""
    run = view(path)
    from stepmark.runs.step_report import reported  # noqa: PLC0415 - numpy

    report = reported(path, run)
    if isinstance(report, ConfigError):
        warn([str(report)])
    return write_run_page(path, run, report, target)


def write_run_page(
    path: Path,
    run: View,
    report: StepReport | ConfigError | None,
    target: Path | None = None,
) -> Path:
    """Write the page of a run. report: of the steps that it predicted, if any."""
    replays: list[Section | Figure] = []
    if run.replay_rows:
        from stepmark.replays.replay_log_verb import of_run  # noqa: PLC0415 - numpy

        for replay in of_run(path, run.records):
            replays += replay_page.sections(*replay)
    page = run_page.page(
        run.run,
        run.records,
        run.rows,
        run.device,
        run.comm_rows,
        run.train_rows,
        headline=ledger_page.headline(report) if report else "",
        answer=list(ledger_page.answer(report)) if report else [],
        evidence=list(ledger_page.evidence(report)) if report else [],
        replays=replays,
    )
    target = target or path / "report.html"
    write_text(target, page.html(), "out")
    return target
