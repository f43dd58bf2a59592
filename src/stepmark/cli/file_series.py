"""Tables that other tools printed to series, one launch per file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepmark.core.collectives import Collective, busbw_factor
from stepmark.core.comparison import UNKNOWN, Series
from stepmark.core.errors import ConfigError
from stepmark.core.reading import Reading, Table
from stepmark.trace.parse_numbers import parse_number, rounding_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the user says of files that do not say it themselves."""

    collective: str | None = None
    num_ranks: int | None = None
    placement: str | None = None  # the only one that is compared
    unit: str | None = None  # "rate" or "time": of figures that say neither


def listed(path: Path, tables: Sequence[Table]) -> str:
    """How to name each table of a file."""
    shown = [f"{path}:{table.index} ({table.title or table.tool})" for table in tables]
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def series_of_tables(
    path: Path, tables: Sequence[Table], column: str, told: Told
) -> list[Series]:
    """Repeats of a sweep within a file are values of one launch."""
    held: dict[tuple[object, ...], tuple[Table, list[Reading]]] = {}
    for table in tables:
        for reading in table.readings:
            # nccl-tests prints rows of size 0 where a message is too small to share out.
            if reading.size_bytes == 0 or (column and reading.column != column):
                continue
            if reading.num_wrong:
                continue
            key = _reading_key(reading, table)
            first, readings = held.setdefault(key, (table, []))
            if first is not table or any(r.cycle == reading.cycle for r in readings):
                raise ConfigError("compare", path, f"one of its tables: {listed(path, tables)}")
            readings.append(reading)
    found = [_of_readings(path, table, readings, told) for table, readings in held.values()]
    return [series for series in found if series.launches or series.below is not None]


def _reading_key(reading: Reading, table: Table) -> tuple[object, ...]:
    return (
        *(table.collective, table.method, table.unit, table.num_ranks),
        *(reading.label, reading.size_bytes, reading.dtype, reading.redop, reading.root),
        *(reading.placement, reading.column),
    )


def _of_readings(path: Path, table: Table, readings: Sequence[Reading], told: Told) -> Series:
    first = readings[0]
    collective = table.collective or told.collective or ""
    num_ranks = table.num_ranks or told.num_ranks
    times = tuple(r.time_s for r in readings if r.time_s is not None and r.time_s > 0)
    rates = tuple(r.rate for r in readings if r.rate is not None and r.rate > 0)
    values = times or rates
    unit = "s" if times else table.unit or told.unit or UNKNOWN
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
        busbw_factor=_factor(collective, num_ranks) if times else None,
        below=None if values else first.rate_below,
        rounding=max(map(_rounding, readings)) if times else 0.0,
    )


def _rounding(reading: Reading) -> float:
    """Unit of the last printed digit of a time, over the time; 0 where it is not known."""
    text = reading.printed[0] if reading.printed else ""
    value = parse_number(text) if text else None
    return 2 * rounding_error(text) / value if value else 0.0


def num_wrong(tables: Sequence[Table]) -> int:
    """Readings whose data was wrong: fast or not, they are not compared."""
    return sum(bool(reading.num_wrong) for table in tables for reading in table.readings)


def _factor(collective: str, num_ranks: int | None) -> float | None:
    if num_ranks is None or collective not in list(Collective):
        return None
    return busbw_factor(Collective(collective), num_ranks) or None
