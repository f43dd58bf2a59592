"""stepmark resume RUN: what is left of a run, as it was planned."""

from typing import Annotated

import typer


def resume(
    run: Annotated[
        str, typer.Argument(help="run id or its beginning, a path, or latest")
    ] = "latest",
    out: Annotated[str, typer.Option("--out", "--runs", help="folder of runs")] = "runs",
    force: Annotated[
        bool, typer.Option("--force", help="resume although the environment differs")
    ] = False,
) -> None:
    """Measure what is left of a run that was cut short; measured cases are skipped."""
    from stepmark.app.measure import resume as resumed  # noqa: PLC0415

    raise typer.Exit(resumed(run, out, force=force))
