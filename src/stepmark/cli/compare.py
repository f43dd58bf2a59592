"""stepmark compare: runs of ours, nccl-tests files, CSVs, throughput tables, with verdicts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepmark.core.errors import ConfigError

if TYPE_CHECKING:
    from stepmark.core.comparison import Comparison, Side
    from stepmark.store.compare import Options

_PLACEMENTS = {"in": "in-place", "out": "out-of-place", "both": None}


def compare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]A[,A2,...] B [C ...]",
            help="runs, files, FILE:2 (its second table), folders, quoted patterns; several "
            "with commas are launches of one side",
        ),
    ],
    runs: Annotated[Path, typer.Option("--runs", help="folder of runs")] = Path("runs"),
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="name of the side to compare with [first]")
    ] = None,
    placement: Annotated[
        str, typer.Option("--placement", help="in, out (of place) or both")
    ] = "both",
    size_range: Annotated[
        str | None,
        typer.Option("--range", help="sizes of the geometric mean, e.g. 1M-1G [all]"),
    ] = None,
    collective: Annotated[
        str | None, typer.Option("--collective", help="of files that do not say it")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="number, for files that do not say it")
    ] = None,
    unit: Annotated[
        str | None, typer.Option("--unit", help="of figures that do not say it: rate or time")
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option("--noise", help="how much one launch varies (1 sd), e.g. 2%"),
    ] = None,
    spread: Annotated[
        list[str] | None,
        typer.Option("--spread", help="a run with several launches: how much they vary"),
    ] = None,
    statistic: Annotated[
        str, typer.Option("--statistic", help="of a launch's samples: median or mean")
    ] = "median",
    fail_if_slower: Annotated[
        str | None,
        typer.Option("--fail-if-slower", help="exit 1 if any is, e.g. 5%, beyond noise"),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="pair although this differs: method, num_ranks, dtype"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="pair whatever differs")] = False,
    json: Annotated[str | None, typer.Option("--json", help="rows as JSON; - = stdout")] = None,
    csv: Annotated[str | None, typer.Option("--csv", help="rows as CSV; - = stdout")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="a page with the curves and ratios")
    ] = None,
) -> None:
    """Ratio of speeds per size or shape, its 99 % interval over launches, and a verdict."""
    from stepmark.cli.file_series import Told  # noqa: PLC0415
    from stepmark.cli.sides import sides  # noqa: PLC0415
    from stepmark.store.compare import compare as compared  # noqa: PLC0415

    if placement not in _PLACEMENTS:
        raise ConfigError("placement", placement, "in, out or both")
    if unit not in (None, "rate", "time"):
        raise ConfigError("unit", unit, "rate or time")
    told = Told(
        collective=_collective(collective),
        num_ranks=ranks,
        placement=_PLACEMENTS[placement],
        unit=unit,
    )
    found = _with_baseline(sides(sources, runs, told), baseline)
    options = _options(
        noise=noise,
        statistic=statistic,
        allowed=_allowed(allow or [], force),
        fail_if_slower=fail_if_slower,
        size_range=size_range,
        recorded=tuple(sides(spread or [], runs, told)),
    )
    comparison = compared(found, options)
    deliver(comparison, json=json, csv=csv, html=html)
    raise typer.Exit(_exit_code(comparison))


def _exit_code(comparison: "Comparison") -> int:
    """1 if something is too slow; 3 if that was asked and nothing could be tested."""
    if comparison.too_slow is None:
        return 0
    cells = (cell for line in comparison.lines for cell in line.cells.values())
    tested = any(cell.ratio and cell.ratio.se_log is not None for cell in cells)
    return 1 if comparison.too_slow else 0 if tested else 3


def _collective(text: str | None) -> str | None:
    if text is None:
        return None
    from stepmark.core.collectives import Collective  # noqa: PLC0415

    name = text.lower().replace("-", "_").removesuffix("_perf")
    squeezed = {one.value.replace("_", ""): one.value for one in Collective}
    if (known := squeezed.get(name.replace("_", ""))) is None:
        raise ConfigError("collective", text, f"one of {', '.join(Collective)}")
    return known


def _allowed(names: list[str], force: bool) -> tuple[str, ...]:
    from stepmark.store.join import STRICT  # noqa: PLC0415

    for name in names:
        if name not in STRICT:
            raise ConfigError("allow", name, f"one of {', '.join(STRICT)}")
    return STRICT if force else tuple(names)


def _with_baseline(found: "list[Side]", name: str | None) -> "list[Side]":
    """The baseline first."""
    if name is None:
        return found
    first = [side for side in found if side.name == name]
    if not first:
        raise ConfigError("baseline", name, f"one of {', '.join(side.name for side in found)}")
    return first + [side for side in found if side.name != name]


def _options(
    *,
    noise: str | None,
    statistic: str,
    allowed: tuple[str, ...],
    fail_if_slower: str | None,
    size_range: str | None,
    recorded: "tuple[Side, ...]",
) -> "Options":
    from stepmark.core.units import parse_bytes, parse_share  # noqa: PLC0415
    from stepmark.store.compare import STATISTICS, Options  # noqa: PLC0415

    if statistic not in STATISTICS:
        raise ConfigError("statistic", statistic, f"one of {', '.join(STATISTICS)}")
    low = high = None
    if size_range is not None:
        first, dash, last = size_range.partition("-")
        if not dash:
            raise ConfigError("range", size_range, "sizes such as 1M-1G")
        low, high = parse_bytes(first, "range"), parse_bytes(last, "range")
        if low > high:
            raise ConfigError("range", size_range, "the smaller size first")
    return Options(
        noise=None if noise is None else parse_share(noise, "noise"),
        statistic=statistic,
        allowed=allowed,
        fail_if_slower=(
            None if fail_if_slower is None else parse_share(fail_if_slower, "fail-if-slower")
        ),
        smallest_bytes=low,
        largest_bytes=high,
        recorded=recorded,
    )


def deliver(
    comparison: "Comparison", *, json: str | None, csv: str | None, html: Path | None
) -> None:
    """The table, unless stdout is asked for something else, and the files."""
    from stepmark.app.view import console  # noqa: PLC0415
    from stepmark.report import comparison as drawn  # noqa: PLC0415
    from stepmark.report.comparison_printing import printed  # noqa: PLC0415
    from stepmark.store.export import write_csv, write_json  # noqa: PLC0415

    if json == csv == "-":
        raise ConfigError("csv", "-", "a path: stdout is already taken by --json")
    if json:
        document = {
            "names": list(comparison.names),
            "lines": drawn.rows(comparison),
            "overall": drawn.overall_rows(comparison),
            "notes": list(comparison.notes),
        }
        write_json(document, json, "compare")
    if csv:
        write_csv(drawn.rows(comparison), csv, "compare")
    if html:
        from stepmark.report.comparison_page import html as page  # noqa: PLC0415
        from stepmark.store.files import write_text  # noqa: PLC0415

        write_text(html, page(comparison), "html")
    if "-" not in (json, csv):
        printed(comparison, console())
