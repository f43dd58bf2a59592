"""stepmark check: ten minutes to accept a machine against a reference run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepmark.core.errors import ConfigError, worst
from stepmark.core.units import parse_duration

if TYPE_CHECKING:
    from stepmark.core.record import Measured


def check(
    baseline: Annotated[
        str, typer.Option("--baseline", help="run id or path of the reference")
    ],
    runs: Annotated[Path, typer.Option("--runs", help="folder of runs")] = Path("runs"),
    budget: Annotated[str, typer.Option("--budget", help="time in all")] = "10m",
    launches: Annotated[
        int, typer.Option("--launches", help="times each case is measured")
    ] = 5,
    floor: Annotated[
        float, typer.Option("--floor", help="slowdown that is still accepted")
    ] = 0.03,
    json: Annotated[
        str | None, typer.Option("--json", help="verdicts as JSON; - = stdout")
    ] = None,
    csv: Annotated[
        str | None, typer.Option("--csv", help="verdicts as CSV; - = stdout")
    ] = None,
) -> None:
    """Measure a reference run's cases again; exit 1 if any is slower beyond noise."""
    from stepmark.cli.sides import side_of_runs  # noqa: PLC0415
    from stepmark.cli.view import console  # noqa: PLC0415
    from stepmark.report import comparison as drawn  # noqa: PLC0415
    from stepmark.report.comparison_printing import printed  # noqa: PLC0415
    from stepmark.store.compare import Options, compare  # noqa: PLC0415
    from stepmark.store.export import write_csv, write_json  # noqa: PLC0415
    from stepmark.store.reader import find_run  # noqa: PLC0415

    if not 2 <= launches <= 100:
        raise ConfigError("launches", launches, "from 2 to 100")
    if json == csv == "-":
        raise ConfigError("csv", "-", "a path: stdout is already taken by --json")
    if not 0 <= floor <= 1:
        raise ConfigError("floor", floor, "a fraction from 0 to 1")
    path = find_run(runs, baseline)
    reference = _reference(path)
    paths, code, wrong = _measured(path.name, reference, runs, budget, launches)
    if wrong >= set(reference):
        typer.echo(f"all {len(wrong)} results are wrong", err=True)
        raise typer.Exit(1)
    # Means: under a power cap the clock hops between a few states, and a median hops with it.
    options = Options(statistic="mean", fail_if_slower=floor)
    sides = [side_of_runs("reference", [path]), side_of_runs("now", paths)]
    comparison = compare(sides, options)
    rows = drawn.rows(comparison)
    if json:
        write_json(rows, json, "check")
    if csv:
        write_csv(rows, csv, "check")
    if "-" not in (json, csv):
        printed(comparison, console())
    missing = len(reference) - len(rows)
    slower = len(comparison.too_slow or ())
    text = f"{slower} of {len(rows)} cases slower than {path.name}"
    text += f"; {len(wrong)} with wrong results" if wrong else ""
    text += f"; {missing} not compared" if missing else ""
    typer.echo(text, err=True)
    raise typer.Exit(worst(code, 1 if slower else 0, 3 if missing else 0))


def _measured(
    name: str, reference: "dict[str, Measured]", runs: Path, budget: str, launches: int
) -> tuple[list[Path], int, set[str]]:
    """Run folders, the worst exit code, and which cases gave wrong results."""
    from stepmark.bench.context import make_context  # noqa: PLC0415
    from stepmark.cli import session  # noqa: PLC0415
    from stepmark.core.record import Measured  # noqa: PLC0415

    values: dict[str, Any] = {
        "out": str(runs / "checks"),
        "device": next(iter(reference.values())).case.device,
    }
    seconds = parse_duration(budget, "budget") / launches
    context = make_context(session.device_type(values))
    paths: list[Path] = []
    code, wrong = 0, set[str]()
    for number in range(launches):
        outcome = session.measure(
            [record.operator for record in reference.values()],
            values | {"budget": f"{seconds}s"},
            context,
            settings={"check_of": name, "launch": f"{number + 1}/{launches}"},
        )
        assert outcome is not None
        if outcome.exit_code in (130, 143):
            raise typer.Exit(outcome.exit_code)
        code = worst(code, outcome.exit_code)
        paths.append(outcome.path)
        wrong |= {
            record.case.case_id
            for record in outcome.view.records
            if isinstance(record, Measured) and record.num_wrong
        }
    return paths, code, wrong


def _reference(path: Path) -> "dict[str, Measured]":
    """Measured operators of a run of one rank."""
    from stepmark.core.case import OpCase  # noqa: PLC0415
    from stepmark.core.record import Measured  # noqa: PLC0415
    from stepmark.store.reader import read  # noqa: PLC0415

    found = {
        record.case.case_id: record
        for record in read(path).latest
        if isinstance(record, Measured)
        and isinstance(record.case, OpCase)
        and not record.num_wrong
    }
    if not found:
        raise ConfigError("baseline", path, "a run with measured cases")
    if any(record.case.num_ranks > 1 for record in found.values()):
        raise ConfigError("baseline", path, "a run of one rank")
    return found
