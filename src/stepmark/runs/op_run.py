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


def show(path: Path, values: Mapping[str, Any], code: int) -> int:
    """Show the run and write its files. Returns the exit code."""
    options = build(options_class(values.get("family")), values)
    run = view(path)
    if options.style:
        text = styles.as_text(styles.STYLES[options.style](run.records, run.run))
        sys.stdout.write(text)
    delivery.write_rows(run.rows, options)
    if not (options.style or options.to_stdout):
        show_rows(run)
        _compare_functions(run.records)
    return delivery.finish(run, path, code)


def functions(records: Sequence[Record]) -> list[Side]:
    """Return one side per function of your own with right results, in the order measured."""
    own = (record for record in records if record.case.family == CUSTOM)
    sides = []
    for name, of_name in group_by(own, lambda record: record.operator.backend).items():
        series, notes = series_of_records(of_name)
        if series:
            sides.append(Side(name=name, series=tuple(_by_shape(series)), notes=notes))
    return sides


def _by_shape(series: Sequence[Series]) -> Iterator[Series]:
    """Yield one series per case, without its function, which is the side's name.

    Launches that the automatic clock timed differently are together, as in the run's table.
    """
    for same in group_by(
        map(_unnamed, series), lambda each: tuple(each.fields.items())
    ).values():
        soaks = [each.soak_s for each in same if each.soak_s is not None]
        yield replace(
            same[0],
            launches={name: own for each in same for name, own in each.launches.items()},
            starts={name: start_s for each in same for name, start_s in each.starts.items()},
            busy=frozenset().union(*(each.busy for each in same)),
            soak_s=min(soaks, default=None),
        )


def _unnamed(series: Series) -> Series:
    """Return the series without its function and its clock."""
    left_out = ("backend", "method")
    return replace(
        series, fields={name: v for name, v in series.fields.items() if name not in left_out}
    )


def clock_notes(records: Sequence[Record]) -> Iterator[str]:
    """Yield where functions were timed by different clocks, and what they time differently."""
    measured = [r for r in records if isinstance(r, Measured) and r.case.family == CUSTOM]
    for shape, own in group_by(measured, lambda r: r.operator.op.shape_text).items():
        methods = {
            record.operator.backend: record.samples.method.partition("/")[0] for record in own
        }
        if len(set(methods.values())) > 1:
            clocks = ", ".join(f"{name} by {method}" for name, method in methods.items())
            yield f"{shape}: {clocks}: only a graph is without the host's launch overhead"


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
        sys.stdout.writelines(f"{note}\n" for note in clock_notes(records))
    except ConfigError as error:
        sys.stdout.write(f"no ratio of {' and '.join(side.name for side in sides)}: {error}\n")
