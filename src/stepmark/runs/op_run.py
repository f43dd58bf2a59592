"""What is shown of a run of `stepmark op`: its rows, and how your own functions compare."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.cases.record import Measured, Record
from stepmark.comparison.compare import Options, compare
from stepmark.comparison.comparison import Series, Side
from stepmark.comparison.comparison_text import printed
from stepmark.comparison.series import series_of_records
from stepmark.ground.errors import ConfigError
from stepmark.ground.grouping import group_by
from stepmark.ground.options import build
from stepmark.measuring import delivery
from stepmark.model.ops import CUSTOM
from stepmark.operators import styles
from stepmark.operators.op_options import options_class
from stepmark.store.view import console, show_rows, view

# Fields that a function states itself; functions are paired by the others.
_OF_FUNCTION = ("backend", "flops", "bytes_moved", "memory_bytes")


def show(path: Path, values: Mapping[str, Any], code: int) -> int:
    """Show the run and write its files. Returns the exit code."""
    options = build(options_class(values.get("family")), values)
    run = view(path)
    if options.style:
        sys.stdout.write(styles.as_text(styles.STYLES[options.style](run.records, run.run)))
    delivery.write_rows(run.rows, options)
    if not (options.style or options.to_stdout):
        show_rows(run)
        _compare_functions(run.records)
    return delivery.finish(run, path, code)


def functions(records: Sequence[Record]) -> list[Side]:
    """Return one side per function of your own with right results, in the order measured.

    Launches that the automatic clock timed differently are together, as in the run's table.
    """
    alike = (
        replace(record, samples=replace(record.samples, method="any clock"))
        for record in _of_functions(records)
    )
    sides = []
    for name, own in group_by(alike, lambda record: record.operator.backend).items():
        series, notes = series_of_records(own)
        if series:
            sides.append(Side(name=name, series=tuple(map(_unnamed, series)), notes=notes))
    return sides


def _of_functions(records: Sequence[Record]) -> list[Measured]:
    return [r for r in records if isinstance(r, Measured) and r.case.family == CUSTOM]


def _unnamed(series: Series) -> Series:
    """Return the series without its function, which is the side's name, and what it returns.

    Functions that do other work with equal arguments are compared, too.
    """
    own = {name: v for name, v in series.fields.items() if name not in _OF_FUNCTION}
    return replace(series, fields=own)


def clock_notes(records: Sequence[Record]) -> Iterator[str]:
    """Yield where functions were timed by different clocks, and what they time differently."""
    for shape, own in group_by(
        _of_functions(records), lambda record: record.operator.op.shape_text
    ).items():
        clocks = dict.fromkeys(f"{r.operator.backend} by {r.samples.method}" for r in own)
        if len({record.samples.method for record in own}) > 1:
            yield (
                f"{shape}: {', '.join(clocks)}: only a graph is without the host's launch "
                "overhead"
            )


def work_notes(records: Sequence[Record]) -> Iterator[str]:
    """Yield where functions state other work with equal arguments."""
    by_case = group_by(
        _of_functions(records), lambda r: (r.operator.op.shape_text, r.operator.dtype)
    )
    for (shape, _), own in by_case.items():
        if len({(r.operator.op.flops, r.operator.op.bytes_moved) for r in own}) > 1:
            yield f"{shape}: functions state different FLOPs or bytes: ratios are of time alone"


def _compare_functions(records: Sequence[Record]) -> None:
    """Print the speed of each function over the first one's, with equal arguments."""
    sides = functions(records)
    if len(sides) < 2:
        return
    sys.stdout.write("\n")
    try:
        printed(compare(sides, Options()), console())
        if any(len(series.launches) > 1 for side in sides for series in side.series):
            sys.stdout.write("times are geometric means of launches, those above medians\n")
        notes = dict.fromkeys([*clock_notes(records), *work_notes(records)])
        sys.stdout.writelines(f"{note}\n" for note in notes)
    except ConfigError as error:
        sys.stdout.write(f"no ratio of {' and '.join(side.name for side in sides)}: {error}\n")
