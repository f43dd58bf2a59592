"""Tables that were found in files: flat rows for JSON and CSV, a listing for a terminal."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from stepmark.core.collectives import Collective
from stepmark.core.columns import Row
from stepmark.core.finding import Finding
from stepmark.core.reading import Table
from stepmark.core.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

Found = Sequence[tuple[Table, Sequence[Finding]]]
_TITLE_WIDTH = 60


def rows(found: Found) -> list[Row]:
    """One flat row per table; unknown is None, as in all rows of ours."""
    return [_row(table, findings) for table, findings in found]


def name_of(table: Table) -> str:
    """FILE:2, as a command line names the second table of a file."""
    return f"{table.file}:{table.index}"


def print_found(found: Found, console: "Console", *, file_width: int = 40) -> None:
    """A block per table: what it is, how each fact is known, what is odd."""
    for table, findings in found:
        row = _row(table, findings)
        _say(console, f"{_shortened(name_of(table), file_width)}  {table.title[:_TITLE_WIDTH]}")
        for line in (*_facts(row), *(f"note: {note}" for note in table.notes)):
            _say(console, f"    {line}")
        for finding in findings:
            _say(console, f"    {finding.severity}: {finding.text}")


def _row(table: Table, findings: Sequence[Finding]) -> Row:
    # Times stand in seconds, whatever their headings say; a column per setting needs it told.
    timed = table.columns and any(one.time_s is not None for one in table.readings)
    sizes = [one.size_bytes for one in table.readings if one.size_bytes is not None]
    return {
        "table": name_of(table),
        "file": table.file,
        "index": table.index,
        "first_line": table.first_line,
        "last_line": table.last_line,
        "title": table.title or None,
        "tool": table.tool,
        "version": table.version or None,
        "collective": table.collective or None,
        "collective_from": table.collective_from or None,
        "num_ranks": table.num_ranks,
        "num_ranks_from": table.num_ranks_from or None,
        "method": table.method or None,
        "unit": table.unit or ("s" if timed else None),
        "columns": ", ".join(table.columns) or None,
        "rows": len(
            {
                (one.line, one.size_bytes, one.dtype, one.redop, one.root, one.cycle)
                for one in table.readings
            }
        ),
        "readings": len(table.readings),
        "min_bytes": min(sizes, default=None),
        "max_bytes": max(sizes, default=None),
        "findings": len(findings),
        "notes": "; ".join(table.notes) or None,
    }


def _facts(row: Mapping[str, object]) -> list[str]:
    """What is known, with the evidence; what is not, said so."""
    tool = " ".join(str(row[key]) for key in ("tool", "version", "method") if row[key])
    plural = "" if row["rows"] == 1 else "s"
    lines = [f"{tool}, {row['rows']} row{plural}{_range(row)}"]
    what = "collective" if row["collective"] in list(Collective) else "figure"
    for key, word in (("collective", what), ("num_ranks", "ranks")):
        if row[key] is not None:
            why = f" ({row[f'{key}_from']})" if row[f"{key}_from"] else ""
            lines.append(f"{word}: {row[key]}{why}")
    if row["columns"]:
        unit = row["unit"] or "unit not said"
        lines.append(f"columns ({unit}): {row['columns']}")
    elif row["unit"]:
        lines.append(f"unit: {row['unit']}")
    return lines


def _range(row: Mapping[str, object]) -> str:
    low, high = row["min_bytes"], row["max_bytes"]
    if not isinstance(low, int) or not isinstance(high, int):
        return ""
    return f", {format_bytes(low)} to {format_bytes(high)}"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _say(console: "Console", line: str) -> None:
    """As it stands: titles and notes of other people's files may hold brackets."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
