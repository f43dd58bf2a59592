"""Series of tables that other tools printed, for a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.comparison.comparison import UNKNOWN, Series
from stepmark.ground.errors import ConfigError
from stepmark.ground.reading import Reading, Table
from stepmark.model.collectives import Collective, busbw_factor
from stepmark.text_tables.printed_figures import parse_number, rounding_error
from stepmark.text_tables.slide_tables import rate_units


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDefaults:
    """Facts from the command line, for files that do not state them."""

    collective: str | None = None
    num_ranks: int | None = None
    placement: str | None = None  # the only one that is compared
    unit: str | None = None  # "rate" or "time": of figures that say neither


def table_list(path: Path, tables: Sequence[Table]) -> str:
    """Return how to name each table of a file."""
    words = [f"{path}:{table.index} ({table.title or table.tool})" for table in tables]
    return ", ".join(words[:6]) + (f" and {len(words) - 6} more" if len(words) > 6 else "")


def series_of_tables(
    path: Path, tables: Sequence[Table], column: str, defaults: InputDefaults
) -> list[Series]:
    """Return the series of a file. Repeats in a table are values of one launch."""
    groups: dict[tuple[object, ...], tuple[Table, list[Reading]]] = {}
    for table in tables:
        for reading in table.readings:
            # nccl-tests prints rows of size 0 where a message is too small to share out.
            if reading.size_bytes == 0 or (column and reading.column != column):
                continue
            if reading.num_wrong:
                continue
            of_table = (table.collective, table.method, table.unit, table.num_ranks)
            key = (*of_table, *reading.measurement)
            first, readings = groups.setdefault(key, (table, []))
            if first is not table:
                raise ConfigError(
                    "compare", path, f"one of its tables: {table_list(path, tables)}"
                )
            readings.append(reading)
    all_series = (_series_of_readings(path, *group, defaults) for group in groups.values())
    return [series for series in all_series if series.launches or series.below is not None]


def _series_of_readings(
    path: Path, table: Table, readings: Sequence[Reading], defaults: InputDefaults
) -> Series:
    first = readings[0]
    collective = table.collective or defaults.collective or ""
    num_ranks = table.num_ranks or defaults.num_ranks
    times = tuple(r.time_s for r in readings if r.time_s is not None and r.time_s > 0)
    rates = tuple(r.rate for r in readings if r.rate is not None and r.rate > 0)
    values = times or rates
    (named,) = rate_units([first.column])
    rate_unit = table.unit or (named if named != "none" else defaults.unit) or UNKNOWN
    unit = "s" if times else rate_unit
    factor = None
    if num_ranks is not None and collective in list(Collective):
        factor = busbw_factor(Collective(collective), num_ranks) or None
    return Series(
        fields={
            "family": collective,
            "label": first.label,
            "dtype": first.dtype,
            "redop": first.redop,
            "root": first.root,
            "placement": first.placement,
            "num_ranks": num_ranks,
            "method": table.method,
        },
        size_bytes=first.size_bytes,
        unit=unit,
        launches={f"{path}:{table.index}": values} if values else {},
        busbw_factor=factor if times else None,
        below=None if values else first.rate_below,
        rounding=max(map(_rounding, readings)) if times else 0.0,
    )


def _rounding(reading: Reading) -> float:
    """Return the unit of a time's last digit over the time; 0 where it is unknown."""
    text = reading.printed[0] if reading.printed else ""
    value = parse_number(text) if text else None
    return 2 * rounding_error(text) / value if value else 0.0
