"""Rows to text: how a cell reads, and the table on a terminal or in a pipe."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from stepmark.core.units import format_bytes, format_time
from stepmark.report.tables import Row, number, text

if TYPE_CHECKING:
    from rich.console import Console


_TIMES = {
    *("time_s", "mean_s", "p10_s", "p50_s", "p90_s", "p99_s", "min_s", "max_s", "time_min_s"),
    *("waited_for_s", "late_s", "issue_s", "skew_s", "beside_alone_s", "beside_together_s"),
    *("fwd_s", "bwd_s", "optim_s", "other_s", "data_s", "data_max_s", "build_s", "first_s"),
}


_FORMATS = {
    "max_rel_err": ".1e",
    "vs_median_rank": ".3f",
    "fwd_vs_median_rank": ".3f",
    "slowdown": ".3f",
    "slowdown_beside": ".3f",
}


def digits(value: float | None, places: int = 4) -> str:
    """Four significant digits without an exponent; never fewer than the whole part."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10 ** (places - 1) else f"{value:.{places}g}"


def cell(row: Row, key: str) -> str:
    """A cell as people read it: times with their unit, shares in percent."""
    value = number(row, key)
    if value is None or isinstance(row.get(key), bool):
        return text(row, key)
    if key == "size_bytes":
        return format_bytes(value)
    if key in _TIMES:
        return format_time(value)
    if key.startswith("pct_") or key.endswith("_pct"):
        return f"{value:.1f}"
    return f"{value:{_FORMATS[key]}}" if key in _FORMATS else digits(value)


# key, heading, numeric, how soon it goes when the terminal is narrow (0 = never)
Column = tuple[str, str, bool, int]
_PRINTED: tuple[Column, ...] = (
    ("model", "model", False, 0),
    ("role", "role", False, 0),
    ("pass", "pass", False, 0),
    ("shape", "shape", False, 0),
    ("scale", "scale", False, 2),
    ("dtype", "dtype", False, 3),
    ("backend", "backend", False, 2),
    ("rank", "rank", True, 0),
    ("time_s", "time", True, 0),
    ("spread_pct", "+- %", True, 3),
    ("vs_median_rank", "/ median", True, 0),
    ("tflops", "TFLOP/s", True, 0),
    ("gb_per_s", "GB/s", True, 1),
    ("pct_peak", "% peak", True, 1),
    ("pct_ceiling", "% ceiling", True, 4),
    ("bound", "bound", False, 6),
    ("max_rel_err", "err", True, 5),
    ("pct_reference", "% ref", True, 1),
    ("rate", "rate", False, 7),
    ("status", "status", False, 0),
)


def print_rows(
    table: Sequence[Row], console: "Console", columns: Sequence[Column] = _PRINTED
) -> None:
    """The rows that ran as a table, then one line per skipped or failed case."""
    ran = [row for row in table if row["status"] in ("measured", "wrong")]
    if ran and console.is_terminal:
        _print_fitted(ran, console, columns)
    elif ran:
        for line in _plain_lines(_fitting(ran, None, columns), ran):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for row in table:
        if row["status"] in ("skipped", "failed"):
            line = f"{row['status']}  {describe(row)}: {text(row, 'message')}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_fitted(ran: Sequence[Row], console: "Console", printed: Sequence[Column]) -> None:
    """A table of the columns that fit; words fold when even those are too wide."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    columns = _fitting(ran, console.width, printed)
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for _, heading, right, _ in columns:
        justify: Literal["left", "right"] = "right" if right else "left"
        drawn.add_column(heading, justify=justify, overflow="fold", no_wrap=right)
    for row in ran:
        style = "red" if row["status"] == "wrong" or row["over_limit"] else ""
        drawn.add_row(*(Text(_printed(row, key)) for key, *_ in columns), style=style)
    console.print(drawn)


def _plain_lines(columns: Sequence[Column], ran: Sequence[Row]) -> list[str]:
    """The same table as wide as it needs to be: a file or a pipe has no edge."""
    widths = [_width(ran, *column[:2]) - 2 for column in columns]
    lines = [[heading for _, heading, *_ in columns]]
    lines += [[_printed(row, key) for key, *_ in columns] for row in ran]
    return [
        "  ".join(
            value.rjust(width) if column[2] else value.ljust(width)
            for value, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    ]


def describe(row: Row) -> str:
    """A case in one line: where it stands in a model, what it computes, how."""
    keys = ("model", "role", "pass", "family", "shape", "dtype", "backend")
    return " ".join(word for word in (text(row, key) for key in keys) if word)


def _printed(row: Row, key: str) -> str:
    if key == "rank" and row.get("rank") is None and row["num_ranks"] != 1:
        return "all"
    if key == "role":
        return text(row, "role") or ("" if "collective" in row else text(row, "family"))
    if key == "status":
        above = "above limit" if row["over_limit"] else ""
        return above if row["status"] == "measured" else f"{row['status']} {above}".strip()
    return cell(row, key)


def _width(table: Sequence[Row], key: str, heading: str) -> int:
    return max([len(heading), *(len(_printed(row, key)) for row in table)]) + 2


def _fitting(
    table: Sequence[Row], available: int | None, printed: Sequence[Column] = _PRINTED
) -> list[Column]:
    """Columns with anything to say; on a terminal, the least important leave first."""
    columns = [c for c in printed if any(_printed(row, c[0]) for row in table)]
    while available is not None:
        wide = sum(_width(table, *c[:2]) for c in columns) > available
        least = max(columns, key=lambda c: c[3], default=None)
        if not wide or least is None or not least[3]:
            break
        columns.remove(least)
    return columns
