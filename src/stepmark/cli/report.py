"""stepmark report: the self-contained page of a run."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        str, typer.Argument(help="run id or its beginning, a path, or latest")
    ] = "latest",
    runs: Annotated[Path, typer.Option("--runs", help="folder of runs")] = Path("runs"),
    out: Annotated[
        Path | None, typer.Option("--out", help="file to write [RUN/report.html]")
    ] = None,
) -> None:
    """Write report.html of a run: roofline, tables, curves, commands, environment."""
    from stepmark.store.reader import find_run  # noqa: PLC0415

    typer.echo(write(find_run(runs, run), out))


def write(path: Path, target: Path | None = None) -> Path:
    """The page of the run at `path`."""
    from stepmark.cli.view import view  # noqa: PLC0415
    from stepmark.report.page import html  # noqa: PLC0415
    from stepmark.store.files import write_text  # noqa: PLC0415

    seen = view(path)
    target = target or path / "report.html"
    text = html(seen.run, seen.records, seen.rows, seen.device, seen.comm_rows, seen.train_rows)
    write_text(target, text, "out")
    return target
