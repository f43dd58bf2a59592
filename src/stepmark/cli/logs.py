"""stepmark logs: NCCL logs, flight-recorder dumps, inspector lines and tables of results."""

from pathlib import Path
from typing import Annotated

import typer

from stepmark.core.errors import ConfigError

Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE...", help="files, folders and quoted patterns of one job"),
]
Tables = Annotated[bool, typer.Option("--tables", help="list and validate tables of results")]
Histogram = Annotated[bool, typer.Option("--histogram", help="how often which message size")]
By = Annotated[
    str | None,
    typer.Option("--by", help="tell apart: collective,dtype,group,phase or fewer [all]"),
]
Bins = Annotated[
    str | None,
    typer.Option("--bins", help="craypat, pow2, exact, or edges 1K,64K,1M [exact while few]"),
]
Ranks = Annotated[
    int | None, typer.Option("--ranks", help="ranks of communicators that do not say it")
]
Curve = Annotated[
    str | None,
    typer.Option("--curve", help="run or file with measured times: what messages cost"),
]
Steps = Annotated[
    int | None, typer.Option("--steps", help="training steps in the files, for per-step")
]
Tuning = Annotated[
    bool, typer.Option("--tuning", help="algorithm and protocol by size, as logged")
]
Runs = Annotated[Path, typer.Option("--runs", help="folder of runs")]
Json = Annotated[str | None, typer.Option("--json", help="everything as JSON; - = stdout")]
Csv = Annotated[
    str | None, typer.Option("--csv", help="rows as CSV; - = stdout; folder: a file each")
]
Html = Annotated[
    str | None, typer.Option("--html", help="figures of the histogram as one page")
]
Force = Annotated[bool, typer.Option("--force", help="take a curve of another number of ranks")]


def logs(
    files: Files,
    tables: Tables = False,
    histogram: Histogram = False,
    by: By = None,
    bins: Bins = None,
    ranks: Ranks = None,
    curve: Curve = None,
    steps: Steps = None,
    tuning: Tuning = False,
    runs: Runs = Path("runs"),
    json: Json = None,
    csv: Csv = None,
    html: Html = None,
    force: Force = False,
) -> None:
    """What a job's logs say: transports, mistakes, hangs, and how often which message."""
    from stepmark.cli.log_answer import answer  # noqa: PLC0415
    from stepmark.cli.log_inputs import collect  # noqa: PLC0415
    from stepmark.cli.log_text import Asked  # noqa: PLC0415

    if steps is not None and steps < 1:
        raise ConfigError("steps", steps, "at least 1")
    inputs = collect(files, as_tables=tables)
    for path, why in inputs.unknown:
        typer.echo(f"stepmark: left out {path}: {why}", err=True)
    about_messages = histogram or any(value is not None for value in (by, bins, curve))
    asked = Asked(
        histogram=about_messages or html is not None,
        by=by,
        bins=bins,
        ranks=ranks,
        curve=curve,
        steps=steps,
        runs=runs,
        force=force,
        tuning=tuning,
        page=html is not None,
    )
    found = answer(inputs, asked)
    if "-" not in (json, csv):
        for line in found.text():
            typer.echo(line)
    found.write(json=json, csv=csv, html=html)
    raise typer.Exit(found.exit_code)
