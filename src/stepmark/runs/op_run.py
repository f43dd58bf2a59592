"""What is shown of a run of `stepmark op`: its rows, and how your own functions compare."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepmark.cases.record import Record
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
    series, notes = series_of_records(
        record for record in records if record.case.family == CUSTOM
    )
    return [
        Side(name=name, series=tuple(map(_unnamed, own)), notes=notes)
        for name, own in group_by(series, lambda each: str(each.fields["backend"])).items()
    ]


def _unnamed(series: Series) -> Series:
    """Return the series without its function, which is the side's name."""
    fields = {name: value for name, value in series.fields.items() if name != "backend"}
    return replace(series, fields=fields)


def _compare_functions(records: Sequence[Record]) -> None:
    """Print the speed of each function over the first one's, with equal arguments."""
    sides = functions(records)
    if len(sides) < 2:
        return
    sys.stdout.write("\n")
    try:
        printed(compare(sides, Options()), console())
    except ConfigError as error:
        sys.stdout.write(f"no ratio of {' and '.join(side.name for side in sides)}: {error}\n")
