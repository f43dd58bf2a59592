"""stepmark runs: list, show, export and query what earlier runs measured."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from stepmark.cli.view import View
    from stepmark.core.record import RunInfo
    from stepmark.store.reader import Run

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="List, show, export and query earlier runs.",
)

Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="folder of runs")]
Json = Annotated[
    str,
    typer.Option("--json", metavar="PATH", help="write JSON; - = stdout, DIR/ = a file in it"),
]
Csv = Annotated[
    str,
    typer.Option("--csv", metavar="PATH", help="write CSV; - = stdout, DIR/ = a file in it"),
]
RunName = Annotated[
    str, typer.Argument(metavar="ID", help="run id or its beginning, a path, or 'latest'")
]
Rows = list[dict[str, object]]


@app.command("list")
def list_(runs: Runs = Path("runs"), json: Json = "", csv: Csv = "") -> None:
    """One row per run, oldest first."""
    from stepmark.store.reader import list_runs, read  # noqa: PLC0415

    rows = [_run_row(read(path)) for path in list_runs(runs)]
    if not rows:
        typer.echo(f"no runs in {runs}", err=True)
    _deliver(rows, json=json, csv=csv, name="runs")


@app.command()
def show(
    run: RunName = "latest", runs: Runs = Path("runs"), json: Json = "", csv: Csv = ""
) -> None:
    """The rows of one run."""
    from stepmark.cli.view import show_rows  # noqa: PLC0415
    from stepmark.store.codec import to_plain  # noqa: PLC0415
    from stepmark.store.export import write_csv, write_json  # noqa: PLC0415

    seen = _view(runs, run)
    rows, info = seen.rows + seen.comm_rows + seen.train_rows, seen.run
    if json:
        write_json({"run": to_plain(info), "rows": rows}, json, info.run_id)
    if csv:
        write_csv(rows, csv, info.run_id)
    if "-" not in (json, csv):
        _say_what(info)
        show_rows(seen)


@app.command()
def export(
    run: RunName,
    path: Annotated[str, typer.Argument(metavar="PATH", help="file, or folder of a tracker")],
    to: Annotated[
        str,
        typer.Option("--to", metavar="KIND", help="csv json parquet tensorboard wandb mlflow"),
    ],
    runs: Runs = Path("runs"),
) -> None:
    """Write a run's rows for another tool."""
    from stepmark.store import export as exports  # noqa: PLC0415

    seen = _view(runs, run)
    rows, info = seen.rows + seen.comm_rows + seen.train_rows, seen.run
    exports.export(rows, info, Path(path), to)
    if path != "-":
        typer.echo(f"{len(rows)} rows of {info.run_id} to {to}: {path}", err=True)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="over views records and runs")],
    runs: Runs = Path("runs"),
    json: Json = "",
    csv: Csv = "",
) -> None:
    """Query all runs, e.g. "SELECT family, min(median_s) FROM records GROUP BY family"."""
    from stepmark.cli.view import read_aloud  # noqa: PLC0415
    from stepmark.store.query import sql as query_runs  # noqa: PLC0415
    from stepmark.store.reader import list_runs  # noqa: PLC0415

    columns, found = query_runs([read_aloud(path) for path in list_runs(runs)], query)
    rows: Rows = [dict(zip(columns, row, strict=True)) for row in found]
    _deliver(rows, json=json, csv=csv, name="query")


def _say_what(info: "RunInfo") -> None:
    found = info.environment
    names = ", ".join(
        f"{n} x {name}" for name, n in Counter(d.name for d in found.devices).items()
    )
    typer.echo(f"{info.run_id}  {info.command}")
    commit = found.git_commit or "unknown"
    typer.echo(f"{names}, torch {found.torch}, stepmark {found.stepmark}, commit {commit}\n")


def _view(runs: Path, name: str) -> "View":
    from stepmark.cli.view import view  # noqa: PLC0415
    from stepmark.store.reader import find_run  # noqa: PLC0415

    return view(find_run(runs, name))


def _run_row(run: "Run") -> dict[str, object]:
    """What cannot be read is in the row's last column, and counted nowhere."""
    devices = run.info.environment.devices
    counts = {
        kind: sum(record.kind == kind for record in run.latest)
        for kind in ("measured", "skipped", "failed")
    }
    known = {
        "created_at": run.info.created_at,
        "device": devices[0].name if devices else None,
        "ranks": len(devices),
        "torch": run.info.environment.torch,
        "cases": run.info.num_cases,
    }
    return {
        "run": run.path.name,
        **(known if run.is_known else dict.fromkeys(known)),
        **counts,
        "command": run.info.command if run.is_known else None,
        **({"unreadable": "; ".join(run.notes)} if run.notes else {}),
    }


def _deliver(rows: Rows, *, json: str, csv: str, name: str) -> None:
    """To the files asked for, and as a table unless stdout is one of them."""
    from stepmark.store.export import columns_of, write_csv, write_json  # noqa: PLC0415

    if json:
        write_json(rows, json, name)
    if csv:
        write_csv(rows, csv, name)
    if rows and "-" not in (json, csv):
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        from stepmark.cli.view import console  # noqa: PLC0415

        columns = columns_of(rows)
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*[Text(_shown(row.get(column))) for column in columns])
        console().print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
