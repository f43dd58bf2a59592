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
    from stepmark.app.view import write_page  # noqa: PLC0415
    from stepmark.store.reader import find_run  # noqa: PLC0415

    typer.echo(write_page(find_run(runs, run), out))
